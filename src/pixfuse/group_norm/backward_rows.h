// The loops over rows of group_norm's first derivative: the sums of a channel and dx, for the runs of contiguous images
// and for columns of channels.
#pragma once

#include "rows.h"

namespace pixfuse {
namespace {

// x as the loops take it: xhat, or without an activation, which needs that, x - mean, an instruction less. rstd is in
// the sums and in q then.
template <Act act, class A>
PIXFUSE_INLINE Two<A> centred(Two<A> x, A mean_a, A mean_b, A rstd_a, A rstd_b) {
  if constexpr (act == kNone) return {x.a - mean_a, x.b - mean_b};
  return {(x.a - mean_a) * rstd_a, (x.b - mean_b) * rstd_b};
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
          u = centred<act>(u, mean, mean, rstd, rstd);
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
          const A v = load(x[i + j]), u = centred<act>({v, v}, mean, mean, rstd, rstd).a;
          const A z = u * gamma + beta, d = load(dy[i + j]);
          const A g = slopes_of<T, act>({d, d}, {z, z}, limits).a;
          if constexpr (act != kNone) kept[i + j] = g;
          s[j] += g;
          t[j] += g * u;
        }
      }
      i = end;
      add_lanes(s, t);
      sums[2 * c] += s[0];
      sums[2 * c + 1] += act == kNone ? double(t[0]) * double(rstd) : double(t[0]);
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
      u = centred<act>(u, mean, mean, rstd, rstd);
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

// If there is an activation, its g is kept for column_dx in rows kept_ld apart, arranged.
template <class T, Act act>
PIXFUSE_CLONES void column_sums(const T* x, const T* dy, int64_t ld, int64_t rows, int64_t width, int64_t half,
                                const acc_t<T>* __restrict mean, const acc_t<T>* __restrict rstd,
                                const acc_t<T>* __restrict gamma, const acc_t<T>* __restrict beta,
                                acc_t<T>* __restrict s, acc_t<T>* __restrict t, acc_t<T>* kept, int64_t kept_ld) {
  using A = acc_t<T>;
  const Limits limits;
  auto products = [&](Two<A>& u, Two<A>& g, int64_t i, int64_t j) __attribute__((always_inline)) {
    u = centred<act>(u, mean[i], mean[j], rstd[i], rstd[j]);
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
    u = centred<act>(u, mean[i], mean[j], rstd[i], rstd[j]);
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

}  // namespace
}  // namespace pixfuse
