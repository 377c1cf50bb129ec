// The two halves of filtered_lrelu's pipeline, up and down, with the filters that they run and the images that they
// read and write.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "pixels.h"

namespace pixfuse {
namespace {

// --- filters and their phases ----------------------------------------------------------------------------------

inline int64_t modulo(int64_t a, int64_t n) { return (a % n + n) % n; }
inline int64_t ceil_div(int64_t a, int64_t n) { return a > 0 ? (a + n - 1) / n : -(-a / n); }
inline int64_t round_up(int64_t a, int64_t n) { return ceil_div(a, n) * n; }

// Taps in the order in which they meet the image: x and y of a separable filter, or full [h, w]. The gain is in them.
template <class A>
struct Filter {
  int64_t w = 1, h = 1;
  bool separable = true;
  std::vector<A> x{A(1)}, y{A(1)}, full;

  Filter(const std::optional<Tensor>& f, bool flip, double gain) {
    if (!f) {
      y[0] = A(gain);
      return;
    }
    const bool flat = f->dim() == 1;
    h = f->size(0), w = f->size(flat ? 0 : 1);
    const int64_t stride_x = f->stride(flat ? 0 : 1), stride_y = flat ? 0 : f->stride(0), rows = flat ? 1 : h;
    std::vector<double> taps(rows * w);
    dispatch_floating(f->scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      for (int64_t a = 0; a < rows; ++a) {
        for (int64_t b = 0; b < w; ++b) {
          const int64_t row = flip ? a : rows - 1 - a, column = flip ? b : w - 1 - b;
          taps[a * w + b] = double(load(data<T>(*f)[row * stride_y + column * stride_x]));
        }
      }
    });
    separable = flat || h == 1 || w == 1;
    auto scaled = [&](double by) {
      std::vector<A> result(taps.size());
      for (size_t i = 0; i < taps.size(); ++i) result[i] = A(taps[i] * by);
      return result;
    };
    if (flat)
      x = scaled(1), y = scaled(gain);
    else if (h == 1)
      x = scaled(1), y[0] = A(gain);
    else if (w == 1)
      y = scaled(gain);
    else
      full = scaled(gain);
  }
};

// Upsampling by taps: the sample at position m sees tap p + up * k of source r + k, where p, its phase, and r follow
// from m + p - pad = up * r. Per phase only the taps that meet a sample are kept.
template <class A>
struct Up {
  int64_t up, pad_x, pad_y;
  Filter<A> f;
  std::vector<std::vector<A>> x, y, full;  // [phase], [phase], [phase_y * up + phase_x]

  Up(const std::optional<Tensor>& filter, int64_t up, int64_t pad_x, int64_t pad_y, bool flip, double gain)
      : up(up), pad_x(pad_x), pad_y(pad_y), f(filter, flip, gain), x(up), y(up), full(f.separable ? 0 : up * up) {
    for (int64_t p = 0; p < up; ++p) {
      rows.push_back(p < f.h ? (f.h - p - 1) / up + 1 : 0);
      columns.push_back(p < f.w ? (f.w - p - 1) / up + 1 : 0);
    }
    if (f.separable) {
      for (int64_t k = 0; k < f.w; ++k) x[k % up].push_back(f.x[k]);
      for (int64_t k = 0; k < f.h; ++k) y[k % up].push_back(f.y[k]);
      return;
    }
    for (int64_t a = 0; a < f.h; ++a) {
      for (int64_t b = 0; b < f.w; ++b) full[a % up * up + b % up].push_back(f.full[a * f.w + b]);
    }
  }
  std::vector<int64_t> rows, columns;  // how many taps a phase has
};

// A ring of rows that holds the last `rows` of them.
template <class A>
struct Ring {
  A* at = nullptr;
  int64_t rows = 1, stride = 0;

