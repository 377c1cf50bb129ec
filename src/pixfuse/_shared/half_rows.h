// Rows of values between memory and the compute type. For float16 the instructions of AVX2 and AVX-512 machines are
// called by name, since GCC does not vectorise this conversion: 5 to 8 times as fast as the conversion by integers.
#pragma once

#include <algorithm>

#include "cpu.h"

#if defined(__x86_64__) && !defined(PIXFUSE_SANITIZE)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own headers
#endif

namespace pixfuse {
namespace {

template <class T>
PIXFUSE_CLONES void load_row_plain(const T* in, acc_t<T>* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = load(in[i]);
}
template <class T>
PIXFUSE_CLONES void store_row_plain(const acc_t<T>* in, T* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = store<T>(in[i]);
}

#if defined(__x86_64__) && !defined(PIXFUSE_SANITIZE)

__attribute__((target("default"))) inline void load_half_row(const float16* in, float* out, int64_t n) {
  load_row_plain(in, out, n);
}
__attribute__((target("default"))) inline void store_half_row(const float* in, float16* out, int64_t n) {
  store_row_plain(in, out, n);
}
__attribute__((target("arch=x86-64-v3"))) inline void load_half_row(const float16* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = load(in[i]);
}
__attribute__((target("arch=x86-64-v3"))) inline void store_half_row(const float* in, float16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < n; ++i) out[i] = store<float16>(in[i]);
}
__attribute__((target("arch=x86-64-v4"))) inline void load_half_row(const float16* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
  }
  if (i == n) return;
  const __mmask16 rest = (1u << (n - i)) - 1;
  _mm512_mask_storeu_ps(out + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, in + i)));
}
__attribute__((target("arch=x86-64-v4"))) inline void store_half_row(const float* in, float16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), halves);
  }
  if (i == n) return;
  const __mmask16 rest = (1u << (n - i)) - 1;
  const __m256i halves = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(rest, in + i), _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(out + i, rest, halves);
}

#else

inline void load_half_row(const float16* in, float* out, int64_t n) { load_row_plain(in, out, n); }
inline void store_half_row(const float* in, float16* out, int64_t n) { store_row_plain(in, out, n); }

#endif

template <class T>
void load_row(const T* in, acc_t<T>* out, int64_t n) {
  if constexpr (std::is_same_v<T, float16>)
    load_half_row(in, out, n);
  else if constexpr (std::is_same_v<T, bfloat16>)
    load_row_plain(in, out, n);
  else
    std::copy(in, in + n, out);
}
template <class T>
void store_row(const acc_t<T>* in, T* out, int64_t n) {
  if constexpr (std::is_same_v<T, float16>)
    store_half_row(in, out, n);
  else if constexpr (std::is_same_v<T, bfloat16>)
    store_row_plain(in, out, n);
  else
    std::copy(in, in + n, out);
}

}  // namespace
}  // namespace pixfuse
