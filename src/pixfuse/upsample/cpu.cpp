// Resizing on the CPU: repetition and interpolation, each with its transpose, all from the tables of taps.h.
//
// An image lies in memory as [planes, D, H, W, inner]: inner is 1 for contiguous images (a plane per channel) and C
// for channels_last ones (a plane per image). A thread owns output rows. For each it adds up the input rows that the
// D and H tables name, weighted, into one row of the compute type that stays in L1, resizes that row along W and
// rounds it into the output; where a contiguous 2-D image grows, it resizes each input row along W once and adds
// those up, which is less. Wide rows go in pieces. Every row is computed alike whoever owns it.
// Nearest modes without gain only copy: one row is built and copied to the rows that repeat it.
#include "cpu.h"
#include "half_rows.h"
#include "taps.h"

#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pixfuse {
namespace {

constexpr int64_t kPiece = 2048;     // values of an accumulated piece of a row, so that it stays in L1 with its sources
constexpr int64_t kGrown = 1 << 15;  // values that resample_growing keeps, so that they stay in L2
constexpr int64_t kLanes = 32;       // channels that a loop of fixed length takes
constexpr int64_t kInner = 256;      // channels of a piece

PIXFUSE_INLINE float fetch(uint8_t v) { return float(v); }
template <class T>
PIXFUSE_INLINE acc_t<T> fetch(T v) {
  return load(v);
}

template <class T>
PIXFUSE_INLINE T round_to(acc_t<T> v) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    v = v > 0.0f ? v : 0.0f;  // also NaN
    v = v < 255.0f ? v : 255.0f;
    return uint8_t(std::bit_cast<uint32_t>(v + 0x1.8p23f));  // to nearest, ties to even
  } else {
    return store<T>(v);
  }
}

// memcpy past the caches, which leaves out reading the lines that are overwritten: half the traffic of a large output.
void stream(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  auto* t = static_cast<char*>(to);
  auto* f = static_cast<const char*>(from);
  const size_t head = std::min(-reinterpret_cast<uintptr_t>(t) % 64, bytes), lines = (bytes - head) / 64;
  std::memcpy(t, f, head);
  t += head, f += head, bytes -= head;
  for (size_t i = 0; i < lines; ++i, t += 64, f += 64) {
    for (int k = 0; k < 64; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(t + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(f + k)));
    }
  }
  std::memcpy(t, f, bytes - 64 * lines);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Where a thread's outputs go, which lie one after another: a large tensor's in blocks, past the caches.
template <class T>
class Writer {
 public:
  Writer(T* y, int64_t total) : to_(y) {
    if (total * sizeof(T) >= kLarge) stage_.resize(kStage / sizeof(T));
  }
  ~Writer() {
    flush();
#if defined(__SSE2__)
    if (!stage_.empty()) _mm_sfence();
#endif
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  // Room for the next n outputs; the room given before keeps its contents unless it is the same.
  T* next(int64_t n) {
    if (filled_ * sizeof(T) >= kBlock || filled_ + n > int64_t(stage_.size())) flush();
    if (n > int64_t(stage_.size())) return std::exchange(to_, to_ + n);
    filled_ += n;
    return stage_.data() + filled_ - n;
  }

 private:
  static constexpr size_t kLarge = 4 << 20, kStage = 64 << 10, kBlock = 8 << 10;
  void flush() {
    if (filled_ == 0) return;  // there may be no stage at all
    stream(to_, stage_.data(), filled_ * sizeof(T));
    to_ += std::exchange(filled_, 0);
  }
  T* to_;
  std::vector<T> stage_;
  int64_t filled_ = 0;
};

// --- along D and H: weighted sums of input rows ----------------------------------------------------------------

template <class T, int count, bool add>
PIXFUSE_CLONES void sum_rows(const T* const* rows, int64_t offset, const acc_t<T>* __restrict w,
                             acc_t<T>* __restrict sum, int64_t n) {
  const T* row[count];
  for (int r = 0; r < count; ++r) row[r] = rows[r] + offset;
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> v = add ? sum[i] : 0;
    for (int r = 0; r < count; ++r) v = r == 0 && !add ? w[r] * fetch(row[r][i]) : v + w[r] * fetch(row[r][i]);
    sum[i] = v;
  }
}

template <class T>
void sum_all_rows(const T* const* rows, int64_t offset, const acc_t<T>* __restrict w, int64_t count,
                  acc_t<T>* __restrict sum, int64_t n) {
  int64_t r = count >= 4 ? 4 : count >= 2 ? 2 : 1;
  if (r == 4)
    sum_rows<T, 4, false>(rows, offset, w, sum, n);
  else if (r == 2)
    sum_rows<T, 2, false>(rows, offset, w, sum, n);
  else
    sum_rows<T, 1, false>(rows, offset, w, sum, n);
  for (; r + 4 <= count; r += 4) sum_rows<T, 4, true>(rows + r, offset, w + r, sum, n);
  for (; r + 2 <= count; r += 2) sum_rows<T, 2, true>(rows + r, offset, w + r, sum, n);
  for (; r < count; ++r) sum_rows<T, 1, true>(rows + r, offset, w + r, sum, n);
}