  A* row(int64_t r) const { return at + r % rows * stride; }
  // f(k, row r + k) for k < n
  template <class F>
  void each(int64_t r, int64_t n, const F& f) const {
    int64_t slot = r % rows;
    for (int64_t k = 0; k < n; ++k, slot = slot + 1 == rows ? 0 : slot + 1) f(k, at + slot * stride);
  }
};

// --- images and tiles ------------------------------------------------------------------------------------------

template <class T>
struct Image {
  T* at;
  int64_t n, c, h, w, stride_n, stride_c, stride_h, stride_w;

  Image(const Tensor& t, T* at)
      : at(at),
        n(t.size(0)),
        c(t.size(1)),
        h(t.size(2)),
        w(t.size(3)),
        stride_n(t.stride(0)),
        stride_c(t.stride(1)),
        stride_h(t.stride(2)),
        stride_w(t.stride(3)) {}
};

// Which planes and tiles the lanes of a job hold. As a block they are consecutive channels of one tile.
template <class A>
struct Lanes {
  int64_t count = 0;
  bool block = false;
  int64_t n[kLanes<A>], c[kLanes<A>], y0[kLanes<A>], x0[kLanes<A>];
};

// A thread's scratch: what is taken from it stays until the next reset.
template <class A>
class Scratch {
 public:
  void reserve(int64_t vectors) {
    memory_.reset(new unsigned char[(vectors + 1) * kVectorBytes]);
    start_ = memory_.get() + (kVectorBytes - reinterpret_cast<uintptr_t>(memory_.get()) % kVectorBytes) % kVectorBytes;
  }
  void reset() { used_ = 0; }
  A* take(int64_t vectors) {
    A* result = reinterpret_cast<A*>(start_ + used_ * kVectorBytes);
    used_ += vectors;
    return result;
  }

 private:
  std::unique_ptr<unsigned char[]> memory_;
  unsigned char* start_ = nullptr;
  int64_t used_ = 0;
};

// Rows of the upsampled image, in order, from the rows of an image.
template <class T>
class UpStage {
  using A = acc_t<T>;
  static constexpr int64_t L = kLanes<A>;

 public:
  UpStage(const Image<const T>& image, const std::vector<A>& bias, const Up<A>& up)
      : image_(image), bias_(bias), up_(up), pointers_(up.f.separable ? std::max(up.f.w, up.f.h) : up.f.w * up.f.h) {}

  // Vectors of scratch that a tile of upsampled width `width` needs.
  static int64_t need(const Up<A>& up, int64_t width) {
    return (ceil_div(up.f.h, up.up) + 1) * round_up(seen(up, width), L) + 2 * round_up(seen(up, width), kFew);
  }

  // Begin a tile whose first upsampled sample is (my[l], mx[l]) for lane l; all are congruent modulo the factor.
  void begin(Scratch<A>& scratch, const Lanes<A>& lanes, const int64_t* my, const int64_t* mx, int64_t width) {
    lanes_ = &lanes;
    groups_ = groups(up_, width);
    seen_ = seen(up_, width);
    source_ = round_up(seen_, L);
    ring_.rows = ceil_div(up_.f.h, up_.up);
    ring_.stride = source_ * L;
    ring_.at = scratch.take(ring_.rows * source_);
    planes_ = scratch.take(source_);
    for (A*& columns : columns_) columns = scratch.take(round_up(seen_, kFew));
    for (int64_t l = 0; l < lanes.count; ++l) {
      row_[l] = ceil_div(my[l] - up_.pad_y, up_.up);
      const int64_t column = ceil_div(mx[l] - up_.pad_x, up_.up);
      first_[l] = std::clamp<int64_t>(-column, 0, source_);
      last_[l] = std::clamp<int64_t>(image_.w - column, first_[l], source_);
      at_[l] = image_.at + lanes.n[l] * image_.stride_n + lanes.c[l] * image_.stride_c + row_[l] * image_.stride_h +
               (column + first_[l]) * image_.stride_w;
      block_bias_[l] = bias_.empty() ? A(0) : bias_[lanes.c[l]];
    }
    row_at_ = first_row_ = 0;
    phase_ = modulo(up_.pad_y - my[0], up_.up);
    lead_ = up_.up - 1 - modulo(up_.pad_x - mx[0], up_.up);
    next_ = 0;
    ready_ = -1;
  }

