// filtered_lrelu on the CPU: value, tangent and adjoint by one kernel.
//
// A job computes a tile of the result for several images at once: a vector register holds one pixel of 16 planes (8 of
// float64), taken from consecutive channels in channels_last, else from any planes or tiles by a transpose at load and
// store. So every step is a sum of taps times whole vectors, with no tail and no shuffle, whatever the factors are:
//   source rows -> horizontal taps -> ring of rows -> vertical taps, activation -> one row of the upsampled image
//               -> horizontal taps -> ring of rows -> vertical taps -> a row of the result.
// The rings and rows are all of the upsampled image that exists, and fit the first two caches. The adjoint is the same
// pipeline with the filters exchanged, and the activation replaced by its factor, which a second pipeline from x gives.
// Each number is the same sequence of operations in any tile and lane: batch and threads do not show.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>

#include "cpu.h"

namespace pixfuse {
namespace {

constexpr int64_t kVectorBytes = 64;
template <class A>
constexpr int64_t kLanes = kVectorBytes / sizeof(A);
template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes)));
  typedef std::conditional_t<sizeof(A) == 4, int32_t, int64_t> index __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using vec = typename VectorOf<A>::type;

// --- the row functions -----------------------------------------------------------------------------------------

// to[i * to_step] = sum over k < n of taps[k] * from[k][i * from_step], in vectors.
template <class A>
PIXFUSE_CLONES void fir(A* to_, int64_t to_step, const A* const* from, int64_t from_step, const A* taps, int64_t n,
                        int64_t count) {
  constexpr int64_t kBlock = 6;  // sums at a time: enough to hide the latency, and they fit AVX2's registers
  auto* to = reinterpret_cast<vec<A>*>(to_);
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    vec<A> s0{}, s1{}, s2{}, s3{}, s4{}, s5{};
    for (int64_t k = 0; k < n; ++k) {
      const auto* x = reinterpret_cast<const vec<A>*>(from[k]) + i * from_step;
      const vec<A> tap = taps[k] - vec<A>{};
      s0 += tap * x[0];
      s1 += tap * x[from_step];
      s2 += tap * x[2 * from_step];
      s3 += tap * x[3 * from_step];
      s4 += tap * x[4 * from_step];
      s5 += tap * x[5 * from_step];
    }
    vec<A>* y = to + i * to_step;
    y[0] = s0, y[to_step] = s1, y[2 * to_step] = s2, y[3 * to_step] = s3, y[4 * to_step] = s4, y[5 * to_step] = s5;
  }
  for (; i < count; ++i) {
    vec<A> sum{};
    for (int64_t k = 0; k < n; ++k) {
      sum += (taps[k] - vec<A>{}) * reinterpret_cast<const vec<A>*>(from[k])[i * from_step];
    }
    to[i * to_step] = sum;
  }
}

// Two results from the same rows: to0 and to1 as fir would give them, with every load used twice.
template <class A>
PIXFUSE_CLONES void fir_pair(A* to0_, A* to1_, const A* const* from, const A* taps0, const A* taps1, int64_t n,
                             int64_t count) {
  constexpr int64_t kBlock = 3;
  auto* to0 = reinterpret_cast<vec<A>*>(to0_);
  auto* to1 = reinterpret_cast<vec<A>*>(to1_);
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    vec<A> s0{}, s1{}, s2{}, r0{}, r1{}, r2{};
    for (int64_t k = 0; k < n; ++k) {
      const auto* x = reinterpret_cast<const vec<A>*>(from[k]) + i;
      const vec<A> x0 = x[0], x1 = x[1], x2 = x[2], tap0 = taps0[k] - vec<A>{}, tap1 = taps1[k] - vec<A>{};
      s0 += tap0 * x0, s1 += tap0 * x1, s2 += tap0 * x2;
      r0 += tap1 * x0, r1 += tap1 * x1, r2 += tap1 * x2;
    }
    to0[i] = s0, to0[i + 1] = s1, to0[i + 2] = s2;
    to1[i] = r0, to1[i + 1] = r1, to1[i + 2] = r2;
  }
  for (; i < count; ++i) {
    vec<A> s{}, r{};
    for (int64_t k = 0; k < n; ++k) {
      const vec<A> x = reinterpret_cast<const vec<A>*>(from[k])[i];
      s += (taps0[k] - vec<A>{}) * x;
      r += (taps1[k] - vec<A>{}) * x;
    }
    to0[i] = s, to1[i] = r;
  }
}

