// group_norm on the CPU: value and first derivative.
//
// An image is walked in one of two ways. A *run* is a stretch of memory in which gamma and beta do not change: a
// channel of a contiguous image. *Columns* are rows of a fixed width in which every position has its own channel:
// pixels of a channels_last image (several side by side where there are few channels), or a whole contiguous image
// with few pixels. Both sum 64 rows or so in float, more in double.
//
// Small problems (a group or a slab of groups that stays in the cache) are one task each: statistics, then the
// result. Large images are cut into pieces of a fixed size: partial statistics per piece, then the whole, then the
// result piece by piece. Nothing depends on the number of threads, nor an image on its batch.
//
// Statistics are sums of x - shift and its square, where shift is the mean of the first few values, in float, and
// where that turns out to be more than 8 deviations from the mean, once again around the mean: two passes, the second
// one only where it changes something.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cpu.h"
#include "vector_math.h"

namespace pixfuse {
namespace {

constexpr int64_t kLanes = 64;       // partial sums of a run
constexpr int64_t kRun = 64 * 64;    // elements of a run that are summed in float
constexpr int64_t kRows = 64;        // rows of columns that are summed in float
constexpr int64_t kWidth = 128;      // columns that a row should have
constexpr int64_t kPixels = 32;      // a contiguous image of fewer pixels is walked in columns
constexpr int64_t kPieces = 64;      // pieces of an image or group at most
constexpr int64_t kPiece = 1 << 17;  // elements of a piece at least
constexpr int64_t kSamples = 16;     // partial sums over the batch at most
// Elements of a task's share of an image above which it is cut into pieces. Measured as float32 forward, one thread,
// in parts of a copy's speed, one task against pieces: channels_last 131,072 elements (1024 pixels, 128 channels) 0.74
// and 0.66; contiguous 65,536 elements 0.79 and 0.60, 40,960 elements 0.71 and 0.62. Above, one thread would have to
// take what others could help with, and the share leaves a cache of 1 MiB (backward reads two images).
constexpr int64_t kSmall = 1 << 17;

// --- two elements ----------------------------------------------------------------------------------------------

enum Act { kNone, kSilu, kRoundedSilu };  // the last one rounds to T before SiLU

// Loops take two elements at a time: the division of SiLU serves both. For bfloat16 they are neighbours, read and
// written as one word, so that no vector has to be widened or narrowed; else they lie some columns or a row apart.
template <class T>
constexpr bool kWords = std::is_same_v<T, bfloat16>;
using Word = uint32_t __attribute__((aligned(2), may_alias));

// Without SiLU single elements do, in the plain order that memory likes best.
template <class T, Act act>
constexpr bool kApart = !kWords<T> && act != kNone;

template <class A>
struct Two {
  A a, b;
};

PIXFUSE_INLINE Two<float> unpack(uint32_t w) {
  return {std::bit_cast<float>(w << 16), std::bit_cast<float>(w & 0xffff0000u)};
}
// To nearest, ties to even. NaN here have zeros in the lower half, see parameter_of, so they need no care.
PIXFUSE_INLINE uint32_t rounded(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  return bits + 0x7fffu + ((bits >> 16) & 1);
}
PIXFUSE_INLINE uint32_t pack(Two<float> v) { return (rounded(v.b) & 0xffff0000u) | rounded(v.a) >> 16; }
template <class T>
PIXFUSE_INLINE T narrow(acc_t<T> v) {
  if constexpr (kWords<T>) {
    return {uint16_t(rounded(v) >> 16)};
  } else {
    return store<T>(v);
  }
}

// The ends of the range in which the sigmoid below is computed. The compiler must not know them: it would take them
// for branches worth separating.
struct Limits {
  float low = -43.f, high = 86.f;
  PIXFUSE_INLINE Limits() { __asm__("" : "+m"(low), "+m"(high)); }
};

// exp(-z) to 1 ulp or, if rough, to 2^-17; z is limited from below, where z * sigmoid(z) vanishes.
template <bool rough>
PIXFUSE_INLINE float exp_minus(float& z, const Limits& limits) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  z = z < limits.low ? limits.low : z;
  const float t = z > limits.high ? limits.high : z;
  const float shifted = t * -1.44269504088896341f + kRound, n = shifted - kRound;
  float r, q;  // exp(-t) = 2^n exp(r), exp(r) = 1 + r + r^2 q
  if constexpr (rough) {
    r = n * -0.693147180559945f - t;
    q = 4.127764e-2f;
    q = q * r + 1.6753532e-1f;
    q = q * r + 5.0005118e-1f;
  } else {
    r = n * 2.12194440e-4f - (n * 0.693359375f + t);
    q = 1.38146e-3f;
    q = q * r + 8.36872e-3f;
    q = q * r + 4.166839e-2f;
    q = q * r + 1.6666521e-1f;
    q = q * r + 4.9999993e-1f;
  }
  const float e = (q * r) * r + (r + 1.f);
  return std::bit_cast<float>(std::bit_cast<int32_t>(e) + (std::bit_cast<int32_t>(shifted) << 23));
}
template <bool rough>
PIXFUSE_INLINE Two<float> sigmoids(Two<float>& z, const Limits& limits) {
  const float e = exp_minus<rough>(z.a, limits), d = 1.f + exp_minus<rough>(z.b, limits);
  const float inverse = 1.f / (e * d + d);
  return {d * inverse, e * inverse + inverse};
}
template <bool rough>
PIXFUSE_INLINE Two<double> sigmoids(Two<double>& z, const Limits&) {
  return {1 / (1 + std::exp(-z.a)), 1 / (1 + std::exp(-z.b))};
}

template <class T, Act act>
PIXFUSE_INLINE Two<acc_t<T>> values_of(Two<acc_t<T>> z, const Limits& limits) {
  if constexpr (act == kNone) return z;
  if constexpr (act == kRoundedSilu) z = {load(narrow<T>(z.a)), load(narrow<T>(z.b))};
  const auto s = sigmoids<sizeof(T) == 2>(z, limits);
  return {z.a * s.a, z.b * s.b};
}

// dy times the derivative of the activation.
template <class T, Act act>
PIXFUSE_INLINE Two<acc_t<T>> slopes_of(Two<acc_t<T>> dy, Two<acc_t<T>> z, const Limits& limits) {
  if constexpr (act == kNone) return dy;
  if constexpr (act == kRoundedSilu) z = {load(narrow<T>(z.a)), load(narrow<T>(z.b))};
  const auto s = sigmoids<false>(z, limits);  // sums of it are float
  return {dy.a * (s.a + s.a * (z.a * (1 - s.a))), dy.b * (s.b + s.b * (z.b * (1 - s.b)))};
}

// The function for an activation; rounding changes nothing where T is the compute type.
#define PIXFUSE_FOR_ACT(function, T, act)                                 \
  ((act) == kNone                            ? function<T, kNone>         \
   : (act) == kRoundedSilu && sizeof(T) == 2 ? function<T, rounded_of<T>> \
                                             : function<T, kSilu>)
template <class T>
constexpr Act rounded_of = sizeof(T) == 2 ? kRoundedSilu : kSilu;

// --- runs ------------------------------------------------------------------------------------------------------

template <class A>
PIXFUSE_INLINE void add_lanes(A* s, A* t) {
  for (int64_t w = kLanes / 2; w > 0; w /= 2) {
    for (int64_t j = 0; j < w; ++j) {
      s[j] += s[j + w];
      t[j] += t[j + w];
    }
  }
}

// Add the sums of x - shift and of its square over n elements.
template <class T>
PIXFUSE_CLONES void run_moments(const T* x, int64_t n, acc_t<T> shift, double* sums) {
  using A = acc_t<T>;
  alignas(64) A s[kLanes] = {}, t[kLanes] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const Word* w = reinterpret_cast<const Word*>(x + i);
    for (int64_t j = 0; j < kLanes; ++j) {
      A a, b, c, d;
      if constexpr (kWords<T>) {
        const auto u = unpack(w[j]), v = unpack(w[j + kLanes]);
        a = u.a - shift, b = u.b - shift, c = v.a - shift, d = v.b - shift;
      } else {
        a = load(x[i + j]) - shift, b = load(x[i + j + kLanes]) - shift;
        c = load(x[i + j + 2 * kLanes]) - shift, d = load(x[i + j + 3 * kLanes]) - shift;
      }
      s[j] += (a + b) + (c + d);
      t[j] += (a * a + b * b) + (c * c + d * d);
    }
  }
  for (; i < n; i += kLanes) {
    const int64_t m = std::min(kLanes, n - i);
    for (int64_t j = 0; j < m; ++j) {
      const A a = load(x[i + j]) - shift;
      s[j] += a;
      t[j] += a * a;
    }
  }
  add_lanes(s, t);
  sums[0] += s[0];
  sums[1] += t[0];
}