  // The upsampled row i of the tile, in `to`, activated or times the derivative at `at`. Rows are asked for in rising
  // order.
  template <Then then>
  void row(int64_t i, A* to, Activation<A> act, const A* at) {
    for (; row_at_ < i; ++row_at_) {
      if (phase_-- == 0) phase_ = up_.up - 1, ++first_row_;
    }
    const int64_t phase = phase_, first = first_row_, rows = up_.rows[phase];
    for (next_ = std::max(next_, first); next_ < first + rows; ++next_) read(next_);
    const A* columns = columns_[0];
    if (up_.f.separable && i == ready_) {
      columns = columns_[1];
    } else if (up_.f.separable) {
      fetch();
      ring_.each(first, rows, [&](int64_t k, const A* row) { pointers_[k] = row; });
      const bool two = phase > 0 && up_.rows[phase - 1] == rows;  // the next row sees the same source rows
      const std::vector<A>*taps = &up_.y[phase], *next = two ? taps - 1 : taps;
      sum<A>(two, {{columns_[0], columns_[1]}, 1, pointers_.data(), 1, {taps->data(), next->data()}, rows}, seen_);
      ready_ = two ? i + 1 : -1;
    }
    // A group of samples, one of each phase, sees the same source columns.
    for (int64_t p = up_.up - 1; p >= 0; --p) {
      const int64_t count = up_.columns[p], place = (up_.up - 1 - p - lead_) * L;
      const bool two = p > 0 && up_.columns[p - 1] == count;
      const std::vector<A>* taps = up_.f.separable ? &up_.x[p] : &up_.full[phase * up_.up + p];
      if (up_.f.separable) {
        for (int64_t b = 0; b < count; ++b) pointers_[b] = columns + b * L;
      } else {
        ring_.each(first, rows, [&](int64_t a, const A* row) {
          for (int64_t b = 0; b < count; ++b) pointers_[a * count + b] = row + b * L;
        });
      }
      fetch();
      sum<A, then>(two,
                   {{to + place, to + place + L},
                    up_.up,
                    pointers_.data(),
                    1,
                    {taps->data(), taps[two ? -1 : 0].data()},
                    int64_t(taps->size()),
                    act,
                    {at + place, at + place + L}},
                   groups_);
      if (two) --p;
    }
  }

  // Rows are written in whole groups, of which some are beyond the tile.
  static int64_t before(const Up<A>& up) { return up.up - 1; }
  static int64_t after(const Up<A>& up) { return kFew * up.up; }

 private:
  static int64_t groups(const Up<A>& up, int64_t width) { return round_up(ceil_div(up.up - 1 + width, up.up), kFew); }
  static int64_t seen(const Up<A>& up, int64_t width) { return groups(up, width) + ceil_div(up.f.w, up.up) - 1; }

  // Ask memory for a share of the next source row: there is a call for each sum, so that requests and sums overlap.
  void fetch() {
    const int64_t calls = (up_.up + 1) / 2 * (up_.up + 1), call = fetched_++;
    const int64_t whole = lanes_->block ? last_[0] - first_[0] : lanes_->count, share = (whole + calls - 1) / calls;
    const int64_t begin = call * share, end = std::min(begin + share, whole), skip = next_ * image_.stride_h;
    if (lanes_->block) {
      if (row_[0] + next_ < 0 || row_[0] + next_ >= image_.h) return;
      const T* x = at_[0] + skip + begin * image_.stride_w;
      for (int64_t i = begin; i < end; ++i, x += image_.stride_w) __builtin_prefetch(x);
      return;
    }
    for (int64_t l = begin; l < end; ++l) {
      if (row_[l] + next_ < 0 || row_[l] + next_ >= image_.h) continue;
      const T *x = at_[l] + skip, *stop = x + (last_[l] - first_[l]) * image_.stride_w;
      for (; x < stop; x += 64 / sizeof(T)) __builtin_prefetch(x);
    }
  }

