// Elementary functions for float that vectorise (no calls, no branches, about 1 ulp); the library's for double.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cpu.h"

namespace pixfuse {

// 2^n for integral n in [-252, 254], as two factors so that subnormal results round properly.
struct Power {
  float first, second;
};
PIXFUSE_INLINE Power power_of_two(float n) {
  int32_t whole = int32_t(n), half = whole >> 1;
  return {std::bit_cast<float>((half + 127) << 23), std::bit_cast<float>((whole - half + 127) << 23)};
}

// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r - 1.
struct Reduced {
  float n, expm1;
};
PIXFUSE_INLINE Reduced reduce_exp(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  float n = (x * 1.44269504088896341f + kRound) - kRound;
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float q = 1.9841270e-4f;
  q = q * r + 1.3888889e-3f;
  q = q * r + 8.3333333e-3f;
  q = q * r + 4.1666667e-2f;
  q = q * r + 1.6666667e-1f;
  q = q * r + 0.5f;
  return {n, r + r * r * q};
}

PIXFUSE_INLINE float exp_(float x) {
  float limited = std::min(std::max(x, -105.f), 90.f);
  auto [n, e] = reduce_exp(limited);
  auto [a, b] = power_of_two(n);
  float y = (e + 1.f) * a * b;
  return x != x ? x : y;
}

// e^x - 1 for x <= 88.
PIXFUSE_INLINE float expm1_(float x) {
  float limited = std::min(std::max(x, -40.f), 88.f);
  auto [n, e] = reduce_exp(limited);
  float scale = std::bit_cast<float>((int32_t(n) + 127) << 23);
  float y = e * scale + (scale - 1.f);
  return x != x ? x : y;
}

// log(1 + u) for 0 <= u <= 1, by the series of 2 artanh(u / (2 + u)).
PIXFUSE_INLINE float log1p_(float u) {
  float s = u / (2.f + u), s2 = s * s;
  float q = 1.f / 15;
  q = q * s2 + 1.f / 13;
  q = q * s2 + 1.f / 11;
  q = q * s2 + 1.f / 9;
  q = q * s2 + 1.f / 7;
  q = q * s2 + 1.f / 5;
  q = q * s2 + 1.f / 3;
  return 2.f * s + 2.f * s * s2 * q;
}

PIXFUSE_INLINE float tanh_(float x) {
  float e = expm1_(std::min(2.f * std::fabs(x), 40.f));
  float y = std::copysign(e / (e + 2.f), x);
  return x != x ? x : y;
}

PIXFUSE_INLINE double exp_(double x) { return std::exp(x); }
PIXFUSE_INLINE double expm1_(double x) { return std::expm1(x); }
PIXFUSE_INLINE double log1p_(double u) { return std::log1p(u); }
PIXFUSE_INLINE double tanh_(double x) { return std::tanh(x); }

// sigmoid(x), and sigmoid(-x) where the former is not 0: it is where |x| would leave the range of float's exponents.
template <class A>
struct Sigmoid {
  A s, rest;
};

// The ends of that range. The compiler must not know them: it would take them for branches worth separating.
struct SigmoidLimits {
  float low = -87.f, high = 87.f;
  PIXFUSE_INLINE SigmoidLimits() { __asm__("" : "+m"(low), "+m"(high)); }
};

// One exponential and one division for both.
PIXFUSE_INLINE Sigmoid<float> sigmoid_(float x, const SigmoidLimits& limits) {
  constexpr float kRound = 12582912.f + 127.f;  // as in reduce_exp; the sum's last bits are the exponent of 2^n
  float z = x < limits.low ? limits.low : x;
  z = z > limits.high ? limits.high : z;
  const float shifted = z * -1.44269504088896341f + kRound, n = shifted - kRound;
  const float r = n * 2.12194440e-4f - (n * 0.693359375f + z);  // exp(-z) = 2^n exp(r)
  float q = 1.38146e-3f;
  q = q * r + 8.36872e-3f;
  q = q * r + 4.166839e-2f;
  q = q * r + 1.6666521e-1f;
  q = q * r + 4.9999993e-1f;
  q = q * r + 1.f;
  q = q * r + 1.f;
  const float power = std::bit_cast<float>(std::bit_cast<int32_t>(shifted) << 23);
  float s = 1.f / (q * power + 1.f);
  s = x < limits.low ? 0.f : s;
  return {s, q * power * s};
}
PIXFUSE_INLINE Sigmoid<double> sigmoid_(double x, const SigmoidLimits&) {
  return {1 / (1 + std::exp(-x)), 1 / (1 + std::exp(x))};
}

}  // namespace pixfuse