// y[i] = sum_r w[r] * rows[r][i]
template <class T, int count>
PIXFUSE_CLONES void mix_rows(const acc_t<T>* const* rows, const acc_t<T>* __restrict w, T* __restrict y, int64_t n) {
  const acc_t<T>* row[count];
  for (int r = 0; r < count; ++r) row[r] = rows[r];
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> v = w[0] * row[0][i];
    for (int r = 1; r < count; ++r) v += w[r] * row[r][i];
    y[i] = round_to<T>(v);
  }
}

// --- along W ---------------------------------------------------------------------------------------------------

template <class T>
PIXFUSE_CLONES void copy_row(const acc_t<T>* __restrict s, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = round_to<T>(s[i]);
}

// y[2i + p] = sum_k w[p][k] * s[p][i + k]
template <class T, int taps>
PIXFUSE_CLONES void double_row(const acc_t<T>* __restrict s0, const acc_t<T>* __restrict s1,
                               const acc_t<T>* __restrict w, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> even = w[0] * s0[i], odd = w[taps] * s1[i];
    for (int k = 1; k < taps; ++k) {
      even += w[k] * s0[i + k];
      odd += w[taps + k] * s1[i + k];
    }
    if constexpr (sizeof(T) == 2 && std::endian::native == std::endian::little) {
      using Pair __attribute__((aligned(2), may_alias)) = uint32_t;  // as one value: nothing to interleave
      reinterpret_cast<Pair*>(y)[i] = uint32_t(round_to<T>(even).bits) | uint32_t(round_to<T>(odd).bits) << 16;
    } else {
      y[2 * i] = round_to<T>(even);
      y[2 * i + 1] = round_to<T>(odd);
    }
  }
}

// y[i] = sum_k w[k] * s[2i + k]
template <class T, int taps>
PIXFUSE_CLONES void halve_row(const acc_t<T>* __restrict s, const acc_t<T>* __restrict w, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> v = w[0] * s[2 * i];
    for (int k = 1; k < taps; ++k) v += w[k] * s[2 * i + k];
    y[i] = round_to<T>(v);
  }
}

// The same two for pixels of `inner` channels.
template <class T, int taps>
PIXFUSE_CLONES void double_pixels(const acc_t<T>* __restrict s0, const acc_t<T>* __restrict s1,
                                  const acc_t<T>* __restrict w, int64_t inner, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i, s0 += inner, s1 += inner, y += 2 * inner) {
    auto one = [&](int64_t c) __attribute__((always_inline)) {
      acc_t<T> even = w[0] * s0[c], odd = w[taps] * s1[c];
      for (int k = 1; k < taps; ++k) {
        even += w[k] * s0[k * inner + c];
        odd += w[taps + k] * s1[k * inner + c];
      }
      y[c] = round_to<T>(even);
      y[inner + c] = round_to<T>(odd);
    };
    int64_t c = 0;
    for (; c + kLanes <= inner; c += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) one(c + l);
    }
    for (; c < inner; ++c) one(c);
  }
}

template <class T, int taps>
PIXFUSE_CLONES void halve_pixels(const acc_t<T>* __restrict s, const acc_t<T>* __restrict w, int64_t inner,
                                 T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i, s += 2 * inner, y += inner) {
    auto one = [&](int64_t c) __attribute__((always_inline)) {
      acc_t<T> v = w[0] * s[c];
      for (int k = 1; k < taps; ++k) v += w[k] * s[k * inner + c];
      y[c] = round_to<T>(v);
    };
    int64_t c = 0;
    for (; c + kLanes <= inner; c += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) one(c + l);
    }
    for (; c < inner; ++c) one(c);
  }
}

// Halving both axes with two taps each, from two rows at once: y[i] = sum_k h[k] * (v[0] * r0[2i + k] + v[1] * r1[2i +
// k])
template <class T>
PIXFUSE_CLONES void quarter_row(const T* __restrict r0, const T* __restrict r1, const acc_t<T>* __restrict v,
                                const acc_t<T>* __restrict h, T* __restrict y, int64_t n) {
  if constexpr (std::is_same_v<T, bfloat16> && std::endian::native == std::endian::little) {
    using Pair __attribute__((aligned(2), may_alias)) = uint32_t;
    const Pair *p0 = reinterpret_cast<const Pair*>(r0), *p1 = reinterpret_cast<const Pair*>(r1);
    for (int64_t i = 0; i < n; ++i) {
      const float even = v[0] * std::bit_cast<float>(p0[i] << 16) + v[1] * std::bit_cast<float>(p1[i] << 16);
      const float odd =
          v[0] * std::bit_cast<float>(p0[i] & 0xffff0000u) + v[1] * std::bit_cast<float>(p1[i] & 0xffff0000u);
      y[i] = round_to<T>(h[0] * even + h[1] * odd);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const acc_t<T> even = v[0] * fetch(r0[2 * i]) + v[1] * fetch(r1[2 * i]);
      const acc_t<T> odd = v[0] * fetch(r0[2 * i + 1]) + v[1] * fetch(r1[2 * i + 1]);
      y[i] = round_to<T>(h[0] * even + h[1] * odd);
    }
  }
}