  // Bring source row r (counted from the tile's first) into the ring.
  void read(int64_t r) {
    A* pixels = ring_.row(r);
    fetched_ = 0;
    bool inside = false;
    for (int64_t l = 0; l < lanes_->count; ++l) inside |= 0 <= row_[l] + r && row_[l] + r < image_.h;
    if (!inside) {
      std::memset(pixels, 0, ring_.stride * sizeof(A));
    } else if (lanes_->block) {
      read_block(r, pixels);
    } else {
      read_planes(r, pixels);
    }
  }

  void read_block(int64_t r, A* pixels) {
    const int64_t first = first_[0], last = last_[0];
    std::memset(pixels, 0, first * kVectorBytes);
    load_pixels(at_[0] + r * image_.stride_h, image_.stride_w, block_bias_, reinterpret_cast<T*>(planes_),
                pixels + first * L, last - first, lanes_->count);
    std::memset(pixels + last * L, 0, (source_ - last) * kVectorBytes);
  }

  void read_planes(int64_t r, A* pixels) {
    for (int64_t l = 0; l < L; ++l) {
      A* row = planes_ + l * source_;
      int64_t first = source_, last = source_;
      if (l < lanes_->count && 0 <= row_[l] + r && row_[l] + r < image_.h) {
        first = first_[l], last = last_[l];
        load_row(at_[l] + r * image_.stride_h, image_.stride_w, block_bias_[l], row + first, last - first);
      }
      std::fill(row, row + first, A(0));
      std::fill(row + last, row + source_, A(0));
    }
    PIXFUSE_WIDEST(transpose<A, true>(planes_, pixels, source_, source_));
  }

  const Image<const T>& image_;
  const std::vector<A>& bias_;
  const Up<A>& up_;
  const Lanes<A>* lanes_ = nullptr;
  std::vector<const A*> pointers_;
  int64_t groups_ = 0, seen_ = 0, source_ = 0, next_ = 0, fetched_ = 0, ready_ = -1, lead_ = 0;
  int64_t row_at_ = 0, phase_ = 0, first_row_ = 0;  // the upsampled row at work, and the source row that it begins at
  const T* at_[L] = {};                             // per lane: source row 0, from its first column inside the image
  int64_t row_[L] = {}, first_[L] = {}, last_[L] = {};
  A block_bias_[L] = {};
  Ring<A> ring_;
  A *planes_ = nullptr, *columns_[2] = {};
};

// Rows of the result from rows of the upsampled image: y[j] = sum over a of tap[a] * row[j * down + a].
template <class T>
class DownStage {
  using A = acc_t<T>;
  static constexpr int64_t L = kLanes<A>;

 public:
  // Upsampled rows are written from `before` pixels before their first to `after` ones after their last.
  DownStage(const Filter<A>& f, int64_t down, int64_t before, int64_t after)
      : f_(f), down_(down), before_(before), after_(after), pointers_(f.separable ? std::max(f.w, f.h) : f.w * f.h) {}

  // The upsampled pixels that `width` results see, and vectors of scratch for a tile of them.
  int64_t upsampled(int64_t width, int64_t taps) const { return (width - 1) * down_ + taps; }
  int64_t need(int64_t width) const {
    const int64_t padded = round_up(width, kFew), row = before_ + upsampled(padded, f_.w) + after_;
    return (f_.separable ? row + (ring_rows() + 2) * padded : f_.h * row) + 2 * round_up(width, L);
  }

