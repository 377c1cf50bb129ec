// Sums of taps times pixels, and transposes: the loops that filtered_lrelu spends its time in. No `#pragma once`:
// pixels.h includes this once for each instruction set, in a namespace of its own, with PIXFUSE_TARGET and kBytes, the
// size of a register. (PIXFUSE_CLONES is not for functions on vector types: GCC lowers these before it clones.)

// For `columns` pixels at a time, all lanes of a register in turn: up to two sums of the same pixels, so that a load
// serves both and twelve sums hide the latency.
template <class A, int outputs, int columns, Then then, int step>
PIXFUSE_TARGET void sum_columns(const Sums<A>& sums, int64_t begin, int64_t end) {
  typedef A V __attribute__((vector_size(kBytes), may_alias));
  constexpr int64_t kParts = kVectorBytes / kBytes;
  const auto [to, to_step, from, any_step, taps, n, act, at] = sums;
  const int64_t from_step = step ? step : any_step;  // with a constant, loads need no register each
  const V slope = act.slope - V{}, high = act.clamp - V{}, low = -high, zero{};
  for (int64_t part = 0; part < kParts; ++part) {
    for (int64_t i = begin; i < end; i += columns) {
      V sum[outputs][columns] = {};
      for (int64_t k = 0; k < n; ++k) {
        const V* x = reinterpret_cast<const V*>(from[k]) + i * from_step * kParts + part;
        asm("" : "+r"(x));  // one register and constant offsets, instead of a register for each column
        V tap[outputs];
        for (int o = 0; o < outputs; ++o) tap[o] = taps[o][k] - V{};
        for (int c = 0; c < columns; ++c) {
          V v = x[c * from_step * kParts];
          if constexpr (outputs > 1 && kBytes == 64) asm("" : "+v"(v));  // loaded once, not by each sum
          for (int o = 0; o < outputs; ++o) sum[o][c] += tap[o] * v;
        }
      }
      for (int c = 0; c < columns; ++c) {
        const int64_t pixel = (i + c) * to_step * kParts + part;
        for (int o = 0; o < outputs; ++o) {
          V w = sum[o][c];
          if constexpr (then == Then::kActivate) {
            w = w > zero ? w : w * slope;
            w = w > high ? high : w;
            w = w < low ? low : w;
          } else if constexpr (then == Then::kFactor) {
            const V v = reinterpret_cast<const V*>(at[o])[pixel], below = v * slope;
            w = v > zero ? w : w * slope;
            const V activated = v > zero ? v : below;
            w = activated > high ? zero : w;
            w = activated < low ? zero : w;
          }
          reinterpret_cast<V*>(to[o])[pixel] = w;
        }
      }
    }
  }
}

template <class A, int outputs, Then then, int step>
void sum_step(const Sums<A>& sums, int64_t count) {
  constexpr int kMany = 12 / outputs;
  const int64_t most = count / kMany * kMany;
  sum_columns<A, outputs, kMany, then, step>(sums, 0, most);
  if (most < count) sum_columns<A, outputs, kFew, then, step>(sums, most, count);
}

template <class A, int outputs, Then then>
void sum_all(const Sums<A>& sums, int64_t count) {
  if (sums.from_step == 1)
    sum_step<A, outputs, then, 1>(sums, count);
  else if constexpr (outputs == 1 && then == Then::kNothing)
    sums.from_step == 2 ? sum_step<A, 1, then, 2>(sums, count) : sum_step<A, 1, then, 0>(sums, count);
}

template <class A>
PIXFUSE_TARGET void gather(const Gather<A>& g, int64_t count) {
  typedef A V __attribute__((vector_size(kBytes), may_alias));
  constexpr int64_t kParts = kVectorBytes / kBytes;
  constexpr int columns = kBytes == 64 ? 6 : 3;  // with the sums, all that the registers hold
  for (int64_t i = 0; i < count * kParts; i += columns) {
    V sum[kBatch][columns] = {};
    for (int64_t k = 0; k < g.rows; ++k) {
      V x[columns];
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) x[c] = reinterpret_cast<const V*>(g.from[k])[i + c];
#pragma GCC unroll 8
      for (int o = 0; o < kBatch; ++o) {
        if (uint64_t(k - g.first[o]) >= uint64_t(g.n[o])) continue;
        const V tap = g.taps[o][k - g.first[o]] - V{};
#pragma GCC unroll 8
        for (int c = 0; c < columns; ++c) sum[o][c] += tap * x[c];
      }
    }
#pragma GCC unroll 8
    for (int o = 0; o < kBatch; ++o) {
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) reinterpret_cast<V*>(g.to[o])[i + c] = sum[o][c];
    }
  }
}

template <class A>
PIXFUSE_TARGET void spread(const Spread<A>& spread, int64_t count) {
  typedef A V __attribute__((vector_size(kBytes), may_alias));
  constexpr int64_t kParts = kVectorBytes / kBytes;
  constexpr int columns = kBytes == 64 ? 6 : 3;
  for (int64_t i = 0; i < count * kParts; i += columns) {
    V x[kBatch][columns];
#pragma GCC unroll 8
    for (int r = 0; r < kBatch; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) x[r][c] = reinterpret_cast<const V*>(spread.rows[r])[i + c];
    }
    for (int64_t p = 0; p < spread.n; ++p) {
      const auto [to, taps, first, last, fresh] = spread.parts[p];
      V* y = reinterpret_cast<V*>(to) + i;
      V sum[columns] = {};
      if (!fresh) {
#pragma GCC unroll 8
        for (int c = 0; c < columns; ++c) sum[c] = y[c];
      }
#pragma GCC unroll 8
      for (int r = 0; r < kBatch; ++r) {
        if (r < first || r >= last) continue;
        const V tap = taps[r - first] - V{};
#pragma GCC unroll 8
        for (int c = 0; c < columns; ++c) sum[c] += tap * x[r][c];
      }
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) y[c] = sum[c];
    }
  }
}

// to[i] = x[i * stride ..] + bias, pixels of all lanes that lie anywhere.
template <class A>
PIXFUSE_TARGET void add_to_pixels(const A* x, int64_t stride, const A* bias, A* to, int64_t n) {
  typedef A V __attribute__((vector_size(kVectorBytes)));
  V b, v;
  std::memcpy(&b, bias, sizeof b);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(&v, x + i * stride, sizeof v);
    v += b;
    std::memcpy(to + i * kLanes<A>, &v, sizeof v);
  }
}

// Rows of planes, [lane][stride], to pixels of lanes, [count][lane], or back: square transposes by repeated zips.
template <class A, bool to_lanes>
PIXFUSE_TARGET void transpose(const A* from, A* to, int64_t stride, int64_t count) {
  typedef A V __attribute__((vector_size(kVectorBytes)));
  typedef std::conditional_t<sizeof(A) == 4, int32_t, int64_t> Index __attribute__((vector_size(kVectorBytes)));
  constexpr int64_t L = kLanes<A>;
  Index low, high;
  for (int64_t i = 0; i < L; ++i) {
    low[i] = i / 2 + i % 2 * L;
    high[i] = low[i] + L / 2;
  }
  for (int64_t c = 0; c < count; c += L) {
    V a[L], b[L];
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