template <class T>
PIXFUSE_CLONES void quarter_pixels(const T* __restrict r0, const T* __restrict r1, const acc_t<T>* __restrict v,
                                   const acc_t<T>* __restrict h, int64_t inner, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i, r0 += 2 * inner, r1 += 2 * inner, y += inner) {
    auto one = [&](int64_t c) __attribute__((always_inline)) {
      const acc_t<T> even = v[0] * fetch(r0[c]) + v[1] * fetch(r1[c]);
      const acc_t<T> odd = v[0] * fetch(r0[inner + c]) + v[1] * fetch(r1[inner + c]);
      y[c] = round_to<T>(h[0] * even + h[1] * odd);
    };
    int64_t c = 0;
    for (; c + kLanes <= inner; c += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) one(c + l);
    }
    for (; c < inner; ++c) one(c);
  }
}

// y[o] = sum_k w[o][k] * s[start[o] - base + k]; scalar, since vectors would only be put together from scalars
template <class A, int taps>
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-vectorize", "unroll-loops")))
#endif
void sample_row(const A* __restrict s, const int32_t* __restrict start, int32_t base, const A* __restrict w,
                A* __restrict y, int64_t n) {
  for (int64_t o = 0; o < n; ++o) {
    const A* from = s + (start[o] - base);
    A v = w[o * taps] * from[0];
    for (int k = 1; k < taps; ++k) v += w[o * taps + k] * from[k];
    y[o] = v;
  }
}

// Pixels of few channels, in the compute type: there is nothing to vectorise.
template <class A, int inner>
PIXFUSE_CLONES void few_row(const A* __restrict s, const int64_t* start, const int64_t* stop, int64_t base,
                            const A* __restrict w, int64_t k_max, A* __restrict y, int64_t n) {
  for (int64_t o = 0; o < n; ++o, w += k_max, y += inner) {
    const A* from = s + (start[o] - base) * inner;
    const int64_t count = stop[o] - start[o];
    if (count == 2) {
      for (int c = 0; c < inner; ++c) y[c] = w[0] * from[c] + w[1] * from[inner + c];
    } else if (count == 4) {
      for (int c = 0; c < inner; ++c) {
        y[c] = (w[0] * from[c] + w[1] * from[inner + c]) + (w[2] * from[2 * inner + c] + w[3] * from[3 * inner + c]);
      }
    } else {
      A sum[inner] = {};
      for (int64_t k = 0; k < count; ++k) {
        for (int c = 0; c < inner; ++c) sum[c] += w[k] * from[k * inner + c];
      }
      for (int c = 0; c < inner; ++c) y[c] = sum[c];
    }
  }
}

// to[c] = sum_k w[k] * from[k * inner + c]
template <class T, int taps>
PIXFUSE_INLINE void pixel(const acc_t<T>* __restrict from, const acc_t<T>* __restrict w, int64_t inner,
                          T* __restrict to) {
  auto one = [&](int64_t c) __attribute__((always_inline)) {
    acc_t<T> v = w[0] * from[c];
    for (int k = 1; k < taps; ++k) v += w[k] * from[k * inner + c];
    to[c] = round_to<T>(v);
  };
  int64_t c = 0;
  for (; c + kLanes <= inner; c += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) one(c + l);
  }
  for (; c < inner; ++c) one(c);
}

template <class T>
PIXFUSE_INLINE void pixel_of_any(const acc_t<T>* __restrict from, const acc_t<T>* __restrict w, int64_t taps,
                                 int64_t inner, T* __restrict to) {
  constexpr int64_t kBlock = 64;
  for (int64_t c = 0; c < inner; c += kBlock) {
    const int64_t n = std::min(kBlock, inner - c);
    alignas(64) acc_t<T> sum[kBlock] = {};
    int64_t k = 0;
    for (; k + 4 <= taps; k += 4) {
      const acc_t<T>* at = from + k * inner + c;
      for (int64_t l = 0; l < n; ++l) {
        sum[l] += w[k] * at[l] + w[k + 1] * at[inner + l] + w[k + 2] * at[2 * inner + l] + w[k + 3] * at[3 * inner + l];
      }
    }
    for (; k < taps; ++k) {
      for (int64_t l = 0; l < n; ++l) sum[l] += w[k] * from[k * inner + c + l];
    }
    for (int64_t l = 0; l < n; ++l) to[c + l] = round_to<T>(sum[l]);
  }
}

// Pixels of `inner` channels: y[o * y_step + c] = sum_k w[o][k] * s[(start[o] - base + k) * inner + c]
template <class T>
PIXFUSE_CLONES void pixel_row(const acc_t<T>* s, const int64_t* start, const int64_t* stop, int64_t base,
                              const acc_t<T>* w, int64_t k_max, int64_t inner, T* y, int64_t y_step, int64_t n) {
  for (int64_t o = 0; o < n; ++o, w += k_max, y += y_step) {
    const acc_t<T>* from = s + (start[o] - base) * inner;
    switch (const int64_t count = stop[o] - start[o]) {
      case 1:
        pixel<T, 1>(from, w, inner, y);
        break;
      case 2:
        pixel<T, 2>(from, w, inner, y);
        break;
      case 4:
        pixel<T, 4>(from, w, inner, y);
        break;
      case 8:
        pixel<T, 8>(from, w, inner, y);
        break;
      default:
        pixel_of_any<T>(from, w, count, inner, y);
    }
  }
}

