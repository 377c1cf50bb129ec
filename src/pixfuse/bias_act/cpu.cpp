// bias_act on the CPU: value, first and second derivative.
//
// Memory is walked in chunks of 1024 elements, each split over threads as a whole. A chunk lives in L1: its values
// with their biases in the compute type, on which one vectorised loop per activation does the mathematics. The
// element-wise results cannot depend on the split. A bias gradient sums fixed pieces (a row of one channel, or a block
// of pixels where channels are innermost) and then those in order.
#include <algorithm>
#include <cmath>

#include "cpu.h"
#include "half_rows.h"
#include "vector_math.h"

namespace pixfuse {
namespace {

constexpr int64_t kChunk = 1024;

// --- the activations -------------------------------------------------------------------------------------------

enum Act : int64_t { kLinear, kRelu, kLrelu, kTanh, kSigmoid, kElu, kSelu, kSoftplus, kSwish, kActs };
enum Order { kValue, kSlope, kCurvature };

template <Act act, Order order, class A>
PIXFUSE_INLINE A activation(A t, A alpha, const SigmoidLimits& limits) {
  constexpr A kScale = 1.0507009873554805, kAlpha = 1.6732632423543773;
  const bool positive = t > 0;
  if constexpr (act == kLinear) {
    return order == kValue ? t : order == kSlope ? A(1) : A(0);
  } else if constexpr (act == kRelu) {
    if constexpr (order == kValue) return t < 0 ? A(0) : t;  // NaN stays NaN
    return order == kSlope && positive ? A(1) : A(0);
  } else if constexpr (act == kLrelu) {
    if constexpr (order == kValue) return positive ? t : t * alpha;
    return order == kCurvature ? A(0) : positive ? A(1) : alpha;
  } else if constexpr (act == kTanh) {
    A y = tanh_(t);
    if constexpr (order == kValue) return y;
    A slope = 1 - y * y;
    return order == kSlope ? slope : -2 * y * slope;
  } else if constexpr (act == kSigmoid) {
    const auto [s, rest] = sigmoid_(t, limits);
    if constexpr (order == kValue) return s;
    return order == kSlope ? s * rest : s * rest * (1 - 2 * s);
  } else if constexpr (act == kElu) {
    if constexpr (order == kValue) return positive ? t : expm1_(t);
    return positive ? A(order == kSlope) : exp_(t);
  } else if constexpr (act == kSelu) {
    if constexpr (order == kValue) return kScale * (positive ? t : kAlpha * expm1_(t));
    return positive ? A(order == kSlope) * kScale : kScale * kAlpha * exp_(t);
  } else if constexpr (act == kSoftplus) {
    if constexpr (order == kValue) return (t < 0 ? A(0) : t) + log1p_(exp_(-std::fabs(t)));
    const auto [s, rest] = sigmoid_(t, limits);
    return order == kSlope ? s : s * rest;
  } else {
    const auto [s, rest] = sigmoid_(t, limits);
    if constexpr (order == kValue) return t * s;
    return order == kSlope ? s * (1 + t * rest) : s * rest * (2 + t * (1 - 2 * s));
  }
}

template <class A>
struct Scalars {
  A alpha, gain, clamp;  // clamp < 0: none
};

// t -> y, maybe in place.
template <Act act, class A>
PIXFUSE_CLONES void value_row(const A* t, A* y, int64_t n, Scalars<A> s) {
  const SigmoidLimits limits;
  if (s.clamp < 0) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = s.gain * activation<act, kValue>(t[i], s.alpha, limits);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      A v = s.gain * activation<act, kValue>(t[i], s.alpha, limits);
      v = v > s.clamp ? s.clamp : v;
      y[i] = v < -s.clamp ? -s.clamp : v;
    }
  }
}

// d = g * gain * act'(t), or act''(t), where y is not clamped, maybe in place. With from_output, t holds y itself,
// whose sign tells.
template <Act act, Order order, class A>
PIXFUSE_CLONES void derivative_row(const A* g, const A* t, A* d, int64_t n, Scalars<A> s, bool from_output) {
  const SigmoidLimits limits;
  auto slope = [&](int64_t i) __attribute__((always_inline)) {
    return g[i] * (s.gain * activation<act, order>(t[i], s.alpha, limits));
  };
  if (s.clamp < 0) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) d[i] = slope(i);
  } else if (from_output) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const A v = slope(i);
      d[i] = std::fabs(t[i]) < s.clamp ? v : A(0);
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const A v = slope(i);
      d[i] = std::fabs(s.gain * activation<act, kValue>(t[i], s.alpha, limits)) < s.clamp ? v : A(0);
    }
  }
}

