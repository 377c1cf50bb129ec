// group_norm on the CPU: the value. cpu_backward.cpp has the first derivative, by the same plan.
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
#include "tasks.h"

namespace pixfuse {
namespace {

// --- row loops -------------------------------------------------------------------------------------------------

// `channels` of n elements each, one after another. SiLU takes so long that memory can bring what lies `ahead` of x
// meanwhile, for the statistics that are next. (bfloat16 gains nothing: there SiLU is all of the time.)
template <class T, Act act>
PIXFUSE_CLONES void run_value(const T* x, T* y, int64_t n, int64_t channels, int64_t ahead, acc_t<T> mean,
                              const acc_t<T>* scales, const acc_t<T>* offsets) {
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
        for (int64_t k = 0; k < 2 * kLanes; k += 64 / sizeof(T)) __builtin_prefetch(x + ahead + i + k);
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
  void value(int64_t at, int64_t n, int64_t c, int64_t channels, int64_t ahead, const Statistics<A>& s, A* scale,
             A* offset) const {
    for (int64_t k = 0; k < channels; ++k) {
      scale[k] = gammas[c + k] * s.rstd;
      offset[k] = betas[c + k] - s.rest * scale[k];
    }
    PIXFUSE_FOR_ACT(run_value, T, problem.act)(x + at, y + at, n, channels, ahead, s.mean, scale, offset);
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
        value(i * size, pixels, g * d, d, i + 1 < end ? size : 0, s, scale.data(), offset.data());
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
            value(start + at, stop - at, (first + i / count) % groups * problem.per_group() + c, 1, 0, s[i / count],
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

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) { m.impl("group_norm", TORCH_BOX(&group_norm_cpu)); }

}  // namespace
}  // namespace pixfuse
