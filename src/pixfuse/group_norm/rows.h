// The row loops of group_norm that both directions use, and the elements that all its loops take.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu.h"
#include "vector_math.h"

namespace pixfuse {
namespace {

constexpr int64_t kLanes = 64;     // partial sums of a run
constexpr int64_t kRun = 64 * 64;  // elements of a run that are summed in float

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

// The sums of the lanes of s and t, into their first.
template <class A>
PIXFUSE_INLINE void add_lanes(A* s, A* t) {
  static_assert(kLanes == 64);
  for (int64_t j = 0; j < 16; ++j) {
    s[j] = (s[j] + s[j + 32]) + (s[j + 16] + s[j + 48]);
    t[j] = (t[j] + t[j + 32]) + (t[j + 16] + t[j + 48]);
  }
  for (int64_t j = 0; j < 8; ++j) s[j] += s[j + 8], t[j] += t[j + 8];
  for (int64_t j = 0; j < 4; ++j) s[j] += s[j + 4], t[j] += t[j + 4];
  s[0] = (s[0] + s[2]) + (s[1] + s[3]);
  t[0] = (t[0] + t[2]) + (t[1] + t[3]);
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

// --- columns ---------------------------------------------------------------------------------------------------

// Per-column values that the loops read or sum are *arranged* where T is read in words: first those of the words'
// first halves, then, `half` elements on, those of the second halves.

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

// Arrange values in place.
template <class T>
void arrange(std::vector<acc_t<T>>& values, int64_t width, std::vector<acc_t<T>>& scratch) {
  if constexpr (kWords<T>) {
    const int64_t half = (width + 1) / 2;
    const acc_t<T>* from = values.data();
    acc_t<T>* __restrict low = scratch.data(), * __restrict high = low + half;
    for (int64_t j = 0; j < width / 2; ++j) low[j] = from[2 * j], high[j] = from[2 * j + 1];
    if (width % 2) low[half - 1] = from[width - 1];
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

}  // namespace
}  // namespace pixfuse