template <class A>
struct Activation {
  A gain, gain_below, clamp;
};

// t -> its activation.
template <class A>
PIXFUSE_CLONES void activate_row(A* t, int64_t n, Activation<A> act) {
  for (int64_t i = 0; i < n; ++i) {
    A w = t[i] * (t[i] > 0 ? act.gain : act.gain_below);
    w = w > act.clamp ? act.clamp : w;
    t[i] = w < -act.clamp ? -act.clamp : w;
  }
}

// t *= the derivative of the activation at v.
template <class A>
PIXFUSE_CLONES void factor_row(A* t, const A* v, int64_t n, Activation<A> act) {
  for (int64_t i = 0; i < n; ++i) {
    const A m = v[i] > 0 ? act.gain : act.gain_below;
    t[i] = std::fabs(v[i] * m) > act.clamp ? A(0) : t[i] * m;
  }
}

// Rows of planes, [lane][stride], to pixels of lanes, [count][lane], or back: square transposes by repeated zips.
template <class A, bool to_lanes>
PIXFUSE_CLONES void transpose(const A* from, A* to, int64_t stride, int64_t count) {
  constexpr int64_t L = kLanes<A>;
  using index = typename VectorOf<A>::index;
  index low, high;
  for (int64_t i = 0; i < L; ++i) {
    low[i] = i / 2 + i % 2 * L;
    high[i] = low[i] + L / 2;
  }
  for (int64_t c = 0; c < count; c += L) {
    vec<A> a[L], b[L];
    for (int64_t l = 0; l < L; ++l) {
      std::memcpy(&a[l], to_lanes ? from + l * stride + c : from + (c + l) * L, sizeof a[l]);
    }
    for (int64_t step = 1; step < L; step *= 2) {
      for (int64_t l = 0; l < L / 2; ++l) {
        b[2 * l] = __builtin_shuffle(a[l], a[l + L / 2], low);
        b[2 * l + 1] = __builtin_shuffle(a[l], a[l + L / 2], high);
      }
      for (int64_t l = 0; l < L; ++l) a[l] = b[l];
    }
    for (int64_t l = 0; l < L; ++l) std::memcpy(to_lanes ? to + (c + l) * L : to + l * stride + c, &a[l], sizeof a[l]);
  }
}

template <class T>
PIXFUSE_CLONES void load_row(const T* x, int64_t stride, acc_t<T> bias, acc_t<T>* t, int64_t n) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) t[i] = load(x[i]) + bias;
  } else {
    for (int64_t i = 0; i < n; ++i) t[i] = load(x[i * stride]) + bias;
  }
}
template <class T>
PIXFUSE_CLONES void store_row(const acc_t<T>* t, T* y, int64_t stride, int64_t n) {
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) y[i] = store<T>(t[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i * stride] = store<T>(t[i]);
  }
}