// `channels` of n elements each, one after another.
template <class T, Act act>
PIXFUSE_CLONES void run_value(const T* x, T* y, int64_t n, int64_t channels, acc_t<T> mean, const acc_t<T>* scales,
                              const acc_t<T>* offsets) {
  using A = acc_t<T>;
  const Limits limits;
  for (int64_t c = 0; c < channels; ++c, x += n, y += n) {
    const A scale = scales[c], offset = offsets[c];
    auto values = [&](A u, A v) __attribute__((always_inline)) {
      return values_of<T, act>({(u - mean) * scale + offset, (v - mean) * scale + offset}, limits);
    };
    int64_t i = 0;
    if constexpr (kWords<T>) {
      const Word* from = reinterpret_cast<const Word*>(x);
      Word* to = reinterpret_cast<Word*>(y);
#pragma GCC ivdep
      for (; i < n / 2; ++i) {
        const auto u = unpack(from[i]);
        to[i] = pack(values(u.a, u.b));
      }
      i *= 2;
    } else if constexpr (kApart<T, act>) {
      for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
#pragma GCC ivdep
        for (int64_t j = i; j < i + kLanes; ++j) {
          const auto v = values(load(x[j]), load(x[j + kLanes]));
          y[j] = narrow<T>(v.a);
          y[j + kLanes] = narrow<T>(v.b);
        }
      }
    }
#pragma GCC ivdep
    for (; i < n; ++i) y[i] = narrow<T>(values(load(x[i]), load(x[i])).a);
  }
}

// Add the sums of g = dy * act'(z) and of g * xhat over the n elements of each channel, [channel][2]. If there is an
// activation g is kept for run_dx: as it lies, of words those of the first halves of 2 * kLanes elements first.
template <class T, Act act>
PIXFUSE_CLONES void run_sums(const T* x, const T* dy, int64_t n, int64_t channels, acc_t<T> mean, acc_t<T> rstd,
                             const acc_t<T>* gammas, const acc_t<T>* betas, double* sums, acc_t<T>* kept) {
  using A = acc_t<T>;
  const Limits limits;
  for (int64_t c = 0; c < channels; ++c, x += n, dy += n, kept += n) {
    const A gamma = gammas[c], beta = betas[c];
    for (int64_t i = 0; i < n;) {
      const int64_t end = std::min(i + kRun, n);
      alignas(64) A s[kLanes] = {}, t[kLanes] = {};
      for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
        const Word *w = reinterpret_cast<const Word*>(x + i), *dw = reinterpret_cast<const Word*>(dy + i);
#pragma GCC ivdep
        for (int64_t j = 0; j < kLanes; ++j) {
          Two<A> u, g;
          if constexpr (kWords<T>) {
            u = unpack(w[j]), g = unpack(dw[j]);
          } else {
            u = {load(x[i + j]), load(x[i + j + kLanes])}, g = {load(dy[i + j]), load(dy[i + j + kLanes])};
          }
          u = {(u.a - mean) * rstd, (u.b - mean) * rstd};
          g = slopes_of<T, act>(g, {u.a * gamma + beta, u.b * gamma + beta}, limits);
          if constexpr (act != kNone) kept[i + j] = g.a, kept[i + j + kLanes] = g.b;
          s[j] += g.a + g.b;
          t[j] += g.a * u.a + g.b * u.b;
        }
      }
      for (; i < end; i += kLanes) {
        const int64_t m = std::min(kLanes, end - i);
#pragma GCC ivdep
        for (int64_t j = 0; j < m; ++j) {
          const A u = (load(x[i + j]) - mean) * rstd, z = u * gamma + beta, d = load(dy[i + j]);
          const A g = slopes_of<T, act>({d, d}, {z, z}, limits).a;
          if constexpr (act != kNone) kept[i + j] = g;
          s[j] += g;
          t[j] += g * u;
        }
      }
      i = end;
      add_lanes(s, t);
      sums[2 * c] += s[0];
      sums[2 * c + 1] += t[0];
    }
  }
}

// From g as run_sums keeps it, or from dy (with no activation or one to compute here); G is T or the compute type.
template <class T, class G, Act act>
PIXFUSE_CLONES void run_dx(const T* x, const G* dy, T* dx, int64_t n, int64_t channels, acc_t<T> mean, acc_t<T> rstd,
                           const acc_t<T>* gammas, const acc_t<T>* betas, acc_t<T> p, acc_t<T> q) {
  using A = acc_t<T>;
  const Limits limits;
  for (int64_t c = 0; c < channels; ++c, x += n, dy += n, dx += n) {
    const A gamma = gammas[c], beta = betas[c];
    auto values = [&](Two<A> u, Two<A> g) __attribute__((always_inline)) {
      u = {(u.a - mean) * rstd, (u.b - mean) * rstd};
      g = slopes_of<T, act>(g, {u.a * gamma + beta, u.b * gamma + beta}, limits);
      return Two<A>{rstd * ((gamma * g.a - p) - u.a * q), rstd * ((gamma * g.b - p) - u.b * q)};
    };
    int64_t i = 0;
    if constexpr (kWords<T>) {
      for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const Word *from = reinterpret_cast<const Word*>(x + i), *words = reinterpret_cast<const Word*>(dy + i);
        Word* to = reinterpret_cast<Word*>(dx + i);
#pragma GCC ivdep
        for (int64_t j = 0; j < kLanes; ++j) {
          Two<A> g;
          if constexpr (kWords<G>) {
            g = unpack(words[j]);
          } else {
            g = {dy[i + j], dy[i + j + kLanes]};
          }
          to[j] = pack(values(unpack(from[j]), g));
        }
      }
    }
#pragma GCC ivdep
    for (; i < n; ++i) dx[i] = narrow<T>(values({load(x[i]), load(x[i])}, {load(dy[i]), load(dy[i])}).a);
  }
}

// --- columns ---------------------------------------------------------------------------------------------------

// Per-column values that the loops read or sum are *arranged* where T is read in words: first those of the words'
// first halves, then, `half` elements on, those of the second halves.

// The mean of a few rows, exactly the value if they are equal. Not arranged.
template <class T>
PIXFUSE_CLONES void column_shift(const T* x, int64_t ld, int64_t rows, int64_t width, acc_t<T>* __restrict shift) {
  using A = acc_t<T>;
  const A scale = A(1) / A(rows);
  for (int64_t j = 0; j < width; ++j) shift[j] = 0;
  for (int64_t r = 1; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) shift[j] += load(x[r * ld + j]) - load(x[j]);
  }
  for (int64_t j = 0; j < width; ++j) shift[j] = load(x[j]) + shift[j] * scale;
}

template <class T>
PIXFUSE_CLONES void column_moments(const T* x, int64_t ld, int64_t rows, int64_t width, int64_t half,
                                   const acc_t<T>* __restrict shift, acc_t<T>* __restrict s, acc_t<T>* __restrict t) {
  using A = acc_t<T>;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, x += 4 * ld) {
    const T *x1 = x + ld, *x2 = x1 + ld, *x3 = x2 + ld;
    if constexpr (kWords<T>) {
      const Word *w = reinterpret_cast<const Word*>(x), *w1 = reinterpret_cast<const Word*>(x1);
      const Word *w2 = reinterpret_cast<const Word*>(x2), *w3 = reinterpret_cast<const Word*>(x3);
      const A* high = shift + half;
      A *hs = s + half, *ht = t + half;
      for (int64_t j = 0; j < width / 2; ++j) {
        const auto a = unpack(w[j]), b = unpack(w1[j]), c = unpack(w2[j]), d = unpack(w3[j]);
        const A m = shift[j], h = high[j];
        s[j] += ((a.a - m) + (b.a - m)) + ((c.a - m) + (d.a - m));
        t[j] += ((a.a - m) * (a.a - m) + (b.a - m) * (b.a - m)) + ((c.a - m) * (c.a - m) + (d.a - m) * (d.a - m));
        hs[j] += ((a.b - h) + (b.b - h)) + ((c.b - h) + (d.b - h));
        ht[j] += ((a.b - h) * (a.b - h) + (b.b - h) * (b.b - h)) + ((c.b - h) * (c.b - h) + (d.b - h) * (d.b - h));
      }
      for (int64_t j = width & ~int64_t(1); j < width; ++j) {
        for (const T* row : {x, x1, x2, x3}) {
          const A a = load(row[j]) - shift[j / 2];
          s[j / 2] += a;
          t[j / 2] += a * a;
        }
      }
    } else {
      for (int64_t j = 0; j < width; ++j) {
        const A a = load(x[j]) - shift[j], b = load(x1[j]) - shift[j];
        const A c = load(x2[j]) - shift[j], d = load(x3[j]) - shift[j];
        s[j] += (a + b) + (c + d);
        t[j] += (a * a + b * b) + (c * c + d * d);
      }
    }
  }
  for (; r < rows; ++r, x += ld) {
    for (int64_t k = 0; k < (kWords<T> ? 2 : 1); ++k) {
      constexpr int64_t kStep = kWords<T> ? 2 : 1;
      A *sums = s + k * half, *squares = t + k * half;
      const A* from = shift + k * half;
      for (int64_t j = 0; j < (width + kStep - 1 - k) / kStep; ++j) {
        const A a = load(x[kStep * j + k]) - from[j];
        sums[j] += a;
        squares[j] += a * a;
      }
    }
  }
}