// --- the plan of a call ----------------------------------------------------------------------------------------

struct Shape {
  bool channels_last;
  int64_t planes, inner;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};  // D, H, W
};

Shape shape_of(const Tensor& x, std::span<const int64_t> out) {
  Shape s{is_channels_last(x), x.size(0), 1};
  (s.channels_last ? s.inner : s.planes) *= x.size(1);
  const int64_t axes = x.dim() - 2;
  for (int64_t d = 0; d < axes; ++d) {
    s.in[3 - axes + d] = x.size(2 + d);
    s.out[3 - axes + d] = out[d];
  }
  return s;
}

// A piece of an output row: outputs [o0, o1) from inputs [a, b).
struct Piece {
  int64_t o0, o1, a, b;
};

template <class A>
struct Plan {
  Shape shape;
  Taps axes[3];
  double gain;
  std::vector<Piece> pieces;
  std::vector<A> w;                  // the weights of W's table
  std::vector<int32_t> starts;       // and its starts
  int64_t even_lo = 0, even_hi = 0;  // the outputs that have all k_max taps
  // Where W's table is periodic, the weights and first taps of one period: outputs 2i and 2i + 1 from inputs near i
  // (kDouble) or output i from inputs near 2i (kHalve), for i from lo to hi.
  enum Phases { kNone, kDouble, kHalve } phases = kNone;
  int64_t taps = 1, lo = 0, hi = 0, offset[2] = {0, 0};
  A phase[8] = {};

  // Whether resample_growing is for it: the rows that it keeps should stay in L2.
  bool growing() const {
    return shape.in[0] == 1 && shape.out[0] == 1 && shape.out[1] > shape.in[1] && !axes[2].identity &&
           shape.inner == 1 && axes[1].k_max <= 16;
  }
  int64_t longest = 1;  // outputs of a piece

  Plan(const Shape& s, Taps d, Taps h, Taps x, double g)
      : shape(s), axes{std::move(d), std::move(h), std::move(x)}, gain(g) {
    const Taps& t = axes[2];
    w.assign(t.w.begin(), t.w.end());
    starts.assign(t.start.begin(), t.start.end());
    for (even_lo = 0; even_lo < t.out && t.stop[even_lo] - t.start[even_lo] != t.k_max;) ++even_lo;
    for (even_hi = even_lo; even_hi < t.out && t.stop[even_hi] - t.start[even_hi] == t.k_max;) ++even_hi;
    if (find_phases(2, 1))
      phases = kDouble;
    else if (find_phases(1, 2))
      phases = kHalve;
    const int64_t inner = std::min(s.inner, kInner);
    int64_t most = std::clamp(4 * t.k_max * inner, kPiece, 8 * kPiece);  // neighbours share few samples
    if (growing()) most = std::max(most, kGrown * t.in / std::max(t.in, t.out) / axes[1].k_max);
    for (int64_t o = 0; o < t.out;) {
      Piece p{o, o + 1, t.start[o], std::max(t.start[o], t.stop[o])};
      while (p.o1 < t.out && (t.stop[p.o1] - p.a) * inner <= most) p.b = std::max(p.b, t.stop[p.o1++]);
      pieces.push_back(p);
      longest = std::max(longest, p.o1 - p.o0);
      o = p.o1;
    }
  }

  // Whether W's table is periodic, `up` outputs for every `down` inputs, all but a few at the borders.
  bool find_phases(int64_t up, int64_t down) {
    const Taps& t = axes[2];
    const int64_t groups = t.out / up;
    if (t.out * down != t.in * up || groups < 8) return false;
    const int64_t middle = groups / 2, k = t.stop[middle * up] - t.start[middle * up];
    if (up == 2 ? k != 1 && k != 2 && k != 4 : k != 2 && k != 4 && k != 8) return false;
    auto same = [&](int64_t g) {
      for (int64_t p = 0; p < up; ++p) {
        const int64_t o = g * up + p, m = middle * up + p;
        if (t.stop[o] - t.start[o] != k || t.start[o] - g * down != t.start[m] - middle * down) return false;
        if (!std::equal(&t.w[o * t.k_max], &t.w[o * t.k_max] + k, &t.w[m * t.k_max])) return false;
      }
      return true;
    };
    if (!same(middle)) return false;
    for (lo = middle; lo > 0 && same(lo - 1);) --lo;
    for (hi = middle + 1; hi < groups && same(hi);) ++hi;
    if (hi - lo < groups - 8) return false;
    if (up == 2 && t.replicates) lo = 0, hi = groups;  // the borders are like the rest, on a row with margins
    taps = k;
    for (int64_t p = 0; p < up; ++p) {
      offset[p] = t.start[middle * up + p] - middle * down;
      for (int64_t j = 0; j < k; ++j) phase[p * k + j] = A(t.w[(middle * up + p) * t.k_max + j]);
    }
    return true;
  }
};