// n pixels of `lanes` channels that lie side by side. 16-bit pixels are gathered in `packed` first, so that one long
// loop converts them.
template <class T>
PIXFUSE_CLONES void load_pixels(const T* x, int64_t stride, const acc_t<T>* bias, T* packed, acc_t<T>* t, int64_t n,
                                int64_t lanes) {
  using A = acc_t<T>;
  constexpr int64_t L = kLanes<A>;
  vec<A> b;
  std::memcpy(&b, bias, sizeof b);
  auto* to = reinterpret_cast<vec<A>*>(t);
  if (lanes < L) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < lanes; ++l) t[i * L + l] = load(x[i * stride + l]) + bias[l];
      for (int64_t l = lanes; l < L; ++l) t[i * L + l] = 0;
    }
  } else if constexpr (std::is_same_v<T, A>) {
    for (int64_t i = 0; i < n; ++i) {
      vec<A> v;
      std::memcpy(&v, x + i * stride, sizeof v);
      to[i] = v + b;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) std::memcpy(packed + i * L, x + i * stride, L * sizeof(T));
    for (int64_t i = 0; i < n * L; ++i) t[i] = load(packed[i]);
    for (int64_t i = 0; i < n; ++i) to[i] += b;
  }
}
template <class T>
PIXFUSE_CLONES void store_pixels(const acc_t<T>* t, T* packed, T* y, int64_t stride, int64_t n, int64_t lanes) {
  constexpr int64_t L = kLanes<acc_t<T>>;
  if (lanes < L) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < lanes; ++l) y[i * stride + l] = store<T>(t[i * L + l]);
    }
  } else if constexpr (std::is_same_v<T, acc_t<T>>) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(y + i * stride, t + i * L, L * sizeof(T));
  } else {
    for (int64_t i = 0; i < n * L; ++i) packed[i] = store<T>(t[i]);
    for (int64_t i = 0; i < n; ++i) std::memcpy(y + i * stride, packed + i * L, L * sizeof(T));
  }
}

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
    if (f.separable) {
      for (int64_t k = 0; k < f.w; ++k) x[k % up].push_back(f.x[k]);
      for (int64_t k = 0; k < f.h; ++k) y[k % up].push_back(f.y[k]);
      return;
    }
    for (int64_t a = 0; a < f.h; ++a) {
      for (int64_t b = 0; b < f.w; ++b) full[a % up * up + b % up].push_back(f.full[a * f.w + b]);
    }
  }
  int64_t rows(int64_t phase) const { return phase < f.h ? (f.h - phase - 1) / up + 1 : 0; }
  int64_t columns(int64_t phase) const { return phase < f.w ? (f.w - phase - 1) / up + 1 : 0; }
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
      : image_(image), bias_(bias), up_(up), pointers_(up.f.separable ? up.f.w + up.f.h : up.f.w * up.f.h) {}

  // Vectors of scratch that a tile of upsampled width `width` needs.
  static int64_t need(const Up<A>& up, int64_t width) {
    const int64_t source = source_width(up, width), ring = up.f.separable ? width : source;
    return ceil_div(up.f.h, up.up) * ring + 2 * source;
  }

  // Begin a tile whose first upsampled sample is (my[l], mx[l]) for lane l; all are congruent modulo the factor.
  void begin(Scratch<A>& scratch, const Lanes<A>& lanes, const int64_t* my, const int64_t* mx, int64_t width) {
    lanes_ = &lanes;
    width_ = width;
    source_ = source_width(up_, width);
    ring_.rows = ceil_div(up_.f.h, up_.up);
    ring_.stride = (up_.f.separable ? width : source_) * L;
    ring_.at = scratch.take(ring_.rows * ring_.stride / L);
    pixels_ = scratch.take(source_);
    planes_ = scratch.take(source_);
    for (int64_t l = 0; l < lanes.count; ++l) {
      row_[l] = ceil_div(my[l] - up_.pad_y, up_.up);
      column_[l] = ceil_div(mx[l] - up_.pad_x, up_.up);
      block_bias_[l] = bias_.empty() ? A(0) : bias_[lanes.c[l]];
    }
    offset_y_ = modulo(up_.pad_y - my[0], up_.up);
    offset_x_ = modulo(up_.pad_x - mx[0], up_.up);
    next_ = 0;
    ready_ = -1;
  }

  // The upsampled row i of the tile, in `to`, and maybe row i + 1 in `next`, where its turn finds it. Rows are asked
  // for in rising order.
  void row(int64_t i, A* to, A* next) {
    if (i == ready_) return;
    const int64_t phase = modulo(offset_y_ - i, up_.up), first = ceil_div(i - offset_y_, up_.up);
    const int64_t rows = up_.rows(phase);
    for (next_ = std::max(next_, first); next_ < first + rows; ++next_) read(next_);
    if (up_.f.separable) {
      ring_.each(first, rows, [&](int64_t k, const A* row) { pointers_[k] = row; });
      if (phase > 0 && up_.rows(phase - 1) == rows) {  // the next row sees the same source rows, one phase on
        fir_pair(to, next, pointers_.data(), up_.y[phase].data(), up_.y[phase - 1].data(), rows, width_);
        ready_ = i + 1;
      } else {
        fir(to, 1, pointers_.data(), 1, up_.y[phase].data(), rows, width_);
      }
      return;
    }
    each_phase([&](int64_t phase_x, int64_t start, int64_t source, int64_t count) {
      const int64_t columns = up_.columns(phase_x);
      ring_.each(first, rows, [&](int64_t a, const A* row) {
        for (int64_t b = 0; b < columns; ++b) pointers_[a * columns + b] = row + (source + b) * L;
      });
      const A* taps = up_.full[phase * up_.up + phase_x].data();
      fir(to + start * L, up_.up, pointers_.data(), 1, taps, rows * columns, count);
    });
  }

 private:
  static int64_t source_width(const Up<A>& up, int64_t width) {
    return round_up(ceil_div(width - 1, up.up) + ceil_div(up.f.w, up.up), L);
  }
  // f(phase, first column of that phase, the source column it begins at, how many columns)
  template <class F>
  void each_phase(const F& f) {
    for (int64_t phase = 0; phase < up_.up; ++phase) {
      const int64_t start = modulo(offset_x_ - phase, up_.up);
      if (start < width_) f(phase, start, ceil_div(start - offset_x_, up_.up), ceil_div(width_ - start, up_.up));
    }
  }

  // Bring source row r (counted from the tile's first) into the ring.
  void read(int64_t r) {
    A* ring = ring_.row(r);
    A* pixels = up_.f.separable ? pixels_ : ring;
    bool inside = false;
    for (int64_t l = 0; l < lanes_->count; ++l) inside |= 0 <= row_[l] + r && row_[l] + r < image_.h;
    if (!inside) {
      std::memset(ring, 0, ring_.stride * sizeof(A));
      return;
    }
    if (lanes_->block)
      read_block(r, pixels);
    else
      read_planes(r, pixels);
    if (!up_.f.separable) return;
    each_phase([&](int64_t phase, int64_t start, int64_t source, int64_t count) {
      const int64_t columns = up_.columns(phase);
      for (int64_t b = 0; b < columns; ++b) pointers_[b] = pixels + (source + b) * L;
      const A* taps = up_.x[phase].data();
      fir(ring + start * L, up_.up, pointers_.data(), 1, taps, columns, count);
    });
  }

  void read_block(int64_t r, A* pixels) {
    const int64_t first = std::clamp<int64_t>(-column_[0], 0, source_);
    const int64_t last = std::clamp<int64_t>(image_.w - column_[0], first, source_);
    const T* x = image_.at + lanes_->n[0] * image_.stride_n + lanes_->c[0] + (row_[0] + r) * image_.stride_h;
    std::memset(pixels, 0, first * kVectorBytes);
    load_pixels(x + (column_[0] + first) * image_.stride_w, image_.stride_w, block_bias_, reinterpret_cast<T*>(planes_),
                pixels + first * L, last - first, lanes_->count);
    std::memset(pixels + last * L, 0, (source_ - last) * kVectorBytes);
  }

  void read_planes(int64_t r, A* pixels) {
    for (int64_t l = 0; l < L; ++l) {
      A* row = planes_ + l * source_;
      int64_t first = source_, last = source_;
      if (l < lanes_->count && 0 <= row_[l] + r && row_[l] + r < image_.h) {
        first = std::clamp<int64_t>(-column_[l], 0, source_);
        last = std::clamp<int64_t>(image_.w - column_[l], first, source_);
        const T* x = image_.at + lanes_->n[l] * image_.stride_n + lanes_->c[l] * image_.stride_c +
                     (row_[l] + r) * image_.stride_h + (column_[l] + first) * image_.stride_w;
        load_row(x, image_.stride_w, block_bias_[l], row + first, last - first);
      }
      std::fill(row, row + first, A(0));
      std::fill(row + last, row + source_, A(0));
    }
    transpose<A, true>(planes_, pixels, source_, source_);
  }

  const Image<const T>& image_;
  const std::vector<A>& bias_;
  const Up<A>& up_;
  const Lanes<A>* lanes_ = nullptr;
  std::vector<const A*> pointers_;
  int64_t width_ = 0, source_ = 0, next_ = 0, ready_ = -1, offset_x_ = 0, offset_y_ = 0;
  int64_t row_[L] = {}, column_[L] = {};
  A block_bias_[L] = {};
  Ring<A> ring_;
  A *pixels_ = nullptr, *planes_ = nullptr;
};