template <class T, Act act>
PIXFUSE_CLONES void column_value(const T* x, T* y, int64_t ld, int64_t rows, int64_t width, int64_t half,
                                 const acc_t<T>* __restrict mean, const acc_t<T>* __restrict scale,
                                 const acc_t<T>* __restrict offset) {
  using A = acc_t<T>;
  const Limits limits;
  auto values = [&](A u, A v, int64_t i, int64_t j) __attribute__((always_inline)) {
    return values_of<T, act>({(u - mean[i]) * scale[i] + offset[i], (v - mean[j]) * scale[j] + offset[j]}, limits);
  };
  int64_t r = 0;
  if constexpr (kApart<T, act>) {
    for (; r + 2 <= rows; r += 2, x += 2 * ld, y += 2 * ld) {
      const T* __restrict x0 = x, * __restrict x1 = x + ld;
      T* __restrict y0 = y, * __restrict y1 = y + ld;
      for (int64_t j = 0; j < width; ++j) {
        const auto v = values(load(x0[j]), load(x1[j]), j, j);
        y0[j] = narrow<T>(v.a);
        y1[j] = narrow<T>(v.b);
      }
    }
  }
  for (; r < rows; ++r, x += ld, y += ld) {
    int64_t j = 0;
    if constexpr (kWords<T>) {
      const Word* __restrict from = reinterpret_cast<const Word*>(x);
      Word* __restrict to = reinterpret_cast<Word*>(y);
      for (; j < width / 2; ++j) {
        const auto u = unpack(from[j]);
        to[j] = pack(values(u.a, u.b, j, half + j));
      }
      if (width % 2) y[2 * j] = narrow<T>(values(load(x[2 * j]), load(x[2 * j]), j, j).a);
    } else {
      for (; j < width; ++j) y[j] = narrow<T>(values(load(x[j]), load(x[j]), j, j).a);
    }
  }
}

// If there is an activation, its g is kept for column_dx in rows kept_ld apart, arranged.
template <class T, Act act>
PIXFUSE_CLONES void column_sums(const T* x, const T* dy, int64_t ld, int64_t rows, int64_t width, int64_t half,
                                const acc_t<T>* __restrict mean, const acc_t<T>* __restrict rstd,
                                const acc_t<T>* __restrict gamma, const acc_t<T>* __restrict beta,
                                acc_t<T>* __restrict s, acc_t<T>* __restrict t, acc_t<T>* kept, int64_t kept_ld) {
  using A = acc_t<T>;
  const Limits limits;
  auto products = [&](Two<A>& u, Two<A>& g, int64_t i, int64_t j) __attribute__((always_inline)) {
    u = {(u.a - mean[i]) * rstd[i], (u.b - mean[j]) * rstd[j]};
    g = slopes_of<T, act>(g, {u.a * gamma[i] + beta[i], u.b * gamma[j] + beta[j]}, limits);
  };
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2, x += 2 * ld, dy += 2 * ld, kept += 2 * kept_ld) {
    const T *x1 = x + ld, *dy1 = dy + ld;
    A* kept1 = kept + kept_ld;
    if constexpr (kWords<T>) {
      const Word *w = reinterpret_cast<const Word*>(x), *w1 = reinterpret_cast<const Word*>(x1);
      const Word *d = reinterpret_cast<const Word*>(dy), *d1 = reinterpret_cast<const Word*>(dy1);
      A *hs = s + half, *ht = t + half, *high = kept + half, *high1 = kept1 + half;
#pragma GCC ivdep
      for (int64_t j = 0; j < width / 2; ++j) {
        auto u = unpack(w[j]), g = unpack(d[j]), v = unpack(w1[j]), h = unpack(d1[j]);
        products(u, g, j, half + j);
        products(v, h, j, half + j);
        if constexpr (act != kNone) kept[j] = g.a, high[j] = g.b, kept1[j] = h.a, high1[j] = h.b;
        s[j] += g.a + h.a;
        t[j] += g.a * u.a + h.a * v.a;
        hs[j] += g.b + h.b;
        ht[j] += g.b * u.b + h.b * v.b;
      }
      for (int64_t k = width & ~int64_t(1); k < width; ++k) {
        Two<A> u{load(x[k]), load(x1[k])}, g{load(dy[k]), load(dy1[k])};
        products(u, g, k / 2, k / 2);
        if constexpr (act != kNone) kept[k / 2] = g.a, kept1[k / 2] = g.b;
        s[k / 2] += g.a + g.b;
        t[k / 2] += g.a * u.a + g.b * u.b;
      }
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < width; ++j) {
        Two<A> u{load(x[j]), load(x1[j])}, g{load(dy[j]), load(dy1[j])};
        products(u, g, j, j);
        if constexpr (act != kNone) kept[j] = g.a, kept1[j] = g.b;
        s[j] += g.a + g.b;
        t[j] += g.a * u.a + g.b * u.b;
      }
    }
  }
  for (; r < rows; ++r, x += ld, dy += ld, kept += kept_ld) {
    for (int64_t j = 0; j < width; ++j) {
      const int64_t i = kWords<T> ? j / 2 + j % 2 * half : j;
      Two<A> u{load(x[j]), load(x[j])}, g{load(dy[j]), load(dy[j])};
      products(u, g, i, i);
      if constexpr (act != kNone) kept[i] = g.a;
      s[i] += g.a;
      t[i] += g.a * u.a;
    }
  }
}

// From g as column_sums keeps it, or from dy (with no activation or one to compute here); G is T or the compute type.
template <class T, class G, Act act>
PIXFUSE_CLONES void column_dx(const T* x, const G* dy, T* dx, int64_t ld, int64_t dy_ld, int64_t rows, int64_t width,
                              int64_t half, const acc_t<T>* __restrict mean, const acc_t<T>* __restrict rstd,
                              const acc_t<T>* __restrict gamma, const acc_t<T>* __restrict beta,
                              const acc_t<T>* __restrict p, const acc_t<T>* __restrict q) {
  using A = acc_t<T>;
  const Limits limits;
  auto values = [&](Two<A> u, Two<A> g, int64_t i, int64_t j) __attribute__((always_inline)) {
    u = {(u.a - mean[i]) * rstd[i], (u.b - mean[j]) * rstd[j]};
    g = slopes_of<T, act>(g, {u.a * gamma[i] + beta[i], u.b * gamma[j] + beta[j]}, limits);
    return Two<A>{rstd[i] * ((gamma[i] * g.a - p[i]) - u.a * q[i]), rstd[j] * ((gamma[j] * g.b - p[j]) - u.b * q[j])};
  };
  for (int64_t r = 0; r < rows; ++r, x += ld, dy += dy_ld, dx += ld) {
    if constexpr (kWords<T>) {
      const Word* from = reinterpret_cast<const Word*>(x);
      Word* to = reinterpret_cast<Word*>(dx);
#pragma GCC ivdep
      for (int64_t j = 0; j < width / 2; ++j) {
        Two<A> g;
        if constexpr (kWords<G>) {
          g = unpack(reinterpret_cast<const Word*>(dy)[j]);
        } else {
          g = {dy[j], dy[half + j]};
        }
        to[j] = pack(values(unpack(from[j]), g, j, half + j));
      }
      if (width % 2) {
        const int64_t k = width - 1;
        const A u = load(x[k]), g = load(dy[kWords<G> ? k : k / 2]);
        dx[k] = narrow<T>(values({u, u}, {g, g}, k / 2, k / 2).a);
      }
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < width; ++j) {
        const A u = load(x[j]), g = load(dy[j]);
        dx[j] = narrow<T>(values({u, u}, {g, g}, j, j).a);
      }
    }
  }
}

// Those that compute the activation.
template <class T, Act act>
constexpr auto run_dx_of = run_dx<T, T, act>;
template <class T, Act act>
constexpr auto column_dx_of = column_dx<T, T, act>;

// Arrange values in place.
template <class T>
void arrange(std::vector<acc_t<T>>& values, int64_t width, std::vector<acc_t<T>>& scratch) {
  if constexpr (kWords<T>) {
    const int64_t half = (width + 1) / 2;
    for (int64_t j = 0; j < width; ++j) scratch[j / 2 + j % 2 * half] = values[j];
    std::swap(values, scratch);
  }
}

