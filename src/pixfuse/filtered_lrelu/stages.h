// The two halves of filtered_lrelu's pipeline, up and down, with the filters that they run and the images that they
// read and write.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

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
#ifdef __SANITIZE_ADDRESS__  // every piece by itself, so that the sanitizer knows where it ends
  void reserve(int64_t) {}
  void reset() { pieces_.clear(); }
  A* take(int64_t vectors) {
    pieces_.emplace_back(static_cast<A*>(::operator new(vectors * kVectorBytes, kAlignment)));
    return pieces_.back().get();
  }

 private:
  static constexpr std::align_val_t kAlignment{kVectorBytes};
  struct Free {
    void operator()(A* piece) const { ::operator delete(piece, kAlignment); }
  };
  std::vector<std::unique_ptr<A, Free>> pieces_;
#else
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
#endif
};

// Batches of rows of the upsampled image, in order, from the rows of an image.
template <class T>
class UpStage {
  using A = acc_t<T>;
  static constexpr int64_t L = kLanes<A>;

 public:
  UpStage(const Image<const T>& image, const std::vector<A>& bias, const Up<A>& up)
      : image_(image),
        bias_(bias),
        up_(up),
        pointers_(up.f.separable ? up.f.w : up.f.w * up.f.h),
        gathered_(ring_rows(up)) {}

  // Vectors of scratch that a tile of upsampled width `width` needs.
  static int64_t need(const Up<A>& up, int64_t width) {
    return (ring_rows(up) + 1) * source(up, width) + kBatch * seen(up, width);
  }
  // Samples are written in whole groups, of which some are beyond those asked for.
  static int64_t before(const Up<A>& up) { return up.up - 1; }
  static int64_t after(const Up<A>& up) { return (kFew + 1) * up.up; }  // of any width: up * groups() - width is less

  // Begin a tile whose first upsampled sample is (my[l], mx[l]) for lane l; all are congruent modulo the factor.
  void begin(Scratch<A>& scratch, const Lanes<A>& lanes, const int64_t* my, const int64_t* mx, int64_t width) {
    lanes_ = &lanes;
    groups_ = groups(up_, width);
    source_ = source(up_, width);
    ring_.rows = ring_rows(up_);
    ring_.stride = source_ * L;
    ring_.at = scratch.take(ring_.rows * source_);
    planes_ = scratch.take(source_);
    seen_ = seen(up_, width);
    for (A*& columns : columns_) columns = scratch.take(seen_);
    for (int64_t l = 0; l < lanes.count; ++l) {
      row_[l] = ceil_div(my[l] - up_.pad_y, up_.up);
      const int64_t column = ceil_div(mx[l] - up_.pad_x, up_.up);
      first_[l] = std::clamp<int64_t>(-column, 0, source_);
      last_[l] = std::clamp<int64_t>(image_.w - column, first_[l], source_);
      at_[l] = image_.at + lanes.n[l] * image_.stride_n + lanes.c[l] * image_.stride_c + row_[l] * image_.stride_h +
               (column + first_[l]) * image_.stride_w;
      block_bias_[l] = bias_.empty() ? A(0) : bias_[lanes.c[l]];
    }
    first_row_ = 0;
    phase_ = modulo(up_.pad_y - my[0], up_.up);
    lead_ = up_.up - 1 - modulo(up_.pad_x - mx[0], up_.up);
    next_ = 0;
    fetched_ = lanes.block ? last_[0] - first_[0] : lanes.count;
    share_ = ceil_div(fetched_ * ceil_div(kBatch, up_.up), kBatch);
  }

  // Begin the next batch of upsampled rows: sums along the columns.
  void batch(int64_t rows) {
    int64_t end = 0;
    const int64_t start = first_row_;
    Gather<A> all{};
    for (int64_t r = 0; r < rows; ++r) {
      phases_[r] = phase_, starts_[r] = first_row_ - start;
      all.first[r] = starts_[r];
      all.n[r] = up_.rows[phase_];
      all.taps[r] = up_.y[phase_].data();
      end = std::max(end, first_row_ + up_.rows[phase_]);
      if (phase_-- == 0) phase_ = up_.up - 1, ++first_row_;
    }
    for (next_ = std::max(next_, start); next_ < end; ++next_) read(next_);
    fetch_row_ = next_, fetch_at_ = 0;
    ring_.each(start, end - start, [&](int64_t k, const A* row) { gathered_[k] = row; });
    if (!up_.f.separable) return;
    std::copy(columns_, columns_ + kBatch, all.to);
    all.from = gathered_.data(), all.rows = end - start;
    PIXFUSE_WIDEST(gather(all, seen_));
  }