// Rows of the result from rows of the upsampled image: y[j] = sum over a of tap[a] * row[j * down + a].
template <class T>
class DownStage {
  using A = acc_t<T>;
  static constexpr int64_t L = kLanes<A>;

 public:
  DownStage(const Filter<A>& f, int64_t down) : f_(f), down_(down), pointers_(f.separable ? f.w + f.h : f.w * f.h) {}

  int64_t upsampled(int64_t width, int64_t taps) const { return (width - 1) * down_ + taps; }
  int64_t need(int64_t width) const {
    const int64_t wide = upsampled(width, f_.w), padded = round_up(width, L);
    return (f_.separable ? 2 * wide + f_.h * width : (f_.h + 1) * wide) + 2 * padded;
  }

  void begin(Scratch<A>& scratch, int64_t width) {
    width_ = width;
    wide_ = upsampled(width, f_.w);
    // One upsampled row more than the taps meet, since rows may come in pairs.
    ring_.rows = f_.separable ? f_.h : f_.h + 1;
    ring_.stride = (f_.separable ? width : wide_) * L;
    ring_.at = scratch.take(ring_.rows * ring_.stride / L);
    if (f_.separable) pair_ = scratch.take(2 * wide_);
    result_ = scratch.take(round_up(width, L));
    planes_ = scratch.take(round_up(width, L));
  }

