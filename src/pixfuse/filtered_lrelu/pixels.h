// What filtered_lrelu does to rows of pixels, a pixel being a vector register: sums of taps, with the activation where
// it belongs, and the ways between pixels and memory.
#pragma once

#include <cstring>

#include "cpu.h"

namespace pixfuse {
namespace {

constexpr int64_t kVectorBytes = 64;
template <class A>
constexpr int64_t kLanes = kVectorBytes / sizeof(A);

template <class A>
struct Activation {
  A slope, clamp;
};

// What becomes of a sum: itself, its activation, or its product with the derivative of the activation elsewhere.
enum class Then { kNothing, kActivate, kFactor };

// to[o][i * to_step] = sum over k < n of taps[o][k] * from[k][i * from_step], in pixels. The derivative is that at
// at[o][i * to_step]. Six pixels at least are summed at once, here and below: rows have room for what is beyond the
// last.
template <class A>
struct Sums {
  A* to[2];
  int64_t to_step;
  const A* const* from;
  int64_t from_step;
  const A* taps[2];
  int64_t n;
  Activation<A> act = {};
  const A* at[2] = {};
};
constexpr int64_t kFew = 6;

// Rows of the upsampled image that are made together, so that a row that several of them see is loaded once.
constexpr int64_t kBatch = 4;

// to[o][i] = sum over k < n[o] of taps[o][k] * from[first[o] + k][i], in pixels.
template <class A>
struct Gather {
  A* to[kBatch];
  const A* taps[kBatch];
  int64_t first[kBatch], n[kBatch];
  const A* const* from;
  int64_t rows;
};

// For each part to[i] = to[i], or zero if it is new, + sum over first <= r < last of taps[r] * rows[r][i].
template <class A>
struct Part {
  A* to;
  const A* taps;
  int64_t first, last;
  bool fresh;
};
template <class A>
struct Spread {
  const A* rows[kBatch];
  const Part<A>* parts;
  int64_t n;
};

#if defined(__x86_64__) && !defined(PIXFUSE_SANITIZE)
namespace avx512 {
constexpr int64_t kBytes = 64;
#define PIXFUSE_TARGET __attribute__((target("arch=x86-64-v4")))
#include "sums.h"
#undef PIXFUSE_TARGET
}  // namespace avx512
namespace avx2 {
constexpr int64_t kBytes = 32;
#define PIXFUSE_TARGET __attribute__((target("arch=x86-64-v3")))
#include "sums.h"
#undef PIXFUSE_TARGET
}  // namespace avx2
#endif
namespace plain {
constexpr int64_t kBytes = 16;
#define PIXFUSE_TARGET
#include "sums.h"
}  // namespace plain

// Call f of the widest set that this machine has.
#if defined(__x86_64__) && !defined(PIXFUSE_SANITIZE)
const int kLevel = __builtin_cpu_supports("x86-64-v4") ? 4 : __builtin_cpu_supports("x86-64-v3") ? 3 : 0;
#define PIXFUSE_WIDEST(...) (kLevel == 4 ? avx512::__VA_ARGS__ : kLevel == 3 ? avx2::__VA_ARGS__ : plain::__VA_ARGS__)
#else
#define PIXFUSE_WIDEST(...) plain::__VA_ARGS__
#endif

template <class A, Then then = Then::kNothing>
void sum(bool two, const Sums<A>& sums, int64_t count) {
  if (two)
    PIXFUSE_WIDEST(sum_all<A, 2, then>(sums, count));
  else
    PIXFUSE_WIDEST(sum_all<A, 1, then>(sums, count));
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
void load_pixels(const T* x, int64_t stride, const acc_t<T>* bias, T* packed, acc_t<T>* t, int64_t n, int64_t lanes) {
  using A = acc_t<T>;
  constexpr int64_t L = kLanes<A>;
  if (lanes < L) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < lanes; ++l) t[i * L + l] = load(x[i * stride + l]) + bias[l];
      for (int64_t l = lanes; l < L; ++l) t[i * L + l] = 0;
    }
  } else if constexpr (std::is_same_v<T, A>) {
    PIXFUSE_WIDEST(add_to_pixels(x, stride, bias, t, n));
  } else {
    for (int64_t i = 0; i < n; ++i) std::memcpy(packed + i * L, x + i * stride, L * sizeof(T));
    load_row(packed, 1, A(0), t, n * L);
    PIXFUSE_WIDEST(add_to_pixels(t, L, bias, t, n));
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

}  // namespace
}  // namespace pixfuse
