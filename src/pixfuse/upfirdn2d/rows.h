// The loops over rows that upfirdn2d spends its time in: weighted sums of rows, the phases of up 2 woven into a row,
// a row sorted into even and odd pixels for down 2, and chunks of values on their way from and to memory.
#pragma once

#include <algorithm>

#include "cpu.h"
#include "half_rows.h"

namespace pixfuse {
namespace {

// out[m, i] = base[m, i] + sum over K of w[k] * src[k][m, i], for `count` chunks of n values. With kBlocks n is a
// multiple of 16, so that short chunks cost no more than long rows.
template <class Src, class Dst, class A, int K, bool kAdd, bool kBlocks>
PIXFUSE_CLONES void weigh_rows(const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step,
                               Dst* out, int64_t out_step, int64_t count, int64_t n) {
  const Src* s[K];
  A v[K];
  for (int k = 0; k < K; ++k) s[k] = src[k], v[k] = w[k];
  for (int64_t m = 0; m < count; ++m) {
    const auto at = [&](int64_t i) __attribute__((always_inline)) {
      A sum = v[0] * load(s[0][i]);
      for (int k = 1; k < K; ++k) sum += v[k] * load(s[k][i]);
      if constexpr (kAdd) sum += base[i];
      out[i] = store<Dst>(sum);
    };
    if constexpr (std::is_same_v<Src, bfloat16> && std::endian::native == std::endian::little) {
      using Pair __attribute__((aligned(2), may_alias)) = uint32_t;  // two values by a shift and a mask: no widening
#pragma GCC ivdep
      for (int64_t i = 0; i < n / 2; ++i) {
        A even{}, odd{};
        for (int k = 0; k < K; ++k) {
          const uint32_t two = reinterpret_cast<const Pair*>(s[k])[i];
          const A low = std::bit_cast<float>(two << 16), high = std::bit_cast<float>(two & 0xffff0000u);
          even = k == 0 ? v[k] * low : even + v[k] * low;
          odd = k == 0 ? v[k] * high : odd + v[k] * high;
        }
        if constexpr (kAdd) even += base[2 * i], odd += base[2 * i + 1];
        out[2 * i] = store<Dst>(even);
        out[2 * i + 1] = store<Dst>(odd);
      }
      if (n % 2) at(n - 1);
    } else if constexpr (kBlocks) {
      for (int64_t b = 0; b < n; b += 16) {
#pragma GCC ivdep
        for (int64_t i = 0; i < 16; ++i) at(b + i);
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) at(i);
    }
    for (int k = 0; k < K; ++k) s[k] += src_step;
    out += out_step;
    if constexpr (kAdd) base += base_step;
  }
}

// out[r, 2 * m + p] = sum over K of w[p][k] * src[p][r, m + k]: both phases of up 2, interleaved.
template <class Dst, class A, int K>
PIXFUSE_CLONES void up2_rows(const A* even, const A* odd, int64_t in_step, const A* we, const A* wo, Dst* out,
                             int64_t out_step, int64_t rows, int64_t count) {
  A v[K], u[K];
  for (int k = 0; k < K; ++k) v[k] = we[k], u[k] = wo[k];
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC ivdep
    for (int64_t m = 0; m < count; ++m) {
      A a = v[0] * even[m], b = u[0] * odd[m];
      for (int k = 1; k < K; ++k) a += v[k] * even[m + k], b += u[k] * odd[m + k];
      out[2 * m] = store<Dst>(a);
      out[2 * m + 1] = store<Dst>(b);
    }
    even += in_step;
    odd += in_step;
    out += out_step;
  }
}

template <class Dst, class A>
PIXFUSE_CLONES void interleave2_row(const A* even, const A* odd, Dst* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    out[2 * m] = store<Dst>(even[m]);
    out[2 * m + 1] = store<Dst>(odd[m]);
  }
}

template <class A>
PIXFUSE_CLONES void split2_row(const A* in, A* even, A* odd, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    even[m] = in[2 * m];
    odd[m] = in[2 * m + 1];
  }
}