  // Where upsampled row i is to be written.
  A* row(int64_t i) { return f_.separable ? pair_ + i % 2 * wide_ * L : ring_.row(i); }

  // Upsampled row i is there.
  void push(int64_t i) {
    if (!f_.separable) return;
    for (int64_t b = 0; b < f_.w; ++b) pointers_[b] = row(i) + b * L;
    fir(ring_.row(i), 1, pointers_.data(), down_, f_.x.data(), f_.w, width_);
  }

  // Write row j of the result.
  void emit(int64_t j, const Lanes<A>& lanes, const Image<T>& y) {
    if (f_.separable) {
      ring_.each(j * down_, f_.h, [&](int64_t a, const A* row) { pointers_[a] = row; });
      fir(result_, 1, pointers_.data(), 1, f_.y.data(), f_.h, width_);
    } else {
      ring_.each(j * down_, f_.h, [&](int64_t a, const A* row) {
        for (int64_t b = 0; b < f_.w; ++b) pointers_[a * f_.w + b] = row + b * L;
      });
      fir(result_, 1, pointers_.data(), down_, f_.full.data(), f_.w * f_.h, width_);
    }
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
    transpose<A, false>(result_, planes_, stride, stride);
    for (int64_t l = 0; l < lanes.count; ++l) {
      if (lanes.y0[l] + j >= y.h) continue;
      store_row(planes_ + l * stride, target(l), y.stride_w, std::min(width_, y.w - lanes.x0[l]));
    }
  }

 private:
  const Filter<A>& f_;
  int64_t down_;
  std::vector<const A*> pointers_;
  int64_t width_ = 0, wide_ = 0;
  Ring<A> ring_;
  A *pair_ = nullptr, *result_ = nullptr, *planes_ = nullptr;
};

// --- the pipeline ----------------------------------------------------------------------------------------------

// `from` through `main` up, and the factor at `x` through `factor` up where there is one, then `f` down by `down`.
// The upsampled sample that meets tap 0 of result 0 has the position -pad.
template <class T>
struct Problem {
  using A = acc_t<T>;
  const Image<const T>& from;
  const Up<A>& main;
  const Image<const T>* x;  // null: activate
  const Up<A>* factor;
  const Filter<A>& f;
  int64_t down, pad_x, pad_y;
  std::vector<A> bias;  // of x, or of from
  Activation<A> act;
  const Image<T>& y;
  bool block;
};

// Tiles of about this many upsampled columns and rows of the result: the rings stay in the first two caches, and what
// neighbouring tiles both compute stays small.
constexpr int64_t kUpsampledWidth = 128, kTileHeight = 128, kScratchBytes = 1 << 20;