// --- rows in and out -------------------------------------------------------------------------------------------

// t = x + b, for one b or a row of them.
template <class T>
PIXFUSE_CLONES void add_value(const T* __restrict x, acc_t<T> b, acc_t<T>* __restrict t, int64_t n) {
  for (int64_t i = 0; i < n; ++i) t[i] = load(x[i]) + b;
}
template <class T>
PIXFUSE_CLONES void add_row(const T* x, const acc_t<T>* b, acc_t<T>* t, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) t[i] = load(x[i]) + b[i];
}
template <class T>
PIXFUSE_CLONES void multiply_row(const T* x, acc_t<T>* t, int64_t n) {
  for (int64_t i = 0; i < n; ++i) t[i] *= load(x[i]);
}
template <class A>
PIXFUSE_CLONES double sum_row(const A* t, int64_t n) {
  constexpr int64_t kLanes = 64;
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += t[i + l];
  }
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  for (; i < n; ++i) sum += t[i];
  return sum;
}
template <class A>
PIXFUSE_CLONES void accumulate_row(const A* t, double* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += t[i];
}

// sum += the rows of t, which lie side by side: the second half is added to the first until one is left.
template <class A>
void sum_rows(const A* t, int64_t rows, int64_t width, A* scratch, double* sum) {
  while (rows > 1) {
    const int64_t half = rows / 2;
    add_row(t, t + half * width, scratch, half * width);
    if (rows % 2) add_row(scratch, t + 2 * half * width, scratch, width);
    t = scratch;
    rows = half;
  }
  accumulate_row(t, sum, width);
}

// --- a tensor as [outer, channels, inner] in memory order ------------------------------------------------------

struct View {
  int64_t outer = 1, channels = 1, inner = 1;
  int64_t numel() const { return outer * channels * inner; }
};

View view_of(const Tensor& t, int64_t dim, bool has_bias, bool channels_last) {
  View view;
  if (!has_bias) {
    view.outer = t.numel();
    return view;
  }
  view.channels = t.size(dim);
  bool before = true;
  auto visit = [&](int64_t d) {
    if (d == dim)
      before = false;
    else
      (before ? view.outer : view.inner) *= t.size(d);
  };
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (!(channels_last && d == 1)) visit(d);
  }
  if (channels_last) visit(1);
  return view;
}

// Elements with their biases in the compute type. Where channels change often, the biases are laid out once, for as
// long as a period and a chunk.
template <class T>
struct Biased {
  using A = acc_t<T>;
  const View& view;
  std::vector<A> bias, laid_out;
  int64_t period;

  Biased(const View& view, std::vector<A> values)
      : view(view), bias(std::move(values)), period(view.channels * view.inner) {
    constexpr int64_t kRun = 128, kLargest = 1 << 16;
    if (bias.empty() || view.numel() == 0 || view.inner >= kRun || (view.inner > 1 && period > kLargest)) return;
    laid_out.resize(period + std::min(kChunk, view.numel() - period));
    A* to = laid_out.data();
    for (const A b : bias) to = std::fill_n(to, view.inner, b);
    for (const A* from = laid_out.data(); to != laid_out.data() + laid_out.size();) *to++ = *from++;
  }

  // Those from `start` on: in t, or where they lie if there is nothing to do.
  const A* row(const T* x, int64_t start, A* t, int64_t n) const {
    if (bias.empty()) {
      if constexpr (std::is_same_v<T, A>) return x + start;
      load_row(x + start, t, n);
    } else if (!laid_out.empty()) {
      add_row(x + start, laid_out.data() + start % period, t, n);
    } else {
      int64_t row = start / view.inner, c = row % view.channels, left = (row + 1) * view.inner - start;
      for (int64_t i = 0; i < n; left = view.inner) {
        const int64_t run = std::min(n - i, left);
        add_value(x + start + i, bias[c], t + i, run);
        i += run;
        c = c + 1 == view.channels ? 0 : c + 1;
      }
    }
    return t;
  }
};

template <class A>
using ValueRow = void (*)(const A*, A*, int64_t, Scalars<A>);
template <class A>
using DerivativeRow = void (*)(const A*, const A*, A*, int64_t, Scalars<A>, bool);

template <class A, size_t... act>
ValueRow<A> value_row_of(int64_t chosen, std::index_sequence<act...>) {
  static constexpr ValueRow<A> table[] = {value_row<Act(act), A>...};
  return table[chosen];
}
template <class A, Order order, size_t... act>
DerivativeRow<A> derivative_row_of(int64_t chosen, std::index_sequence<act...>) {
  static constexpr DerivativeRow<A> table[] = {derivative_row<Act(act), order, A>...};
  return table[chosen];
}
constexpr auto kAllActs = std::make_index_sequence<kActs>();