// Outputs [o0, o1) of a row along W by the table. s holds the inputs from a on; y is where the outputs go.
template <class T, class A>
void resize_by_table(const Plan<A>& plan, int64_t o0, int64_t o1, const A* s, int64_t a, int64_t inner, T* y) {
  const Taps& t = plan.axes[2];
  const int64_t all = plan.shape.inner;
  if (all > 4) {
    return pixel_row<T>(s, &t.start[o0], &t.stop[o0], a, &plan.w[o0 * t.k_max], t.k_max, inner, y, all, o1 - o0);
  }
  const auto body = all == 1 ? few_row<A, 1> : all == 2 ? few_row<A, 2> : all == 3 ? few_row<A, 3> : few_row<A, 4>;
  if (all == 1 && o1 - o0 <= 4) {
    for (int64_t o = o0; o < o1; ++o) {
      A v = 0;
      for (int64_t k = t.start[o]; k < t.stop[o]; ++k) v += plan.w[o * t.k_max + k - t.start[o]] * s[k - a];
      y[o - o0] = round_to<T>(v);
    }
    return;
  }
  constexpr int64_t kBlock = 128;
  alignas(64) A block[4 * kBlock];
  const bool even = all == 1 && (t.k_max <= 2 || t.k_max == 4);
  if (even && o0 < plan.even_lo && o1 > plan.even_lo) {
    resize_by_table(plan, o0, plan.even_lo, s, a, inner, y);
    y += plan.even_lo - o0;
    o0 = plan.even_lo;
  }
  for (; even && o0 < std::min(o1, plan.even_hi);) {
    const int64_t n = std::min(kBlock, std::min(o1, plan.even_hi) - o0);
    const auto sample = t.k_max == 1 ? sample_row<A, 1> : t.k_max == 2 ? sample_row<A, 2> : sample_row<A, 4>;
    sample(s, &plan.starts[o0], int32_t(a), &plan.w[o0 * t.k_max], block, n);
    copy_row<T>(block, y, n);
    o0 += n, y += n;
  }
  for (; o0 < o1; o0 += kBlock, y += kBlock * all) {
    const int64_t n = std::min(kBlock, o1 - o0);
    body(s, &t.start[o0], &t.stop[o0], a, &plan.w[o0 * t.k_max], t.k_max, block, n);
    copy_row<T>(block, y, n * all);
  }
}

// One piece of a row along W.
template <class T, class A>
void resize_row(const Plan<A>& plan, const Piece& p, const A* s, int64_t inner, T* y) {
  const int64_t all = plan.shape.inner;
  if (plan.axes[2].identity) {
    if (inner == all) return copy_row<T>(s, y, (p.o1 - p.o0) * inner);
    for (int64_t o = 0; o < p.o1 - p.o0; ++o) copy_row<T>(s + o * inner, y + o * all, inner);
    return;
  }
  const int64_t up = plan.phases == Plan<A>::kDouble ? 2 : 1, down = plan.phases == Plan<A>::kHalve ? 2 : 1;
  const int64_t from = std::max((p.o0 + up - 1) / up, plan.lo), to = std::min(p.o1 / up, plan.hi), n = to - from;
  if (plan.phases == Plan<A>::kNone || inner != all || n <= 0) {
    return resize_by_table(plan, p.o0, p.o1, s, p.a, inner, y);
  }
  T* y0 = y + (from * up - p.o0) * all;
  const A* s0 = s + (from * down + plan.offset[0] - p.a) * all;
  const A* s1 = s + (from * down + plan.offset[1] - p.a) * all;
  const A* w = plan.phase;
  if (from * up > p.o0) resize_by_table(plan, p.o0, from * up, s, p.a, inner, y);
  switch (plan.taps + (up == 2 ? 100 : 0) + (all > 1 ? 10 : 0)) {
    case 2:
      halve_row<T, 2>(s0, w, y0, n);
      break;
    case 4:
      halve_row<T, 4>(s0, w, y0, n);
      break;
    case 8:
      halve_row<T, 8>(s0, w, y0, n);
      break;
    case 12:
      halve_pixels<T, 2>(s0, w, all, y0, n);
      break;
    case 14:
      halve_pixels<T, 4>(s0, w, all, y0, n);
      break;
    case 18:
      halve_pixels<T, 8>(s0, w, all, y0, n);
      break;
    case 101:
      double_row<T, 1>(s0, s1, w, y0, n);
      break;
    case 111:
      double_pixels<T, 1>(s0, s1, w, all, y0, n);
      break;
    case 102:
      double_row<T, 2>(s0, s1, w, y0, n);
      break;
    case 104:
      double_row<T, 4>(s0, s1, w, y0, n);
      break;
    case 112:
      double_pixels<T, 2>(s0, s1, w, all, y0, n);
      break;
    default:
      double_pixels<T, 4>(s0, s1, w, all, y0, n);
  }
  if (to * up < p.o1) resize_by_table(plan, to * up, p.o1, s, p.a, inner, y + (to * up - p.o0) * all);
}

// What lies beyond the borders of the loaded row of a piece, where doubling needs it.
template <class A>
void replicate(const Plan<A>& plan, const Piece& p, A* row, int64_t inner) {
  const Taps& t = plan.axes[2];
  if (plan.phases != Plan<A>::kDouble || !t.replicates) return;
  A* last = row + (p.b - p.a) * inner;
  for (int64_t c = 0; c < inner && p.a == 0; ++c) row[c - inner] = row[c - 2 * inner] = row[c];
  for (int64_t c = 0; c < inner && p.b == t.in; ++c) last[c] = last[c + inner] = last[c - inner];
}