// Move the sums of a block, arranged, to the totals, not arranged.
template <class T>
PIXFUSE_CLONES void fold(acc_t<T>* __restrict part, double* __restrict total, int64_t width, int64_t half) {
  if constexpr (kWords<T>) {
    for (int64_t j = 0; j < width / 2; ++j) {
      total[2 * j] += part[j];
      total[2 * j + 1] += part[half + j];
    }
    if (width % 2) total[width - 1] += part[width / 2];
    for (int64_t j = 0; j < 2 * half; ++j) part[j] = 0;
  } else {
    for (int64_t j = 0; j < width; ++j) {
      total[j] += part[j];
      part[j] = 0;
    }
  }
}

// Of columns of n values each, from the sums of x - shift and its square: the mean, the squares around it, and what
// the shift being off added to them.
PIXFUSE_CLONES void centre(double* __restrict sum, double* __restrict squares, double* __restrict off, int64_t columns,
                           double n) {
  const double scale = 1 / n;
  for (int64_t j = 0; j < columns; ++j) {
    const double mean = sum[j] * scale, o = mean * sum[j], rest = squares[j] - o;
    sum[j] = mean;
    off[j] = o;
    squares[j] = rest < 0 ? 0 : rest;  // NaN stays
  }
}

// --- statistics ------------------------------------------------------------------------------------------------

struct Moments {
  double count = 0, mean = 0, squares = 0;  // squares: sum of (x - mean)^2

  void merge(const Moments& other) {
    if (other.count == 0) return;
    const double total = count + other.count, delta = other.mean - mean;
    if (count == 0) {
      *this = other;
      return;
    }
    mean += delta * (other.count / total);
    squares += other.squares + delta * delta * (count * other.count / total);
    count = total;
  }
};

// Whether sums around a shift that is `off` (squared, times the count) away lose too much of the squares.
bool too_far(double off, double squares, double count, double eps) { return off > 64 * (squares + eps * count); }

template <class T>
Moments moments_of_run(const T* x, int64_t n, double eps) {
  using A = acc_t<T>;
  const A first = load(x[0]);
  const int64_t few = std::min(n, kLanes);
  double sums[2] = {};
  run_moments(x, few, first, sums);
  A shift = first + A(sums[0] / double(few));
  const double count = double(n);
  for (bool again = false;; again = true) {
    sums[0] = sums[1] = 0;
    for (int64_t i = 0; i < n; i += kRun) run_moments(x + i, std::min(kRun, n - i), shift, sums);
    const double delta = sums[0] / count, off = delta * sums[0], squares = std::max(sums[1] - off, 0.);
    if (again || !too_far(off, squares, count, eps)) return {count, double(shift) + delta, squares};
    shift += A(delta);
  }
}

// Statistics of any group: at(i) is its i-th element. For values whose squares leave the range of float.
template <class A, class At>
void slow_statistics(int64_t n, double eps, const At& at, double& mean, double& rstd) {
  const A first = at(0);
  double size = std::sqrt(eps);
  for (int64_t i = 0; i < n; ++i) size = std::max(size, std::fabs(double(at(i)) - double(first)));
  int exponent = 0;
  if (std::isfinite(size) && size > 0) std::frexp(size, &exponent);
  const double scale = std::ldexp(1., std::clamp(-exponent, -1000, 1000));
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double(at(i)) - double(first)) * scale;
  const double middle = sum / double(n);
  for (int64_t i = 0; i < n; ++i) {
    const double d = (double(at(i)) - double(first)) * scale - middle;
    squares += d * d;
  }
  mean = double(first) + middle / scale;
  rstd = scale / std::sqrt(squares / double(n) + eps * scale * scale);
}

template <class A>
struct Statistics {
  A mean, rest, rstd;  // the mean is mean + rest
};

template <class A, class At>
Statistics<A> statistics_of(const Moments& m, int64_t n, double eps, const At& at) {
  constexpr double kTiny = std::is_same_v<A, float> ? 1e-30 : 1e-280;
  const double variance = m.squares / m.count;
  double mean = m.mean, rstd = 1 / std::sqrt(variance + eps);
  if (!std::isfinite(variance) || variance + eps < kTiny) slow_statistics<A>(n, eps, at, mean, rstd);
  const A rounded = A(mean);
  return {rounded, A(mean - double(rounded)), A(rstd)};
}

// From this many deviations on, the rounding of a mean in float is felt.
template <class A>
bool mean_needs_rest(A mean, A rstd) {
  return std::is_same_v<A, float> && std::fabs(mean) * rstd > 64;
}

// --- geometry --------------------------------------------------------------------------------------------------

struct Problem {
  int64_t samples, channels, groups, pixels;
  double eps;
  bool channels_last;
  Act act;

  int64_t per_group() const { return channels / groups; }
  int64_t group_size() const { return per_group() * pixels; }
  int64_t image_size() const { return channels * pixels; }
  bool empty() const { return samples == 0 || channels == 0; }
};

Problem problem_of(const Tensor& x, int64_t groups, double eps, int64_t act, bool round, bool channels_last) {
  STD_TORCH_CHECK(x.dim() >= 2, "group_norm: x must be at least 2-D");
  Problem p{x.size(0), x.size(1), groups, 1, eps, channels_last, act == 0 ? kNone : round ? kRoundedSilu : kSilu};
  for (int64_t d = 2; d < x.dim(); ++d) p.pixels *= x.size(d);
  STD_TORCH_CHECK(groups > 0 && p.channels % groups == 0, "group_norm: num_groups must divide the channels of x");
  STD_TORCH_CHECK(p.pixels > 0, "group_norm: x must have no empty spatial axis");
  STD_TORCH_CHECK(act == 0 || act == 1, "group_norm: act must be 0 or 1");
  return p;
}

// Which columns a task walks: those of `groups` groups from `first` on.
struct Columns {
  int64_t first, groups;   // groups
  int64_t per_group;       // channels
  int64_t repeat;          // columns per channel: the pixels of a contiguous image
  int64_t pixels_per_row;  // several in a row where there are few channels
  int64_t ld, rows, tail;  // distance of rows, whole rows, columns of the short last row

  int64_t group_columns() const { return per_group * repeat; }
  int64_t pixel_columns() const { return groups * group_columns(); }
  int64_t width() const { return pixels_per_row * pixel_columns(); }
  int64_t half() const { return (width() + 1) / 2; }
  int64_t channel() const { return first * per_group; }

  // Put channel values, value(group, channel) counted from the first of the columns, in their columns.
  template <class A, class F>
  void spread(A* __restrict to, const F& value) const {
    int64_t j = 0;
    for (int64_t g = 0; g < groups; ++g) {
      if (repeat == 1) {
        for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) to[j++] = value(g, c);
        continue;
      }
      for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) {
        const A v = value(g, c);
        for (int64_t k = 0; k < repeat; ++k) to[j++] = v;
      }
    }
    for (int64_t p = 1; p < pixels_per_row; ++p) std::copy_n(to, pixel_columns(), to + p * pixel_columns());
  }

  // f(group, column) over all columns.
  template <class F>
  void each(const F& f) const {
    int64_t j = 0;
    for (int64_t p = 0; p < pixels_per_row; ++p) {
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t d = 0; d < group_columns(); ++d, ++j) f(g, j);
      }
    }
  }
};

// How an image is cut for tasks.
struct Plan {
  bool columns;   // else runs
  bool pieces;    // cut in pieces, else one task per slab of groups
  int64_t slab;   // groups of a task
  int64_t slabs;  // tasks per image
  int64_t piece;  // pixels (columns) or elements (runs: of the group) of a piece
  int64_t count;  // pieces (columns: of the image, runs: of the group)
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Plan plan_of(const Problem& p) {
  Plan plan{};
  plan.columns = p.channels_last || (p.pixels < kPixels && p.group_size() <= kRun);
  const int64_t columns = p.per_group() * (p.channels_last ? 1 : p.pixels);  // of a group
  plan.slab = plan.columns ? std::min(p.groups, ceil_div(kWidth, columns)) : 1;
  const int64_t twice = std::min(p.groups, 2 * plan.slab);  // longer stretches of memory, if they are few
  if (plan.columns && twice * p.group_size() <= kSmall) plan.slab = twice;
  plan.slabs = ceil_div(p.groups, plan.slab);
  const int64_t share = plan.slab * p.group_size();
  plan.pieces = share > kSmall && !(plan.columns && !p.channels_last);
  if (plan.pieces) {
    const int64_t unit = plan.columns ? p.channels : 1, total = plan.columns ? p.pixels : p.group_size();
    plan.piece = std::max(ceil_div(kPiece, unit), ceil_div(total, kPieces));
    plan.piece = ceil_div(plan.piece, kRun) * kRun;  // whole rows and whole blocks
    if (plan.columns) plan.piece = ceil_div(std::max(ceil_div(kPiece, unit), ceil_div(total, kPieces)), kRows) * kRows;
    plan.count = ceil_div(total, plan.piece);
  }
  return plan;
}

// The columns of groups [first, first + groups) in pixels [from, to) of a channels_last image.
Columns columns_of(const Problem& p, int64_t first, int64_t groups, int64_t from, int64_t to) {
  Columns v{first, groups, p.per_group(), 1, 1, p.channels, to - from, 0};
  if (p.channels < kWidth && groups == p.groups) {
    v.pixels_per_row = kWidth / p.channels;
    v.ld = v.pixels_per_row * p.channels;
    v.rows = (to - from) / v.pixels_per_row;
    v.tail = (to - from) % v.pixels_per_row * p.channels;
  }
  return v;
}

// The columns of groups in a contiguous image of few pixels: a single row.
Columns columns_of(const Problem& p, int64_t first, int64_t groups) {
  return {first, groups, p.per_group(), p.pixels, 1, p.image_size(), 1, 0};
}

// What a task keeps beside the image, per column.
template <class A>
struct Work {
  std::vector<A> shift, arranged, scratch, s, t, mean, scale, offset, gamma, p, q, kept;
  std::vector<double> sum, squares, off;