void check(int64_t act, const std::optional<Tensor>& b, const View& view) {
  STD_TORCH_CHECK(0 <= act && act < kActs, "bias_act: act must be a code from 0 to 8, got ", act);
  STD_TORCH_CHECK(!b || b->numel() == view.channels, "bias_act: b must have ", view.channels, " elements");
}

// --- the operators ---------------------------------------------------------------------------------------------

Tensor bias_act_cpu(const Tensor& x_any, const std::optional<Tensor>& b, int64_t dim, int64_t act, double alpha,
                    double gain, double clamp) {
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last);
  Tensor y = empty_dense(x, sizes_of(x), channels_last);
  const View view = view_of(x, dim, b.has_value(), channels_last);
  check(act, b, view);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const Biased<T> biased(view, parameter<A>(b));
    const Scalars<A> scalars{A(alpha), A(gain), A(clamp)};
    const auto apply = value_row_of<A>(act, kAllActs);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    const int64_t numel = view.numel();
    parallel((numel + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
      alignas(64) A t[kChunk];
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t start = chunk * kChunk, n = std::min(kChunk, numel - start);
        const A* values = biased.row(from, start, t, n);
        if constexpr (std::is_same_v<T, A>) {
          apply(values, to + start, n, scalars);
        } else {
          apply(values, t, n, scalars);
          store_row(t, to + start, n);
        }
      }
    });
  });
  return y;
}

// Sum the gradients that piece(start, n, d) computes, in d or where it says, per channel: in float within a chunk, in
// double beyond.
template <class A, class Piece>
void sum_per_channel(const View& view, A* db, const Piece& piece) {
  if (view.numel() == 0) {
    std::fill(db, db + view.channels, A(0));
    return;
  }
  if (view.inner > 1 || view.channels == 1) {
    const View rows = view.channels == 1 ? View{1, 1, view.numel()} : view;
    // Rows longer than kSegment are cut at fixed places, so that a single channel still keeps every thread busy.
    constexpr int64_t kSegment = 64 * kChunk;
    const int64_t segments = (rows.inner + kSegment - 1) / kSegment;
    std::vector<double> partial(rows.outer * rows.channels * segments);
    parallel(int64_t(partial.size()), std::min(rows.inner, kSegment), [&](int64_t begin, int64_t end) {
      alignas(64) A d[kChunk];
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / segments, first = item % segments * kSegment;
        double sum = 0;
        for (int64_t i = first; i < std::min(first + kSegment, rows.inner); i += kChunk) {
          const int64_t n = std::min({kChunk, rows.inner - i, first + kSegment - i});
          sum += sum_row(piece(row * rows.inner + i, n, d), n);
        }
        partial[item] = sum;
      }
    });
    for (int64_t c = 0; c < rows.channels; ++c) {
      double sum = 0;
      for (int64_t o = 0; o < rows.outer; ++o) {
        for (int64_t s = 0; s < segments; ++s) sum += partial[(o * rows.channels + c) * segments + s];
      }
      db[c] = A(sum);
    }
    return;
  }
  // Channels innermost: blocks of pixels; a chunk holds whole pixels, or a part of one if it has many channels.
  const int64_t channels = view.channels, pixels = view.outer;
  const int64_t block = std::max<int64_t>(64, (pixels + 255) / 256);
  const int64_t blocks = (pixels + block - 1) / block;
  const int64_t step = std::min(channels, kChunk), group = std::max<int64_t>(1, kChunk / channels);
  std::vector<double> partial(blocks * channels);
  parallel(blocks, block * channels, [&](int64_t begin, int64_t end) {
    alignas(64) A d[kChunk], scratch[kChunk];
    for (int64_t item = begin; item < end; ++item) {
      double* sum = partial.data() + item * channels;
      const int64_t last = std::min((item + 1) * block, pixels);
      for (int64_t p = item * block; p < last; p += group) {
        const int64_t count = std::min(group, last - p);
        for (int64_t c = 0; c < channels; c += step) {
          const int64_t width = std::min(step, channels - c);
          sum_rows(piece(p * channels + c, width * count, d), count, width, scratch, sum + c);
        }
      }
    }
  });
  std::vector<double> total(channels);
  for (int64_t item = 0; item < blocks; ++item) {
    for (int64_t c = 0; c < channels; ++c) total[c] += partial[item * channels + c];
  }
  for (int64_t c = 0; c < channels; ++c) db[c] = A(total[c]);
}