template <class T>
void resample(const T* x, T* y, const Plan<acc_t<T>>& plan) {
  using A = acc_t<T>;
  const Shape& s = plan.shape;
  const Taps &td = plan.axes[0], &th = plan.axes[1], &tw = plan.axes[2];
  const int64_t blocks = (s.inner + kInner - 1) / kInner, pieces = plan.pieces.size();
  const int64_t in_row = s.in[2] * s.inner, out_row = s.out[2] * s.inner;
  int64_t longest = 1;
  for (const Piece& p : plan.pieces) longest = std::max(longest, p.b - p.a);
  const int64_t values = longest * std::min(s.inner, kInner);
  const bool quarters = plan.phases == Plan<A>::kHalve && plan.taps == 2 && plan.offset[0] == 0 && plan.lo == 0 &&
                        plan.hi == tw.out && blocks == 1;
  const int64_t items = s.planes * s.out[0] * s.out[1] * pieces * blocks;
  parallel(items, (in_row * th.k_max + out_row * tw.k_max) / (pieces * blocks), [&](int64_t begin, int64_t end) {
    std::vector<const T*> rows(td.k_max * th.k_max);
    const int64_t margin = 2 * std::min(s.inner, kInner);  // the most that a tap of kDouble lies beyond a border
    std::vector<A> w(rows.size()), buffer(values + 2 * margin);
    A* sum = buffer.data() + margin;
    const int64_t first = begin / (pieces * blocks), offset = plan.pieces[begin / blocks % pieces].o0 * s.inner;
    Writer<T> writer(y + first * out_row + offset, s.planes * s.out[0] * s.out[1] * out_row);
    int64_t row = -1, count = 0;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t at = blocks == 1 ? item : item / blocks, block = item - at * blocks;
      const int64_t now = pieces == 1 ? at : at / pieces;
      const Piece& p = plan.pieces[at - now * pieces];
      if (now != row) {
        row = now;
        const int64_t image = row / s.out[1], h = row - image * s.out[1];
        const int64_t plane = s.out[0] == 1 ? image : image / s.out[0], d = image - plane * s.out[0];
        count = 0;
        for (int64_t i = td.start[d]; i < td.stop[d]; ++i) {
          for (int64_t j = th.start[h]; j < th.stop[h]; ++j, ++count) {
            rows[count] = x + ((plane * s.in[0] + i) * s.in[1] + j) * in_row;
            w[count] = A(td.w[d * td.k_max + i - td.start[d]] * th.w[h * th.k_max + j - th.start[h]] * plan.gain);
          }
        }
      }
      const int64_t c0 = block * kInner, inner = std::min(s.inner - c0, kInner);
      T* to = blocks == 1 ? writer.next((p.o1 - p.o0) * inner) : y + row * out_row + p.o0 * s.inner + c0;
      if (quarters && count == 2) {
        const T *r0 = rows[0] + p.a * s.inner, *r1 = rows[1] + p.a * s.inner;
        if (s.inner == 1)
          quarter_row(r0, r1, w.data(), plan.phase, to, p.o1 - p.o0);
        else
          quarter_pixels(r0, r1, w.data(), plan.phase, s.inner, to, p.o1 - p.o0);
        continue;
      }
      if (count == 0) {
        std::fill(sum, sum + values, A(0));
      } else if (inner == s.inner) {
        sum_all_rows(rows.data(), p.a * inner, w.data(), count, sum, (p.b - p.a) * inner);
      } else {
        for (int64_t i = p.a; i < p.b; ++i) {
          sum_all_rows(rows.data(), i * s.inner + c0, w.data(), count, sum + (i - p.a) * inner, inner);
        }
      }
      replicate(plan, p, sum, inner);
      resize_row<T>(plan, p, sum, inner, to);
    }
  });
}