template <class T>
void run(const Problem<T>& p) {
  using A = acc_t<T>;
  constexpr int64_t L = kLanes<A>;
  const Image<T>& y = p.y;
  if (y.n == 0 || y.c == 0) return;
  // Tiles begin at the same phase of every factor.
  const int64_t unit = std::lcm(p.main.up, std::lcm(p.down, p.factor ? p.factor->up : 1));
  auto balanced = [&](int64_t size, int64_t wanted) {
    return round_up(ceil_div(size, ceil_div(size, std::max<int64_t>(wanted, 1))), unit);
  };
  auto need = [&](int64_t width) {
    const DownStage<T> down(p.f, p.down);
    const int64_t wide = down.upsampled(width, p.f.w);
    return down.need(width) + UpStage<T>::need(p.main, wide) +
           (p.factor ? UpStage<T>::need(*p.factor, wide) + 2 * wide : 0);
  };
  int64_t width = balanced(y.w, std::max<int64_t>(kUpsampledWidth / p.down, 8));
  while (width > unit && need(width) * kVectorBytes > kScratchBytes) width = round_up(width / 2, unit);
  const int64_t height = balanced(y.h, kTileHeight);
  const int64_t across = ceil_div(y.w, width), tiles = across * ceil_div(y.h, height);
  const int64_t blocks = ceil_div(y.c, L), planes = y.n * y.c;
  const int64_t jobs = p.block ? y.n * tiles * blocks : ceil_div(planes * tiles, L);

  parallel(jobs, width * height * p.down * p.down * L, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch;
    scratch.reserve(need(width));
    const std::vector<A> none;
    UpStage<T> main(p.from, p.x ? none : p.bias, p.main);
    UpStage<T> factor(p.x ? *p.x : p.from, p.bias, p.factor ? *p.factor : p.main);
    DownStage<T> down(p.f, p.down);
    for (int64_t job = begin; job < end; ++job) {
      Lanes<A> lanes;
      lanes.block = p.block;
      int64_t w = 0, h = 0, my[L], mx[L];
      for (int64_t l = 0; l < L; ++l) {
        int64_t plane, tile;
        if (p.block) {
          const int64_t c = job % blocks * L + l, rest = job / blocks;
          if (c >= y.c) break;
          tile = rest % tiles, plane = rest / tiles * y.c + c;
        } else {
          const int64_t item = job * L + l;
          if (item >= planes * tiles) break;
          tile = item / planes, plane = item % planes;
        }
        lanes.n[l] = plane / y.c, lanes.c[l] = plane % y.c;
        lanes.y0[l] = tile / across * height, lanes.x0[l] = tile % across * width;
        my[l] = lanes.y0[l] * p.down - p.pad_y, mx[l] = lanes.x0[l] * p.down - p.pad_x;
        w = std::max(w, std::min(width, y.w - lanes.x0[l]));
        h = std::max(h, std::min(height, y.h - lanes.y0[l]));
        lanes.count = l + 1;
      }
      scratch.reset();
      down.begin(scratch, w);
      const int64_t wide = down.upsampled(w, p.f.w), high = down.upsampled(h, p.f.h);
      main.begin(scratch, lanes, my, mx, wide);
      A* at = nullptr;
      if (p.x) {
        factor.begin(scratch, lanes, my, mx, wide);
        at = scratch.take(2 * wide);
      }
      for (int64_t i = 0; i < high; ++i) {
        if (i % p.down >= p.f.h) continue;  // no tap meets this row
        A* row = down.row(i);
        main.row(i, row, down.row(i + 1));
        if (p.x) {
          A* v = at + i % 2 * wide * L;
          factor.row(i, v, at + (i + 1) % 2 * wide * L);
          factor_row(row, v, wide * L, p.act);
        } else {
          activate_row(row, wide * L, p.act);
        }
        down.push(i);
        if (i >= p.f.h - 1 && (i - p.f.h + 1) % p.down == 0) down.emit((i - p.f.h + 1) / p.down, lanes, y);
      }
    }
  });
}

// --- the operators ---------------------------------------------------------------------------------------------

struct Scalars {
  int64_t up, down, pad_x, pad_y, out_w, out_h;
  bool flip;
  double gain, slope, clamp;

  template <class A>
  Activation<A> activation() const {
    return {A(gain), A(gain * slope), clamp < 0 ? std::numeric_limits<A>::infinity() : A(clamp)};
  }
};

void check(const Tensor& x, const std::optional<Tensor>& fu, const std::optional<Tensor>& fd,
           const std::optional<Tensor>& b, const Scalars& s) {
  STD_TORCH_CHECK(x.dim() == 4, "filtered_lrelu: x must be 4-D");
  STD_TORCH_CHECK(s.up > 0 && s.down > 0 && s.out_w > 0 && s.out_h > 0, "filtered_lrelu: sizes must be positive");
  for (const auto* f : {&fu, &fd}) {
    STD_TORCH_CHECK(!*f || (((*f)->dim() == 1 || (*f)->dim() == 2) && (*f)->numel() > 0),
                    "filtered_lrelu: filters must be 1-D or 2-D and not empty");
  }
  STD_TORCH_CHECK(!b || b->numel() == x.size(1), "filtered_lrelu: b must have ", x.size(1), " elements");
}