  explicit Work(int64_t width) {
    width += width % 2;
    for (auto* values : {&shift, &arranged, &scratch, &s, &t, &mean, &scale, &offset}) values->resize(width);
    sum.resize(width);
    squares.resize(width);
    off.resize(width);
  }
  void for_backward(int64_t kept_size) {
    for (auto* values : {&gamma, &p, &q}) values->resize(shift.size());
    kept.resize(kept_size);
  }
};

int64_t widest(const Problem& p, const Plan& plan) {
  if (!plan.columns) return 0;
  if (!p.channels_last) return plan.slab * p.group_size();
  return std::max(plan.pieces ? p.channels : plan.slab * p.per_group(), kWidth);
}

// f(rows, offset of the first) over blocks of whole rows, then f of the short row: block(offset, rows, width).
template <class F>
void each_block(const Columns& v, const F& block) {
  for (int64_t r = 0; r < v.rows; r += kRows) block(r * v.ld, std::min(kRows, v.rows - r), v.width());
  if (v.tail) block(v.rows * v.ld, int64_t(1), v.tail);
}

template <class T>
void moments_of_columns(const T* x, const Columns& v, double eps, Work<acc_t<T>>& w, Moments* groups) {
  using A = acc_t<T>;
  const int64_t width = v.width();
  if (v.rows) {
    column_shift(x, v.ld, std::min<int64_t>(v.rows, 8), width, w.shift.data());
  } else {
    std::fill_n(w.shift.data(), width, A(0));
    column_shift(x, v.ld, 1, v.tail, w.shift.data());
  }
  for (bool again = false;; again = true) {
    std::fill(w.s.begin(), w.s.end(), A(0));
    std::fill(w.t.begin(), w.t.end(), A(0));
    std::fill_n(w.sum.data(), width, 0.);
    std::fill_n(w.squares.data(), width, 0.);
    if constexpr (kWords<T>) {
      w.arranged = w.shift;
      arrange<T>(w.arranged, width, w.scratch);
    }
    const A* shift = kWords<T> ? w.arranged.data() : w.shift.data();
    each_block(v, [&](int64_t at, int64_t rows, int64_t columns) {
      column_moments(x + at, v.ld, rows, columns, v.half(), shift, w.s.data(), w.t.data());
      fold<T>(w.s.data(), w.sum.data(), columns, v.half());
      fold<T>(w.t.data(), w.squares.data(), columns, v.half());
    });
    // From here on per column: sum becomes the mean around the shift, squares that around the mean.
    const double whole = double(v.rows), longer = double(v.rows + 1);
    centre(w.sum.data(), w.squares.data(), w.off.data(), v.tail, longer);
    if (v.rows) centre(w.sum.data() + v.tail, w.squares.data() + v.tail, w.off.data() + v.tail, width - v.tail, whole);
    // Per group: the mean of the columns' means, from the first one's shift; squares within and between columns.
    const int64_t pixels = v.rows ? v.pixels_per_row : v.tail / v.pixel_columns(), step = v.pixel_columns();
    bool far = false;
    for (int64_t g = 0; g < v.groups; ++g) {
      const int64_t begin = g * v.group_columns(), end = begin + v.group_columns();
      const double base = w.shift[begin];
      double count = 0, weighted = 0, off = 0, squares = 0;
      for (int64_t p = 0; p < pixels; ++p) {
        const double n = p * step < v.tail ? longer : whole;
        double sum = 0;
        for (int64_t j = p * step + begin; j < p * step + end; ++j) {
          sum += (double(w.shift[j]) - base) + w.sum[j];
          off += w.off[j];
          squares += w.squares[j];
        }
        count += n * double(end - begin);
        weighted += n * sum;
      }
      const double middle = weighted / count;
      for (int64_t p = 0; p < pixels; ++p) {
        double sum = 0;
        for (int64_t j = p * step + begin; j < p * step + end; ++j) {
          const double d = (double(w.shift[j]) - base) + w.sum[j] - middle;
          sum += d * d;
        }
        squares += sum * (p * step < v.tail ? longer : whole);
      }
      groups[g] = {count, base + middle, squares};
      far = far || too_far(off, squares, count, eps);
    }
    if (again || !far) return;
    for (int64_t j = 0; j < pixels * step; ++j) w.shift[j] += A(w.sum[j]);
  }
}

// A parameter as values of the compute type, NaN in its usual form.
template <class A>
std::vector<A> parameter_of(const std::optional<Tensor>& t, int64_t channels, A otherwise) {
  if (!t) return std::vector<A>(channels, otherwise);
  std::vector<A> values = parameter<A>(t);
  for (A& v : values) v = v != v ? std::numeric_limits<A>::quiet_NaN() : v;
  return values;
}

// --- forward ---------------------------------------------------------------------------------------------------

template <class T>
struct Forward {
  using A = acc_t<T>;
  Problem problem;
  Plan plan;
  const T* x;
  T* y;
  A *mean, *rstd;
  std::vector<A> gammas, betas;

  Statistics<A> finish(int64_t n, int64_t g, const Moments& m) const {
    const T* image = x + n * problem.image_size();
    const int64_t d = problem.per_group(), size = problem.group_size();
    const Statistics<A> s = statistics_of<A>(m, size, problem.eps, [&](int64_t i) {
      return problem.channels_last ? load(image[i / d * problem.channels + g * d + i % d]) : load(image[g * size + i]);
    });
    mean[n * problem.groups + g] = s.mean;
    rstd[n * problem.groups + g] = s.rstd;
    return s;
  }

  void value(const T* from, T* to, const Columns& v, Work<A>& w, const Statistics<A>* s) const {
    const A *g0 = gammas.data() + v.channel(), *b0 = betas.data() + v.channel();
    v.spread(w.mean.data(), [&](int64_t g, int64_t) { return s[g].mean; });
    v.spread(w.scale.data(), [&](int64_t g, int64_t c) { return g0[c] * s[g].rstd; });
    v.spread(w.offset.data(), [&](int64_t g, int64_t c) { return b0[c] - s[g].rest * (g0[c] * s[g].rstd); });
    for (auto* values : {&w.mean, &w.scale, &w.offset}) arrange<T>(*values, v.width(), w.scratch);
    const auto apply = PIXFUSE_FOR_ACT(column_value, T, problem.act);
    const A *m = w.mean.data(), *a = w.scale.data(), *b = w.offset.data();
    if (v.rows) apply(from, to, v.ld, v.rows, v.width(), v.half(), m, a, b);
    if (v.tail) apply(from + v.rows * v.ld, to + v.rows * v.ld, v.ld, 1, v.tail, v.half(), m, a, b);
  }

  // `channels` of n elements each, the first of which is c; scale and offset have room for them.
  void value(int64_t at, int64_t n, int64_t c, int64_t channels, const Statistics<A>& s, A* scale, A* offset) const {
    for (int64_t k = 0; k < channels; ++k) {
      scale[k] = gammas[c + k] * s.rstd;
      offset[k] = betas[c + k] - s.rest * scale[k];
    }
    PIXFUSE_FOR_ACT(run_value, T, problem.act)(x + at, y + at, n, channels, s.mean, scale, offset);
  }

  void run() const {
    if (problem.empty()) {
      std::fill_n(mean, problem.samples * problem.groups, A(0));
      std::fill_n(rstd, problem.samples * problem.groups, A(0));
    } else if (!plan.columns) {
      plan.pieces ? runs_in_pieces() : runs();
    } else {
      plan.pieces ? columns_in_pieces() : columns();
    }
  }