// out[m, i] = in[m, i].
template <class Dst, class A>
PIXFUSE_CLONES void copy_chunks(const A* in, int64_t in_step, Dst* out, int64_t out_step, int64_t count, int64_t n) {
  if (n == 1) {
#pragma GCC ivdep
    for (int64_t m = 0; m < count; ++m) out[m * out_step] = store<Dst>(in[m * in_step]);
    return;
  }
  for (int64_t m = 0; m < count; ++m) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[m * out_step + i] = store<Dst>(in[m * in_step + i]);
  }
}

template <class A>
PIXFUSE_CLONES double dot_row(const A* a, const A* b, int64_t n) {
  A lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (; i < n; ++i) lanes[0] += a[i] * b[i];
  double sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  return sum;
}

template <class Src, class Dst, class A, bool kAdd, bool kBlocks>
void weigh_some(int64_t k, const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step,
                Dst* out, int64_t out_step, int64_t count, int64_t n) {
  auto call = [&](auto rows) { rows(src, src_step, w, base, base_step, out, out_step, count, n); };
  switch (k) {
    case 1:
      return call(weigh_rows<Src, Dst, A, 1, kAdd, kBlocks>);
    case 2:
      return call(weigh_rows<Src, Dst, A, 2, kAdd, kBlocks>);
    case 3:
      return call(weigh_rows<Src, Dst, A, 3, kAdd, kBlocks>);
    case 4:
      return call(weigh_rows<Src, Dst, A, 4, kAdd, kBlocks>);
    case 5:
      return call(weigh_rows<Src, Dst, A, 5, kAdd, kBlocks>);
    default:
      return call(weigh_rows<Src, Dst, A, 6, kAdd, kBlocks>);
  }
}

template <class Src, class Dst, class A, bool kBlocks>
void weigh_all(const Src* const* src, int64_t src_step, const A* w, int64_t taps, A* partial, Dst* out,
               int64_t out_step, int64_t count, int64_t n) {
  constexpr int64_t kMost = 6;
  if (taps <= kMost) {
    weigh_some<Src, Dst, A, false, kBlocks>(taps, src, src_step, w, nullptr, 0, out, out_step, count, n);
    return;
  }
  weigh_some<Src, A, A, false, kBlocks>(kMost, src, src_step, w, nullptr, 0, partial, n, count, n);
  int64_t t = kMost;
  for (; taps - t > kMost; t += kMost) {
    weigh_some<Src, A, A, true, kBlocks>(kMost, src + t, src_step, w + t, partial, n, partial, n, count, n);
  }
  weigh_some<Src, Dst, A, true, kBlocks>(taps - t, src + t, src_step, w + t, partial, n, out, out_step, count, n);
}

// out[m, i] = sum over `taps` of w[t] * src[t][m, i]; zero without taps. `partial` has room for count * n sums.
template <class Src, class Dst, class A>
void weigh(const Src* const* src, int64_t src_step, const A* w, int64_t taps, A* partial, Dst* out, int64_t out_step,
           int64_t count, int64_t n) {
  if (taps == 0) {
    for (int64_t m = 0; m < count; ++m) std::fill_n(out + m * out_step, n, Dst{});
  } else if (count > 1 && n % 16 == 0) {
    weigh_all<Src, Dst, A, true>(src, src_step, w, taps, partial, out, out_step, count, n);
  } else {
    weigh_all<Src, Dst, A, false>(src, src_step, w, taps, partial, out, out_step, count, n);
  }
}

// `count` chunks of n values between memory and the compute type.
template <class T>
void load_chunks(const T* in, int64_t in_step, acc_t<T>* out, int64_t count, int64_t n) {
  if (in_step == n) n *= count, count = 1;
  for (int64_t m = 0; m < count; ++m) load_row(in + m * in_step, out + m * n, n);
}
template <class T>
void store_chunks(const acc_t<T>* in, T* out, int64_t out_step, int64_t count, int64_t n) {
  if (out_step == n) n *= count, count = 1;
  for (int64_t m = 0; m < count; ++m) store_row(in + m * n, out + m * out_step, n);
}

}  // namespace
}  // namespace pixfuse