// Lanes are blocks of channels where these lie side by side and fill half a vector at least.
template <class A>
bool in_blocks(const Tensor& x, bool channels_last) {
  return channels_last && x.size(1) >= kLanes<A> / 2;
}

Tensor side_by_side(const Tensor& t, bool block) { return block && t.stride(1) != 1 ? to_dense(t, true) : t; }

Tensor filtered_lrelu_cpu(const Tensor& x_any, const std::optional<Tensor>& fu, const std::optional<Tensor>& fd,
                          const std::optional<Tensor>& b, int64_t up, int64_t down, int64_t pad_x, int64_t pad_y,
                          int64_t out_w, int64_t out_h, bool flip, double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  const bool channels_last = is_channels_last(x_any);
  Tensor y = empty_dense(x_any, {x_any.size(0), x_any.size(1), out_h, out_w}, channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block);
    const Image<const T> from(x, data<T>(x));
    const Image<T> to(y, mutable_data<T>(y));
    const Up<A> main(fu, up, pad_x, pad_y, flip, double(up * up));
    const Filter<A> f(fd, flip, 1);
    run<T>({from, main, nullptr, nullptr, f, down, 0, 0, parameter<A>(b), s.activation<A>(), to, block});
  });
  return y;
}

Tensor filtered_lrelu_tangent_cpu(const Tensor& v_any, const Tensor& x_any, const std::optional<Tensor>& fu,
                                  const std::optional<Tensor>& fd, const std::optional<Tensor>& b, int64_t up,
                                  int64_t down, int64_t pad_x, int64_t pad_y, int64_t out_w, int64_t out_h, bool flip,
                                  double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  STD_TORCH_CHECK(v_any.scalar_type() == x_any.scalar_type() && sizes_of(v_any) == sizes_of(x_any),
                  "filtered_lrelu_tangent: v must have the dtype and shape of x");
  const bool channels_last = is_channels_last(x_any);
  Tensor y = empty_dense(x_any, {x_any.size(0), x_any.size(1), out_h, out_w}, channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block), v = side_by_side(v_any, block);
    const Image<const T> from(v, data<T>(v)), at(x, data<T>(x));
    const Image<T> to(y, mutable_data<T>(y));
    const Up<A> main(fu, up, pad_x, pad_y, flip, double(up * up));
    const Filter<A> f(fd, flip, 1);
    run<T>({from, main, &at, &main, f, down, 0, 0, parameter<A>(b), s.activation<A>(), to, block});
  });
  return y;
}

Tensor filtered_lrelu_backward_cpu(const Tensor& dy_any, const Tensor& x_any, const std::optional<Tensor>& fu,
                                   const std::optional<Tensor>& fd, const std::optional<Tensor>& b, int64_t up,
                                   int64_t down, int64_t pad_x, int64_t pad_y, int64_t out_w, int64_t out_h, bool flip,
                                   double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  STD_TORCH_CHECK(dy_any.scalar_type() == x_any.scalar_type() && dy_any.dim() == 4 && dy_any.size(0) == x_any.size(0) &&
                      dy_any.size(1) == x_any.size(1) && dy_any.size(2) == out_h && dy_any.size(3) == out_w,
                  "filtered_lrelu_backward: dy must have the dtype of x and the shape of y");
  const bool channels_last = is_channels_last(x_any);
  Tensor dx = empty_dense(x_any, sizes_of(x_any), channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block), dy = side_by_side(dy_any, block);
    const Image<const T> from(dy, data<T>(dy)), at(x, data<T>(x));
    const Image<T> to(dx, mutable_data<T>(dx));
    const Up<A> factor(fu, up, pad_x, pad_y, flip, double(up * up));
    const Filter<A> shape(fd, flip, 1);
    const Up<A> main(fd, down, shape.w - 1, shape.h - 1, !flip, 1);
    const Filter<A> f(fu, !flip, double(up * up));
    run<T>({from, main, &at, &factor, f, up, f.w - 1 - pad_x, f.h - 1 - pad_y, parameter<A>(b), s.activation<A>(), to,
            block});
  });
  return dx;
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("filtered_lrelu", TORCH_BOX(&filtered_lrelu_cpu));
  m.impl("filtered_lrelu_tangent", TORCH_BOX(&filtered_lrelu_tangent_cpu));
  m.impl("filtered_lrelu_backward", TORCH_BOX(&filtered_lrelu_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