  void runs() const {
    const int64_t size = problem.group_size(), d = problem.per_group(), pixels = problem.pixels;
    parallel(problem.samples * problem.groups, size, [&](int64_t begin, int64_t end) {
      std::vector<A> scale(d), offset(d);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i / problem.groups, g = i % problem.groups;
        const auto s = finish(n, g, moments_of_run(x + i * size, size, problem.eps));
        value(i * size, pixels, g * d, d, s, scale.data(), offset.data());
      }
    });
  }

  void runs_in_pieces() const {
    const int64_t size = problem.group_size(), pixels = problem.pixels, groups = problem.groups, count = plan.count;
    const int64_t tile = std::max<int64_t>(1, kPieces / (groups * count));  // images at a time
    std::vector<Moments> partial(tile * groups * count);
    std::vector<Statistics<A>> s(tile * groups);
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t tasks = std::min(tile, problem.samples - n0) * groups, first = n0 * groups;
      parallel(tasks * count, plan.piece, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t from = i % count * plan.piece, to = std::min(from + plan.piece, size);
          partial[i] = moments_of_run(x + (first + i / count) * size + from, to - from, problem.eps);
        }
      });
      parallel(tasks, count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Moments m;
          for (int64_t k = 0; k < count; ++k) m.merge(partial[i * count + k]);
          s[i] = finish((first + i) / groups, (first + i) % groups, m);
        }
      });
      parallel(tasks * count, plan.piece, [&](int64_t begin, int64_t end) {
        for (int64_t i = end; i-- > begin;) {  // backwards: the last pieces are still in the cache
          const int64_t start = (first + i / count) * size, last = std::min((i % count + 1) * plan.piece, size);
          for (int64_t at = i % count * plan.piece; at < last;) {
            const int64_t c = at / pixels, stop = std::min(last, (c + 1) * pixels);
            A scale, offset;
            value(start + at, stop - at, (first + i / count) % groups * problem.per_group() + c, 1, s[i / count],
                  &scale, &offset);
            at = stop;
          }
        }
      });
    }
  }

  void columns() const {
    const int64_t image = problem.image_size();
    parallel(problem.samples * plan.slabs, plan.slab * problem.group_size(), [&](int64_t begin, int64_t end) {
      Work<A> w(widest(problem, plan));
      std::vector<Moments> m(plan.slab);
      std::vector<Statistics<A>> s(plan.slab);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i / plan.slabs, first = i % plan.slabs * plan.slab;
        const int64_t groups = std::min(plan.slab, problem.groups - first);
        const Columns v = problem.channels_last ? columns_of(problem, first, groups, 0, problem.pixels)
                                                : columns_of(problem, first, groups);
        const int64_t at = n * image + v.channel() * v.repeat;
        if (problem.channels_last) {
          moments_of_columns(x + at, v, problem.eps, w, m.data());
        } else {
          const int64_t size = problem.group_size();
          for (int64_t g = 0; g < groups; ++g) m[g] = moments_of_run(x + at + g * size, size, problem.eps);
        }
        for (int64_t g = 0; g < groups; ++g) s[g] = finish(n, first + g, m[g]);
        value(x + at, y + at, v, w, s.data());
      }
    });
  }

  void columns_in_pieces() const {
    const int64_t image = problem.image_size(), groups = problem.groups, count = plan.count;
    const int64_t tile = std::max<int64_t>(1, kPieces / count);
    std::vector<Moments> partial(tile * count * groups);
    std::vector<Statistics<A>> s(tile * groups);
    auto piece = [&](int64_t i) {
      const int64_t from = i % count * plan.piece;
      return columns_of(problem, 0, groups, from, std::min(from + plan.piece, problem.pixels));
    };
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t tasks = std::min(tile, problem.samples - n0) * count;
      auto start = [&](int64_t i) { return (n0 + i / count) * image + i % count * plan.piece * problem.channels; };
      parallel(tasks, plan.piece * problem.channels, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        for (int64_t i = begin; i < end; ++i) {
          moments_of_columns(x + start(i), piece(i), problem.eps, w, partial.data() + i * groups);
        }
      });
      parallel(tasks / count * groups, count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Moments m;
          for (int64_t k = 0; k < count; ++k) m.merge(partial[(i / groups * count + k) * groups + i % groups]);
          s[i] = finish(n0 + i / groups, i % groups, m);
        }
      });
      parallel(tasks, plan.piece * problem.channels, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        for (int64_t i = end; i-- > begin;) {
          value(x + start(i), y + start(i), piece(i), w, s.data() + i / count * groups);
        }
      });
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> group_norm_cpu(const Tensor& x_any, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, int64_t num_groups, double eps,
                                                  int64_t act, bool round_before_act) {
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last);
  const Problem problem = problem_of(x, num_groups, eps, act, round_before_act, channels_last);
  STD_TORCH_CHECK(!weight || weight->numel() == problem.channels,
                  "group_norm: weight must have an element per channel");
  STD_TORCH_CHECK(!bias || bias->numel() == problem.channels, "group_norm: bias must have an element per channel");
  Tensor y = empty_dense(x, sizes_of(x), channels_last);
  Tensor mean = empty_dense(x, {problem.samples, num_groups}, false, acc_dtype(x.scalar_type()));
  Tensor rstd = empty_dense(x, {problem.samples, num_groups}, false, acc_dtype(x.scalar_type()));
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    Forward<T>{problem,
               problem.empty() ? Plan{} : plan_of(problem),
               data<T>(x),
               mutable_data<T>(y),
               mutable_data<A>(mean),
               mutable_data<A>(rstd),
               parameter_of<A>(weight, problem.channels, 1),
               parameter_of<A>(bias, problem.channels, 0)}
        .run();
  });
  return {y, mean, rstd};
}

// --- backward --------------------------------------------------------------------------------------------------

// With g = dy * act'(z) and, per channel, db = sum of g and ds = sum of g * xhat, per group of n elements
// p = sum of gamma * db / n and q = sum of gamma * ds / n:  dx = rstd * (gamma * g - p - xhat * q).
template <class T>
struct Backward {
  using A = acc_t<T>;
  Problem problem;
  Plan plan;
  const T *dy, *x;
  const A *mean, *rstd;
  T* dx;               // null if not needed
  A *dweight, *dbias;  // null if not needed
  std::vector<A> gammas, betas;

  struct Sums {
    double b = 0, s = 0;  // of g and of g * xhat
  };
  // Per group; the kernels take xhat without the rest of the mean, so it goes into beta and p.
  struct Group {
    A mean, rstd, rest, p, q;  // rest: that of the mean, times -rstd
  };

  A beta(int64_t c, const Group& u) const { return betas[c] + u.rest * gammas[c]; }

  Group group(int64_t n, int64_t g) const {
    const int64_t i = n * problem.groups + g;
    return {mean[i], rstd[i], A(0), A(0), A(0)};
  }

  // The kernels' sums of a channel as the definition's.
  static Sums corrected(const Sums& c, const Group& u) { return {c.b, c.s + double(u.rest) * c.b}; }

  void set(Group& u, double b, double s) const {  // sums over the group, weighted with gamma
    const double n = double(problem.group_size());
    u.q = A(s / n);
    u.p = A(b / n + double(u.rest) * (s / n));
  }

  // g = dy * act'(z) is computed once where there is room for it: in dx if that has the compute type, else beside it
  // if the image is not cut.
  bool keeps_in_dx() const { return std::is_same_v<T, A> && dx; }
  bool keeps() const { return problem.act != kNone && (keeps_in_dx() || !plan.pieces); }
  int64_t kept_size() const {
    if (problem.act == kNone || keeps_in_dx()) return 0;
    if (plan.pieces) return plan.columns ? widest(problem, plan) + 1 : kRun;
    return plan.slab * problem.group_size() + problem.pixels + widest(problem, plan) + 2;
  }
  A* kept_at(int64_t at, Work<A>& w) const {
    if constexpr (std::is_same_v<T, A>) {
      if (dx) return dx + at;
    }
    return w.kept.data();
  }

  // The kernels' sums of `channels` of n elements each, the first of which is c.
  void sums(int64_t at, int64_t n, int64_t c, int64_t channels, const Group& u, Work<A>& w, Sums* total) const {
    const auto sum = PIXFUSE_FOR_ACT(run_sums, T, problem.act);
    w.offset.resize(channels);
    for (int64_t k = 0; k < channels; ++k) {
      w.offset[k] = beta(c + k, u);
      total[k] = {};
    }
    const int64_t step = plan.pieces && !keeps() ? kRun : n;  // of a single channel, whose g is lost then
    for (int64_t i = 0; i < n; i += step) {
      sum(x + at + i, dy + at + i, std::min(step, n - i), channels, u.mean, u.rstd, gammas.data() + c, w.offset.data(),
          &total->b, kept_at(at + i, w));
    }
  }