// The same for a contiguous 2-D image that grows. (channels_last gains nothing: its rows are long and would leave L1.)
template <class T>
void resample_growing(const T* x, T* y, const Plan<acc_t<T>>& plan) {
  using A = acc_t<T>;
  constexpr bool kHalf = std::is_same_v<T, float16>;
  const Shape& s = plan.shape;
  const Taps& th = plan.axes[1];
  const int64_t pieces = plan.pieces.size(), in_row = s.in[2], out_row = s.out[2];
  int64_t inputs = 1;
  for (const Piece& p : plan.pieces) inputs = std::max(inputs, p.b - p.a);
  parallel(s.planes * pieces * s.out[1], out_row * (th.k_max + plan.axes[2].k_max) / pieces,
           [&](int64_t begin, int64_t end) {
             constexpr int64_t kMargin = 2;  // the most that a tap of kDouble lies beyond a border
             std::vector<A> buffer(inputs + 2 * kMargin), ring(th.k_max * plan.longest), w(th.k_max), sum(plan.longest);
             A* loaded = buffer.data() + kMargin;
             std::vector<int64_t> held(th.k_max);
             std::vector<const A*> rows(th.k_max);
             const A one = 1;
             Writer<T> writer(pieces == 1 ? y + begin * out_row : y, pieces == 1 ? s.planes * s.out[1] * out_row : 0);
             for (int64_t item = begin; item < end; ++item) {
               const int64_t strip = item / s.out[1], h = item - strip * s.out[1];
               const int64_t plane = pieces == 1 ? strip : strip / pieces;
               const Piece& p = plan.pieces[strip - plane * pieces];
               if (h == 0 || item == begin) std::fill(held.begin(), held.end(), -1);
               const int64_t count = th.stop[h] - th.start[h], n = p.o1 - p.o0;
               int64_t slot = th.start[h] % th.k_max;
               for (int64_t k = 0; k < count; ++k, slot = slot + 1 == th.k_max ? 0 : slot + 1) {
                 const int64_t r = th.start[h] + k;
                 A* resized = ring.data() + slot * plan.longest;
                 rows[k] = resized;
                 w[k] = A(th.w[h * th.k_max + k] * plan.gain);
                 if (std::exchange(held[slot], r) == r) continue;
                 const T* from = x + (plane * s.in[1] + r) * in_row;
                 if constexpr (kHalf)
                   load_row(from + p.a, loaded, p.b - p.a);
                 else
                   sum_rows<T, 1, false>(&from, p.a, &one, loaded, p.b - p.a);
                 replicate(plan, p, loaded, 1);
                 resize_row<A>(plan, p, loaded, 1, resized);
               }
               T* to = pieces == 1 ? writer.next(n) : y + (plane * s.out[1] + h) * out_row + p.o0;
               if (count == 0) {
                 std::fill_n(to, n, T{});
               } else if (!kHalf && count == 2) {
                 mix_rows<T, 2>(rows.data(), w.data(), to, n);
               } else if (!kHalf && count == 4) {
                 mix_rows<T, 4>(rows.data(), w.data(), to, n);
               } else {
                 sum_all_rows<A>(rows.data(), 0, w.data(), count, sum.data(), n);
                 if constexpr (kHalf)
                   store_row(sum.data(), to, n);
                 else
                   copy_row<T>(sum.data(), to, n);
               }
             }
           });
}

// --- copies ----------------------------------------------------------------------------------------------------

// y[i * times + p] = x[i]
template <class T, int times>
PIXFUSE_CLONES void repeat_row(const T* __restrict x, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int p = 0; p < times; ++p) y[i * times + p] = x[i];
  }
}

template <class T>
void pick_row(const T* x, const int64_t* index, T* __restrict y, int64_t n) {
  for (int64_t o = 0; o < n; ++o) y[o] = x[index[o]];
}

// Pixels of `inner` values: of a multiple of 64 or 16 bytes in fixed pieces, else as they come.
template <int piece>
PIXFUSE_CLONES void pick_pieces(const char* x, const int64_t* index, char* y, int64_t bytes, int64_t n) {
  for (int64_t o = 0; o < n; ++o) {
    const char* from = x + index[o] * bytes;
    char* to = y + o * bytes;
    for (int64_t b = 0; b < bytes; b += piece) std::memcpy(to + b, from + b, piece);
  }
}

void pick_pixels(const char* x, const int64_t* index, char* y, int64_t bytes, int64_t n) {
  if (bytes % 64 == 0 && bytes <= 1024) return pick_pieces<64>(x, index, y, bytes, n);
  if (bytes % 16 == 0 && bytes <= 256) return pick_pieces<16>(x, index, y, bytes, n);
  for (int64_t o = 0; o < n; ++o) std::memcpy(y + o * bytes, x + index[o] * bytes, bytes);
}

// How often each sample is repeated, if all are alike, else 0.
int64_t repetitions(const Taps& t) {
  if (t.out % t.in != 0) return 0;
  const int64_t times = t.out / t.in;
  for (int64_t o = 0; o < t.out; ++o) {
    if (t.start[o] != o / times) return 0;
  }
  return times;
}

template <class T>
void copy_samples(const T* x, T* y, const Shape& s, const Taps& td, const Taps& th, const Taps& tw) {
  const int64_t times = repetitions(tw);
  const int64_t in_row = s.in[2] * s.inner, out_row = s.out[2] * s.inner;
  auto build = [&](const T* from, T* to) {
    if (times == 1)
      std::memcpy(to, from, out_row * sizeof(T));
    else if (s.inner > 1)
      pick_pixels((const char*)from, tw.start.data(), (char*)to, s.inner * sizeof(T), s.out[2]);
    else if (times == 2)
      repeat_row<T, 2>(from, to, s.in[2]);
    else if (times == 3)
      repeat_row<T, 3>(from, to, s.in[2]);
    else if (times == 4)
      repeat_row<T, 4>(from, to, s.in[2]);
    else
      pick_row(from, tw.start.data(), to, s.out[2]);
  };
  parallel(s.planes * s.out[0] * s.out[1], out_row, [&](int64_t begin, int64_t end) {
    Writer<T> writer(y + begin * out_row, s.planes * s.out[0] * s.out[1] * out_row);
    const T *source = nullptr, *built = nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t image = row / s.out[1], h = row - image * s.out[1];
      const int64_t plane = s.out[0] == 1 ? image : image / s.out[0], d = image - plane * s.out[0];
      const T* from = x + ((plane * s.in[0] + td.start[d]) * s.in[1] + th.start[h]) * in_row;
      T* to = writer.next(out_row);
      if (from != source)
        build(from, to);
      else if (to != built)
        std::memcpy(to, built, out_row * sizeof(T));
      source = from;
      built = to;
    }
  });
}