  void begin(Scratch<A>& scratch, int64_t width) {
    width_ = width;
    const int64_t padded = round_up(width, kFew), row = before_ + upsampled(padded, f_.w) + after_;
    ring_.rows = ring_rows();
    ring_.stride = (f_.separable ? padded : row) * L;
    ring_.at = scratch.take(ring_.rows * ring_.stride / L);
    if (f_.separable) {
      row_ = scratch.take(row);
      for (A*& filtered : filtered_) filtered = scratch.take(padded);
    }
    result_ = scratch.take(round_up(width, L));
    planes_ = scratch.take(round_up(width, L));
  }

  // Where upsampled row i is to be written.
  A* row(int64_t i) { return (f_.separable ? row_ : ring_.row(i)) + before_ * L; }

  // Upsampled row i is there: add it to the results that see it, and write the one that it completes.
  void push(int64_t i, int64_t height, const Lanes<A>& lanes, const Image<T>& y) {
    const int64_t rows = f_.separable && f_.h % 2 == 0 && down_ % 2 == 0 ? 2 : 1;  // added at a time
    const int64_t complete = ceil_div(i + 1 - f_.h, down_);
    if (f_.separable) {
      for (int64_t b = 0; b < f_.w; ++b) pointers_[b] = row(i) + b * L;
      sum<A>(false, {{filtered_[i % rows]}, 1, pointers_.data(), down_, {f_.x.data()}, f_.w}, width_);
      if (i % rows < rows - 1) return;
      const int64_t start = i + 1 - rows, newest = std::min(start / down_, height - 1);
      for (int64_t j = std::max<int64_t>(complete, 0); j <= newest; ++j) {
        A* to = ring_.row(j);
        const int64_t k = start - j * down_;
        spread_.push_back({k + rows == f_.h ? result_ : to, k == 0 ? nullptr : to, &f_.y[k]});
      }
      const Spread<A> all{{filtered_[0], filtered_[1]}, spread_.data(), int64_t(spread_.size())};
      if (rows == 2)
        PIXFUSE_WIDEST(spread_all<A, 2>(all, width_));
      else
        PIXFUSE_WIDEST(spread_all<A, 1>(all, width_));
      spread_.clear();
    }
    if (complete < 0 || complete * down_ != i + 1 - f_.h) return;
    if (!f_.separable) {
      ring_.each(complete * down_, f_.h, [&](int64_t a, const A* row) {
        for (int64_t b = 0; b < f_.w; ++b) pointers_[a * f_.w + b] = row + (before_ + b) * L;
      });
      sum<A>(false, {{result_}, 1, pointers_.data(), down_, {f_.full.data()}, f_.w * f_.h}, width_);
    }
    write(complete, lanes, y);
  }

 private:
  // Rows that are kept: results at work, or else upsampled rows.
  int64_t ring_rows() const { return f_.separable ? ceil_div(f_.h, down_) : f_.h; }

  void write(int64_t j, const Lanes<A>& lanes, const Image<T>& y) {
    auto target = [&](int64_t l) {
      return y.at + lanes.n[l] * y.stride_n + lanes.c[l] * y.stride_c + (lanes.y0[l] + j) * y.stride_h +
             lanes.x0[l] * y.stride_w;
    };
    if (lanes.block) {
      store_pixels(result_, reinterpret_cast<T*>(planes_), target(0), y.stride_w, std::min(width_, y.w - lanes.x0[0]),
                   lanes.count);
      return;
    }
    const int64_t stride = round_up(width_, L);
    PIXFUSE_WIDEST(transpose<A, false>(result_, planes_, stride, stride));
    for (int64_t l = 0; l < lanes.count; ++l) {
      if (lanes.y0[l] + j >= y.h) continue;
      store_row(planes_ + l * stride, target(l), y.stride_w, std::min(width_, y.w - lanes.x0[l]));
    }
  }

  const Filter<A>& f_;
  int64_t down_, before_, after_;
  std::vector<const A*> pointers_;
  int64_t width_ = 0;
  Ring<A> ring_;
  std::vector<Part<A>> spread_;
  A *row_ = nullptr, *filtered_[2] = {}, *result_ = nullptr, *planes_ = nullptr;
};

}  // namespace
}  // namespace pixfuse
