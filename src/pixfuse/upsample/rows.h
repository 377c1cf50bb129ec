// The loops over rows that resizing spends its time in: weighted sums of whole rows for D and H, and along W for
// factors of 2 and for any table, each for single values and for pixels of several channels.
#pragma once

#include "values.h"

namespace pixfuse {
namespace {

constexpr int64_t kLanes = 32;  // channels that a loop of fixed length takes

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

}  // namespace
}  // namespace pixfuse