  void result(int64_t at, int64_t n, int64_t c, int64_t channels, const Group& u, Work<A>& w) const {
    w.offset.resize(channels);
    for (int64_t k = 0; k < channels; ++k) w.offset[k] = beta(c + k, u);
    auto apply = [&](auto* kernel, auto* from) {
      kernel(x + at, from, dx + at, n, channels, u.mean, u.rstd, gammas.data() + c, w.offset.data(), u.p, u.q);
    };
    if (keeps())
      apply(run_dx<T, A, kNone>, kept_at(at, w));
    else
      apply(PIXFUSE_FOR_ACT(run_dx_of, T, problem.act), dy + at);
  }

  void coefficients(const Columns& v, Work<A>& w, const Group* u) const {
    const A *g0 = gammas.data() + v.channel(), *b0 = betas.data() + v.channel();
    v.spread(w.mean.data(), [&](int64_t g, int64_t) { return u[g].mean; });
    v.spread(w.scale.data(), [&](int64_t g, int64_t) { return u[g].rstd; });
    v.spread(w.gamma.data(), [&](int64_t, int64_t c) { return g0[c]; });
    v.spread(w.offset.data(), [&](int64_t g, int64_t c) { return b0[c] + u[g].rest * g0[c]; });
    for (auto* values : {&w.mean, &w.scale, &w.gamma, &w.offset}) arrange<T>(*values, v.width(), w.scratch);
  }

  int64_t kept_ld(const Columns& v) const { return keeps_in_dx() ? v.ld : keeps() ? 2 * v.half() : 0; }

  // The columns' coefficients for their sums; then the sums, per channel of the columns.
  void sums(int64_t at, const Columns& v, Work<A>& w, const Group* u, Sums* channels) const {
    const int64_t width = v.width(), d = v.per_group;
    coefficients(v, w, u);
    std::fill(w.s.begin(), w.s.end(), A(0));
    std::fill(w.t.begin(), w.t.end(), A(0));
    std::fill_n(w.sum.data(), width, 0.);
    std::fill_n(w.squares.data(), width, 0.);
    const auto sum = PIXFUSE_FOR_ACT(column_sums, T, problem.act);
    A* kept = kept_at(at, w);
    const int64_t kept_ld = this->kept_ld(v);
    each_block(v, [&](int64_t offset, int64_t rows, int64_t columns) {
      sum(x + at + offset, dy + at + offset, v.ld, rows, columns, v.half(), w.mean.data(), w.scale.data(),
          w.gamma.data(), w.offset.data(), w.s.data(), w.t.data(), kept + offset / v.ld * kept_ld, kept_ld);
      fold<T>(w.s.data(), w.sum.data(), columns, v.half());
      fold<T>(w.t.data(), w.squares.data(), columns, v.half());
    });
    for (int64_t c = 0; c < v.groups * d; ++c) {
      Sums total;
      for (int64_t p = 0; p < v.pixels_per_row; ++p) {
        for (int64_t k = 0; k < v.repeat; ++k) {
          const int64_t j = p * v.pixel_columns() + c * v.repeat + k;
          total.b += w.sum[j];
          total.s += w.squares[j];
        }
      }
      channels[c] = total;
    }
  }

  // dx, after set(); the other coefficients are there from sums() if `fresh` is false.
  void result(int64_t at, const Columns& v, Work<A>& w, const Group* u, bool fresh) const {
    if (fresh) coefficients(v, w, u);
    v.spread(w.p.data(), [&](int64_t g, int64_t) { return u[g].p; });
    v.spread(w.q.data(), [&](int64_t g, int64_t) { return u[g].q; });
    for (auto* values : {&w.p, &w.q}) arrange<T>(*values, v.width(), w.scratch);
    auto apply = [&](auto* kernel, auto* from, int64_t from_ld) {
      auto rows = [&](int64_t first, int64_t count, int64_t columns) {
        const int64_t here = at + first * v.ld;
        kernel(x + here, from + first * from_ld, dx + here, v.ld, from_ld, count, columns, v.half(), w.mean.data(),
               w.scale.data(), w.gamma.data(), w.offset.data(), w.p.data(), w.q.data());
      };
      if (v.rows) rows(0, v.rows, v.width());
      if (v.tail) rows(v.rows, 1, v.tail);
    };
    if (keeps())
      apply(column_dx<T, A, kNone>, kept_at(at, w), kept_ld(v));
    else
      apply(PIXFUSE_FOR_ACT(column_dx_of, T, problem.act), dy + at, v.ld);
  }

  // From the channels' sums of `groups` groups to their p and q, and to the parameters' sums.
  void close(int64_t first, int64_t groups, Group* u, const Sums* channels, Sums* parameters) const {
    const int64_t d = problem.per_group();
    for (int64_t g = 0; g < groups; ++g) {
      double b = 0, s = 0;
      for (int64_t k = 0; k < d; ++k) {
        const int64_t c = (first + g) * d + k;
        const Sums here = corrected(channels[g * d + k], u[g]);
        b += double(gammas[c]) * here.b;
        s += double(gammas[c]) * here.s;
        parameters[c].b += here.b;
        parameters[c].s += here.s;
      }
      set(u[g], b, s);
    }
  }

  void run() {
    const int64_t channels = problem.channels;
    // Sums over the batch: over fixed stretches of images, then those in order.
    const int64_t stretch = std::max<int64_t>(1, ceil_div(problem.samples, kSamples));
    const int64_t stretches = problem.empty() ? 0 : ceil_div(problem.samples, stretch);
    std::vector<Sums> parameters(std::max<int64_t>(stretches, 1) * channels);
    if (problem.empty()) {
    } else if (plan.pieces) {
      plan.columns ? columns_in_pieces(parameters.data()) : runs_in_pieces(parameters.data());
    } else {
      small(stretch, stretches, parameters.data());
    }
    for (int64_t c = 0; c < channels; ++c) {
      Sums total;
      for (int64_t k = 0; k < stretches; ++k) {
        total.b += parameters[k * channels + c].b;
        total.s += parameters[k * channels + c].s;
      }
      if (dbias) dbias[c] = A(total.b);
      if (dweight) dweight[c] = A(total.s);
    }
  }