// --- the operators ---------------------------------------------------------------------------------------------

// The tables of the three axes; those that x lacks are the identity of one sample.
template <class F>
std::array<Taps, 3> tables(int64_t axes, const F& table) {
  std::array<Taps, 3> t{identity_taps(1), identity_taps(1), identity_taps(1)};
  for (int64_t d = 0; d < axes; ++d) t[3 - axes + d] = table(d);
  return t;
}

// x by the tables t; `copy`: every weight is one and every output has one tap.
Tensor apply(const Tensor& x_any, std::array<Taps, 3> t, double gain, bool copy) {
  const int64_t axes = x_any.dim() - 2;
  std::vector<int64_t> out;
  for (int64_t d = 0; d < axes; ++d) out.push_back(t[3 - axes + d].out);
  const Shape s = shape_of(x_any, out);
  const Tensor x = to_dense(x_any, s.channels_last);
  out.insert(out.begin(), {x.size(0), x.size(1)});
  Tensor y = empty_dense(x, out, s.channels_last);
  if (y.numel() == 0) return y;
  if (copy) {
    auto run = [&](auto kind) {
      using T = decltype(kind);
      copy_samples(data<T>(x), mutable_data<T>(y), s, t[0], t[1], t[2]);
    };
    switch (x.element_size()) {
      case 1:
        run(uint8_t{});
        break;
      case 2:
        run(uint16_t{});
        break;
      case 4:
        run(uint32_t{});
        break;
      default:
        run(uint64_t{});
    }
    return y;
  }
  auto run = [&](auto kind) {
    using T = decltype(kind);
    const Plan<acc_t<T>> plan(s, std::move(t[0]), std::move(t[1]), std::move(t[2]), gain);
    if (plan.growing())
      resample_growing(data<T>(x), mutable_data<T>(y), plan);
    else
      resample(data<T>(x), mutable_data<T>(y), plan);
  };
  if (x.scalar_type() == ScalarType::Byte)
    run(uint8_t{});
  else
    dispatch_floating(x.scalar_type(), run);
  return y;
}

void check_axes(const Tensor& x, size_t entries) {
  STD_TORCH_CHECK(x.dim() >= 3 && x.dim() <= 5 && entries == size_t(x.dim() - 2),
                  "upsample: a 3-D to 5-D image and one entry for each spatial axis are required");
}

Tensor upsample_nearest_cpu(const Tensor& x, std::vector<int64_t> scale, double gain) {
  check_axes(x, scale.size());
  for (int64_t times : scale) STD_TORCH_CHECK(times >= 1, "upsample_nearest: scale must be at least 1");
  auto t = tables(x.dim() - 2, [&](int64_t d) { return repeat_taps(x.size(2 + d), scale[d]); });
  return apply(x, std::move(t), gain, gain == 1);
}

Tensor upsample_nearest_backward_cpu(const Tensor& dy, std::vector<int64_t> scale, double gain) {
  check_axes(dy, scale.size());
  for (int64_t times : scale) STD_TORCH_CHECK(times >= 1, "upsample_nearest: scale must be at least 1");
  auto t =
      tables(dy.dim() - 2, [&](int64_t d) { return repeat_taps(dy.size(2 + d) / scale[d], scale[d]).transposed(); });
  return apply(dy, std::move(t), gain, false);
}

Tensor interpolate_cpu(const Tensor& x, std::vector<int64_t> size, int64_t mode, bool align_corners, bool antialias,
                       std::vector<double> scale) {
  check_axes(x, size.size());
  check_axes(x, scale.size());
  auto t = tables(x.dim() - 2, [&](int64_t d) {
    STD_TORCH_CHECK(size[d] >= 1 && x.size(2 + d) >= 1, "interpolate: empty spatial axis");
    return interpolation_taps(x.size(2 + d), size[d], scale[d], mode, align_corners, antialias);
  });
  return apply(x, std::move(t), 1, mode == kNearest || mode == kNearestExact);
}

Tensor interpolate_backward_cpu(const Tensor& dy, std::vector<int64_t> size, int64_t mode, bool align_corners,
                                bool antialias, std::vector<double> scale) {
  check_axes(dy, size.size());
  check_axes(dy, scale.size());
  auto t = tables(dy.dim() - 2, [&](int64_t d) {
    STD_TORCH_CHECK(size[d] >= 1 && dy.size(2 + d) >= 1, "interpolate: empty spatial axis");
    return interpolation_taps(size[d], dy.size(2 + d), scale[d], mode, align_corners, antialias).transposed();
  });
  return apply(dy, std::move(t), 1, false);
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("upsample_nearest", TORCH_BOX(&upsample_nearest_cpu));
  m.impl("upsample_nearest_backward", TORCH_BOX(&upsample_nearest_backward_cpu));
  m.impl("interpolate", TORCH_BOX(&interpolate_cpu));
  m.impl("interpolate_backward", TORCH_BOX(&interpolate_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