std::tuple<Tensor, Tensor> bias_act_backward_cpu(const Tensor& dy_any, const std::optional<Tensor>& x_any,
                                                 const std::optional<Tensor>& b, const std::optional<Tensor>& y_any,
                                                 int64_t dim, int64_t act, double alpha, double gain, double clamp,
                                                 bool channels_last, bool need_db) {
  const Tensor dy = to_dense(dy_any, channels_last);
  const bool from_output = y_any.has_value();
  std::optional<Tensor> known;  // what the derivative is read from: x, or y, or nothing
  if (from_output || x_any) known = to_dense(from_output ? *y_any : *x_any, channels_last);
  STD_TORCH_CHECK(!known || (known->scalar_type() == dy.scalar_type() && known->numel() == dy.numel()),
                  "bias_act_backward: x or y must have the dtype and size of dy");
  Tensor dx = empty_dense(dy, sizes_of(dy), channels_last);
  const View view = view_of(dy, dim, b.has_value() || need_db, channels_last);
  check(act, b, view);
  Tensor db = empty_dense(dy, {need_db ? view.channels : 0}, false, acc_dtype(dy.scalar_type()));
  dispatch_floating(dy.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const Biased<T> biased(view, parameter<A>(from_output ? std::nullopt : b));
    const A limit = !known ? A(-1) : from_output ? load(store<T>(A(clamp))) : A(clamp);  // rounded as y was
    const Scalars<A> scalars{A(alpha), A(gain), limit};
    const auto apply = derivative_row_of<A, kSlope>(known ? act : int64_t(kLinear), kAllActs);
    const T* from = data<T>(dy);
    const T* at = known ? data<T>(*known) : nullptr;
    T* to = mutable_data<T>(dx);
    auto piece = [&](int64_t start, int64_t n, A* d) -> const A* {
      alignas(64) A t[kChunk];
      if constexpr (std::is_same_v<T, A>) {
        const A* values = at ? biased.row(at, start, t, n) : from + start;  // any values will do
        apply(from + start, values, to + start, n, scalars, from_output);
        return to + start;
      } else {
        load_row(from + start, d, n);
        apply(d, at ? biased.row(at, start, t, n) : d, d, n, scalars, from_output);
        store_row(d, to + start, n);
        return d;
      }
    };
    if (need_db) {
      sum_per_channel(view, mutable_data<A>(db), piece);
      return;
    }
    const int64_t numel = view.numel();
    parallel((numel + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
      alignas(64) A d[kChunk];
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        piece(chunk * kChunk, std::min(kChunk, numel - chunk * kChunk), d);
      }
    });
  });
  return {dx, db};
}

Tensor bias_act_second_cpu(const Tensor& v_any, const Tensor& dy_any, const Tensor& x_any,
                           const std::optional<Tensor>& b, int64_t dim, int64_t act, double alpha, double gain,
                           double clamp) {
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last);
  const Tensor v = to_dense(v_any, channels_last), dy = to_dense(dy_any, channels_last);
  STD_TORCH_CHECK(v.scalar_type() == x.scalar_type() && dy.scalar_type() == x.scalar_type() && v.numel() == x.numel() &&
                      dy.numel() == x.numel(),
                  "bias_act_second: v and dy must have the dtype and size of x");
  Tensor ddx = empty_dense(x, sizes_of(x), channels_last);
  const View view = view_of(x, dim, b.has_value(), channels_last);
  check(act, b, view);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const Biased<T> biased(view, parameter<A>(b));
    const Scalars<A> scalars{A(alpha), A(gain), A(clamp)};
    const auto apply = derivative_row_of<A, kCurvature>(act, kAllActs);
    const T *vs = data<T>(v), *dys = data<T>(dy), *xs = data<T>(x);
    T* to = mutable_data<T>(ddx);
    const int64_t numel = view.numel();
    parallel((numel + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
      alignas(64) A t[kChunk], d[kChunk];
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t start = chunk * kChunk, n = std::min(kChunk, numel - start);
        load_row(vs + start, d, n);
        multiply_row(dys + start, d, n);
        apply(d, biased.row(xs, start, t, n), d, n, scalars, false);
        store_row(d, to + start, n);
      }
    });
  });
  return ddx;
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("bias_act", TORCH_BOX(&bias_act_cpu));
  m.impl("bias_act_backward", TORCH_BOX(&bias_act_backward_cpu));
  m.impl("bias_act_second", TORCH_BOX(&bias_act_second_cpu));
}

}  // namespace
}  // namespace pixfuse