  // Row r of the batch, in `to`, activated or times the derivative at `at`.
  template <Then then>
  void row(int64_t r, A* to, Activation<A> act, const A* at) {
    fetch();
    // A group of samples, one of each phase, sees the same source columns.
    for (int64_t p = up_.up - 1; p >= 0; --p) {
      const int64_t count = up_.columns[p], place = (up_.up - 1 - p - lead_) * L;
      const bool two = p > 0 && up_.columns[p - 1] == count;
      const std::vector<A>* taps = up_.f.separable ? &up_.x[p] : &up_.full[phases_[r] * up_.up + p];
      if (up_.f.separable) {
        for (int64_t b = 0; b < count; ++b) pointers_[b] = columns_[r] + b * L;
      } else {
        for (int64_t a = 0; a < up_.rows[phases_[r]]; ++a) {
          for (int64_t b = 0; b < count; ++b) pointers_[a * count + b] = gathered_[starts_[r] + a] + b * L;
        }
      }
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

 private:
  static int64_t groups(const Up<A>& up, int64_t width) { return round_up(ceil_div(up.up - 1 + width, up.up), kFew); }
  static int64_t seen(const Up<A>& up, int64_t width) {
    return round_up(groups(up, width) + ceil_div(up.f.w, up.up) - 1, kFew);
  }
  static int64_t source(const Up<A>& up, int64_t width) { return round_up(seen(up, width), L); }
  // Rows that a batch sees.
  static int64_t ring_rows(const Up<A>& up) { return ceil_div(up.f.h, up.up) + ceil_div(kBatch - 1, up.up); }

  // Ask memory for a share of the rows that the next batch brings: there is a call for each row, so that requests and
  // sums overlap.
  void fetch() {
    const int64_t ahead = next_ + ceil_div(kBatch, up_.up);
    for (int64_t i = 0; i < share_ && fetch_row_ < ahead; ++i) {
      const int64_t l = lanes_->block ? 0 : fetch_at_, skip = fetch_row_ * image_.stride_h;
      if (0 <= row_[l] + fetch_row_ && row_[l] + fetch_row_ < image_.h) {
        if (lanes_->block) {
          __builtin_prefetch(at_[0] + skip + fetch_at_ * image_.stride_w);
        } else {
          const T *x = at_[l] + skip, *stop = x + (last_[l] - first_[l]) * image_.stride_w;
          for (; x < stop; x += 64 / sizeof(T)) __builtin_prefetch(x);
        }
      }
      if (++fetch_at_ == fetched_) fetch_at_ = 0, ++fetch_row_;
    }
  }

  // Bring source row r (counted from the tile's first) into the ring.
  void read(int64_t r) {
    A* pixels = ring_.row(r);
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
  std::vector<const A*> pointers_, gathered_;
  int64_t groups_ = 0, seen_ = 0, source_ = 0, next_ = 0, lead_ = 0;
  int64_t phase_ = 0, first_row_ = 0;  // of the next batch's first row, and the source row that it begins at
  int64_t phases_[kBatch] = {}, starts_[kBatch] = {};  // of the rows at work
  int64_t fetched_ = 0, share_ = 0, fetch_row_ = 0, fetch_at_ = 0;
  const T* at_[L] = {};  // per lane: source row 0, from its first column inside the image
  int64_t row_[L] = {}, first_[L] = {}, last_[L] = {};
  A block_bias_[L] = {};
  Ring<A> ring_;
  A *planes_ = nullptr, *columns_[kBatch] = {};
};

// Rows of the result from batches of rows of the upsampled image: y[j] = sum over a of tap[a] * row[j * down + a].
template <class T>
class DownStage {
  using A = acc_t<T>;
  static constexpr int64_t L = kLanes<A>;

 public:
  // Upsampled rows are written from `before` samples before their first to `after` ones after their last.
  DownStage(const Filter<A>& f, int64_t down, int64_t before, int64_t after)
      : f_(f), down_(down), before_(before), after_(after), pointers_(f.separable ? f.w : f.w * f.h) {}

  // The upsampled samples that `width` results see, and vectors of scratch for a tile of them.
  int64_t upsampled(int64_t width, int64_t taps) const { return (width - 1) * down_ + taps; }
  int64_t need(int64_t width) const {
    return ring_rows() * ring_stride(width) + row_size(width) + kBatch * padded(width) + round_up(padded(width), L) +
           round_up(width, L);
  }

  void begin(Scratch<A>& scratch, int64_t width) {
    width_ = width;
    ring_.rows = ring_rows();
    ring_.stride = ring_stride(width) * L;
    ring_.at = scratch.take(ring_.rows * ring_stride(width));
    row_ = scratch.take(row_size(width));
    for (A*& filtered : filtered_) filtered = scratch.take(padded(width));
    result_ = scratch.take(round_up(padded(width), L));
    planes_ = scratch.take(round_up(width, L));
  }

  // Where upsampled row i is to be written.
  A* row(int64_t i) { return (f_.separable ? row_ : ring_.row(i)) + before_ * L; }

  // It is there, as row r of its batch.
  void filter(int64_t i, int64_t r) {
    if (!f_.separable) return;
    for (int64_t b = 0; b < f_.w; ++b) pointers_[b] = row(i) + b * L;
    sum<A>(false, {{filtered_[r]}, 1, pointers_.data(), down_, {f_.x.data()}, f_.w}, width_);
  }

  // The batch is there, that of rows i .. i + rows: add them to the results that see them, and write those of `height`
  // that they complete.
  void batch(int64_t i, int64_t rows, int64_t height, const Lanes<A>& lanes, const Image<T>& y) {
    const int64_t first = std::max<int64_t>(ceil_div(i + 1 - f_.h, down_), 0);
    if (f_.separable) {
      spread_.clear();
      for (int64_t j = first; j < height && j * down_ < i + rows; ++j) {
        const int64_t k = i - j * down_, begin = std::max<int64_t>(-k, 0), end = std::min(f_.h - k, rows);
        if (begin < end) spread_.push_back({ring_.row(j), &f_.y[k + begin], begin, end, k <= 0});
      }
      const Spread<A> all{
          {filtered_[0], filtered_[1], filtered_[2], filtered_[3]}, spread_.data(), int64_t(spread_.size())};
      PIXFUSE_WIDEST(spread(all, padded(width_)));
    }
    for (int64_t j = first; j < height && j * down_ + f_.h <= i + rows; ++j) {
      if (f_.separable) {
        write(j, ring_.row(j), lanes, y);
        continue;
      }
      ring_.each(j * down_, f_.h, [&](int64_t a, const A* row) {
        for (int64_t b = 0; b < f_.w; ++b) pointers_[a * f_.w + b] = row + (before_ + b) * L;
      });
      sum<A>(false, {{result_}, 1, pointers_.data(), down_, {f_.full.data()}, f_.w * f_.h}, width_);
      write(j, result_, lanes, y);
    }
  }

 private:
  // Rows that are kept: results at work, or else upsampled rows.
  int64_t ring_rows() const { return f_.separable ? (f_.h + kBatch - 2) / down_ + 1 : f_.h + kBatch - 1; }
  int64_t ring_stride(int64_t width) const { return f_.separable ? round_up(padded(width), L) : row_size(width); }
  int64_t row_size(int64_t width) const { return before_ + upsampled(padded(width), f_.w) + after_; }
  static int64_t padded(int64_t width) { return round_up(width, kFew); }

  void write(int64_t j, const A* result, const Lanes<A>& lanes, const Image<T>& y) {
    auto target = [&](int64_t l) {
      return y.at + lanes.n[l] * y.stride_n + lanes.c[l] * y.stride_c + (lanes.y0[l] + j) * y.stride_h +
             lanes.x0[l] * y.stride_w;
    };
    if (lanes.block) {
      store_pixels(result, reinterpret_cast<T*>(planes_), target(0), y.stride_w, std::min(width_, y.w - lanes.x0[0]),
                   lanes.count);
      return;
    }
    const int64_t stride = round_up(width_, L);
    PIXFUSE_WIDEST(transpose<A, false>(result, planes_, stride, stride));
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
  A *row_ = nullptr, *filtered_[kBatch] = {}, *result_ = nullptr, *planes_ = nullptr;
};

}  // namespace
}  // namespace pixfuse