  // One task per slab of groups and stretch of images.
  void small(int64_t stretch, int64_t stretches, Sums* parameters) const {
    const int64_t image = problem.image_size(), size = problem.group_size(), d = problem.per_group();
    const int64_t cost = stretch * plan.slab * size;
    parallel(stretches * plan.slabs, cost, [&](int64_t begin, int64_t end) {
      Work<A> w(widest(problem, plan));
      w.for_backward(kept_size());
      std::vector<Sums> channels(plan.slab * d);
      std::vector<Group> u(plan.slab);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % plan.slabs * plan.slab, groups = std::min(plan.slab, problem.groups - first);
        Sums* totals = parameters + i / plan.slabs * problem.channels;
        const int64_t last = std::min((i / plan.slabs + 1) * stretch, problem.samples);
        for (int64_t n = i / plan.slabs * stretch; n < last; ++n) {
          for (int64_t g = 0; g < groups; ++g) u[g] = group(n, first + g);
          if (!plan.columns) {
            const int64_t at = n * image + first * size;
            if (mean_needs_rest(u[0].mean, u[0].rstd)) u[0].rest = rest_of_run(at, size, u[0]) * -u[0].rstd;
            sums(at, problem.pixels, first * d, d, u[0], w, channels.data());
            close(first, 1, u.data(), channels.data(), totals);
            if (dx) result(at, problem.pixels, first * d, d, u[0], w);
            continue;
          }
          const Columns v = problem.channels_last ? columns_of(problem, first, groups, 0, problem.pixels)
                                                  : columns_of(problem, first, groups);
          const int64_t at = n * image + v.channel() * v.repeat;
          rests(at, v, w, u.data());
          sums(at, v, w, u.data(), channels.data());
          close(first, groups, u.data(), channels.data(), totals);
          if (dx) result(at, v, w, u.data(), false);
        }
      }
    });
  }

  // The mean of x - mean in float: what the rounding of the mean left.
  A rest_of_run(int64_t at, int64_t n, const Group& u) const {
    double total[2] = {};
    for (int64_t i = 0; i < n; i += kRun) run_moments(x + at + i, std::min(kRun, n - i), u.mean, total);
    return A(total[0] / double(n));
  }

  // The same for the groups of columns, summed; false if no group needs it.
  bool sum_rests(int64_t at, const Columns& v, Work<A>& w, const Group* u, double* totals) const {
    bool any = false;
    for (int64_t g = 0; g < v.groups; ++g) any = any || mean_needs_rest(u[g].mean, u[g].rstd);
    std::fill_n(totals, v.groups, 0.);
    if (!any) return false;
    v.spread(w.mean.data(), [&](int64_t g, int64_t) { return u[g].mean; });
    arrange<T>(w.mean, v.width(), w.scratch);
    std::fill(w.s.begin(), w.s.end(), A(0));
    std::fill_n(w.sum.data(), v.width(), 0.);
    each_block(v, [&](int64_t offset, int64_t rows, int64_t columns) {
      column_moments(x + at + offset, v.ld, rows, columns, v.half(), w.mean.data(), w.s.data(), w.t.data());
      fold<T>(w.s.data(), w.sum.data(), columns, v.half());
    });
    v.each([&](int64_t g, int64_t j) { totals[g] += w.sum[j]; });
    return true;
  }

  void set_rests(int64_t groups, Group* u, const double* totals) const {
    for (int64_t g = 0; g < groups; ++g) {
      if (mean_needs_rest(u[g].mean, u[g].rstd)) u[g].rest = A(totals[g] / double(problem.group_size())) * -u[g].rstd;
    }
  }

  void rests(int64_t at, const Columns& v, Work<A>& w, Group* u) const {
    if constexpr (std::is_same_v<A, float>) {
      std::vector<double> totals;
      bool any = false;
      for (int64_t g = 0; g < v.groups; ++g) any = any || mean_needs_rest(u[g].mean, u[g].rstd);
      if (!any) return;
      totals.resize(v.groups);
      sum_rests(at, v, w, u, totals.data());
      set_rests(v.groups, u, totals.data());
    }
  }

  void runs_in_pieces(Sums* parameters) const {
    // Pieces of channels here: gamma and beta do not change within one.
    const int64_t image = problem.image_size(), pixels = problem.pixels, channels = problem.channels;
    const int64_t groups = problem.groups, d = problem.per_group(), size = problem.group_size();
    const int64_t piece = ceil_div(std::max(kPiece, ceil_div(pixels, kPieces)), kRun) * kRun;
    const int64_t count = ceil_div(pixels, piece), cost = std::min(piece, pixels);
    const int64_t tile = std::max<int64_t>(1, kPieces / (channels * count));
    std::vector<Sums> partial(tile * channels * count), sum(tile * channels);
    std::vector<Group> u(tile * groups);
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t images = std::min(tile, problem.samples - n0), tasks = images * channels * count;
      auto extent = [&](int64_t i) { return std::pair(i % count * piece, std::min((i % count + 1) * piece, pixels)); };
      bool any = false;
      for (int64_t i = 0; i < images * groups; ++i) {
        u[i] = group(n0 + i / groups, i % groups);
        any = any || mean_needs_rest(u[i].mean, u[i].rstd);
      }
      if (any) {
        parallel(tasks, cost, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto [from, to] = extent(i);
            const int64_t at = n0 * image + i / count * pixels + from;
            partial[i].b = double(rest_of_run(at, to - from, u[i / count / d])) * double(to - from);
          }
        });
        for (int64_t i = 0; i < images * groups; ++i) {
          double total = 0;
          for (int64_t k = 0; k < d * count; ++k) total += partial[i * d * count + k].b;
          if (mean_needs_rest(u[i].mean, u[i].rstd)) u[i].rest = A(total / double(size)) * -u[i].rstd;
        }
      }
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(0);
        w.for_backward(kept_size());
        for (int64_t i = begin; i < end; ++i) {
          const auto [from, to] = extent(i);
          const int64_t at = n0 * image + i / count * pixels + from;
          sums(at, to - from, i / count % channels, 1, u[i / count / d], w, &partial[i]);
        }
      });
      for (int64_t i = 0; i < images * channels; ++i) {
        sum[i] = {};
        for (int64_t k = 0; k < count; ++k) {
          sum[i].b += partial[i * count + k].b;
          sum[i].s += partial[i * count + k].s;
        }
      }
      for (int64_t n = 0; n < images; ++n) {
        close(0, groups, u.data() + n * groups, sum.data() + n * channels, parameters);
      }
      if (!dx) continue;
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(0);
        for (int64_t i = end; i-- > begin;) {  // backwards: the last pieces are still in the cache
          const auto [from, to] = extent(i);
          const int64_t at = n0 * image + i / count * pixels + from;
          result(at, to - from, i / count % channels, 1, u[i / count / d], w);
        }
      });
    }
  }

  void columns_in_pieces(Sums* parameters) const {
    const int64_t image = problem.image_size(), groups = problem.groups, channels = problem.channels;
    const int64_t count = plan.count, tile = std::max<int64_t>(1, kPieces / count), cost = plan.piece * channels;
    std::vector<Sums> partial(tile * count * channels), sum(channels);
    std::vector<Group> u(tile * groups);
    std::vector<double> rest;
    auto piece = [&](int64_t i) {
      const int64_t from = i % count * plan.piece;
      return columns_of(problem, 0, groups, from, std::min(from + plan.piece, problem.pixels));
    };
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t images = std::min(tile, problem.samples - n0), tasks = images * count;
      auto start = [&](int64_t i) { return (n0 + i / count) * image + i % count * plan.piece * channels; };
      bool any = false;
      for (int64_t i = 0; i < images * groups; ++i) {
        u[i] = group(n0 + i / groups, i % groups);
        any = any || mean_needs_rest(u[i].mean, u[i].rstd);
      }
      if (any) {
        rest.assign(tasks * groups, 0.);
        parallel(tasks, cost, [&](int64_t begin, int64_t end) {
          Work<A> w(widest(problem, plan));
          for (int64_t i = begin; i < end; ++i) {
            sum_rests(start(i), piece(i), w, u.data() + i / count * groups, rest.data() + i * groups);
          }
        });
        for (int64_t n = 0; n < images; ++n) {
          double* totals = rest.data() + n * count * groups;
          for (int64_t k = 1; k < count; ++k) {
            for (int64_t g = 0; g < groups; ++g) totals[g] += totals[k * groups + g];
          }
          set_rests(groups, u.data() + n * groups, totals);
        }
      }
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        w.for_backward(kept_size());
        for (int64_t i = begin; i < end; ++i) {
          sums(start(i), piece(i), w, u.data() + i / count * groups, partial.data() + i * channels);
        }
      });
      for (int64_t n = 0; n < images; ++n) {
        std::fill(sum.begin(), sum.end(), Sums{});
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t c = 0; c < channels; ++c) {
            sum[c].b += partial[(n * count + k) * channels + c].b;
            sum[c].s += partial[(n * count + k) * channels + c].s;
          }
        }
        close(0, groups, u.data() + n * groups, sum.data(), parameters);
      }
      if (!dx) continue;
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        w.for_backward(kept_size());
        for (int64_t i = end; i-- > begin;) result(start(i), piece(i), w, u.data() + i / count * groups, true);
      });
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> group_norm_backward_cpu(const Tensor& dy_any, const Tensor& x_any,
                                                           const Tensor& mean_any, const Tensor& rstd_any,
                                                           const std::optional<Tensor>& weight,
                                                           const std::optional<Tensor>& bias, int64_t num_groups,
                                                           int64_t act, bool round_before_act, bool need_dx,
                                                           bool need_dweight, bool need_dbias) {
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last), dy = to_dense(dy_any, channels_last);
  const Tensor mean = to_dense(mean_any, false), rstd = to_dense(rstd_any, false);
  const Problem problem = problem_of(x, num_groups, 0, act, round_before_act, channels_last);
  const auto stats_dtype = acc_dtype(x.scalar_type());
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type() && dy.numel() == x.numel(),
                  "group_norm_backward: dy must have the dtype and size of x");
  for (const Tensor* t : {&mean, &rstd}) {
    STD_TORCH_CHECK(t->scalar_type() == stats_dtype && t->numel() == problem.samples * num_groups,
                    "group_norm_backward: mean and rstd must be [N, num_groups] in the compute dtype");
  }
  for (const auto* t : {&weight, &bias}) {
    STD_TORCH_CHECK(!*t || (*t)->numel() == problem.channels,
                    "group_norm_backward: weight and bias must have an element per channel");
  }
  Tensor dx = need_dx ? empty_dense(x, sizes_of(x), channels_last) : empty_dense(x, {0}, false);
  Tensor dweight = empty_dense(x, {need_dweight ? problem.channels : 0}, false, stats_dtype);
  Tensor dbias = empty_dense(x, {need_dbias ? problem.channels : 0}, false, stats_dtype);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    Backward<T>{problem,
                problem.empty() ? Plan{} : plan_of(problem),
                data<T>(dy),
                data<T>(x),
                data<A>(mean),
                data<A>(rstd),
                need_dx ? mutable_data<T>(dx) : nullptr,
                need_dweight ? mutable_data<A>(dweight) : nullptr,
                need_dbias ? mutable_data<A>(dbias) : nullptr,
                parameter_of<A>(weight, problem.channels, 1),
                parameter_of<A>(bias, problem.channels, 0)}
        .run();
  });
  return {dx, dweight, dbias};
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("group_norm", TORCH_BOX(&group_norm_cpu));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
