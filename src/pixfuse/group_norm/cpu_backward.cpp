// group_norm on the CPU: the first derivative, planned and cut as the value is (cpu.cpp): the sums of every channel,
// those of its group, and then dx from them. Where SiLU follows, its slope is computed once if there is room to keep
// it.
#include "backward_rows.h"
#include "tasks.h"

namespace pixfuse {
namespace {

constexpr int64_t kSamples = 16;  // partial sums over the batch at most

// With g = dy * act'(z) and, per channel, db = sum of g and ds = sum of g * xhat, per group of n elements
// p = sum of gamma * db / n and q = sum of gamma * ds / n:  dx = rstd * (gamma * g - p - xhat * q).
template <class T>
struct Backward {
  using A = acc_t<T>;
  Problem problem;
  Plan plan;
  const T *dy, *x;
  const A *mean, *rstd;
  T* dx;               // null if not needed
  A *dweight, *dbias;  // null if not needed
  std::vector<A> gammas, betas;

  struct Sums {
    double b = 0, s = 0;  // of g and of g * xhat
  };
  // Per group; the kernels take xhat without the rest of the mean, so it goes into beta and p.
  struct Group {
    A mean, rstd, rest, p, q;  // rest: that of the mean, times -rstd
  };

  A beta(int64_t c, const Group& u) const { return betas[c] + u.rest * gammas[c]; }

  Group group(int64_t n, int64_t g) const {
    const int64_t i = n * problem.groups + g;
    return {mean[i], rstd[i], A(0), A(0), A(0)};
  }

  // For the kernel of dx: that without an activation takes x - mean instead of xhat.
  A q_of(const Group& u) const { return problem.act == kNone || keeps() ? u.q * u.rstd : u.q; }

  // The kernels' sums of a channel as the definition's.
  static Sums corrected(const Sums& c, const Group& u) { return {c.b, c.s + double(u.rest) * c.b}; }

  void set(Group& u, double b, double s) const {  // sums over the group, weighted with gamma
    const double n = double(problem.group_size());
    u.q = A(s / n);
    u.p = A(b / n + double(u.rest) * (s / n));
  }

  // g = dy * act'(z) is computed once where there is room for it: in dx if that has the compute type, else beside it
  // if the image is not cut.
  bool keeps_in_dx() const { return std::is_same_v<T, A> && dx; }
  bool keeps() const { return problem.act != kNone && (keeps_in_dx() || !plan.pieces); }
  int64_t kept_size() const {
    if (problem.act == kNone || keeps_in_dx()) return 0;
    if (plan.pieces) return plan.columns ? widest(problem, plan) + 1 : kRun;
    return plan.slab * problem.group_size() + problem.pixels + widest(problem, plan) + 2;
  }
  A* kept_at(int64_t at, Work<A>& w) const {
    if constexpr (std::is_same_v<T, A>) {
      if (dx) return dx + at;
    }
    return w.kept.data();
  }

  // The kernels' sums of `channels` of n elements each, the first of which is c.
  void sums(int64_t at, int64_t n, int64_t c, int64_t channels, const Group& u, Work<A>& w, Sums* total) const {
    const auto sum = PIXFUSE_FOR_ACT(run_sums, T, problem.act);
    w.offset.resize(channels);
    for (int64_t k = 0; k < channels; ++k) {
      w.offset[k] = beta(c + k, u);
      total[k] = {};
    }
    const int64_t step = plan.pieces && !keeps() ? kRun : n;  // of a single channel, whose g is lost then
    for (int64_t i = 0; i < n; i += step) {
      sum(x + at + i, dy + at + i, std::min(step, n - i), channels, u.mean, u.rstd, gammas.data() + c, w.offset.data(),
          &total->b, kept_at(at + i, w));
    }
  }

  void result(int64_t at, int64_t n, int64_t c, int64_t channels, const Group& u, Work<A>& w) const {
    w.offset.resize(channels);
    for (int64_t k = 0; k < channels; ++k) w.offset[k] = beta(c + k, u);
    auto apply = [&](auto* kernel, auto* from) {
      kernel(x + at, from, dx + at, n, channels, u.mean, u.rstd, gammas.data() + c, w.offset.data(), u.p, q_of(u));
    };
    if (keeps())
      apply(run_dx<T, A, kNone>, kept_at(at, w));
    else
      apply(PIXFUSE_FOR_ACT(run_dx_of, T, problem.act), dy + at);
  }

  void coefficients(const Columns& v, Work<A>& w, const Group* u) const {
    const A *g0 = gammas.data() + v.channel(), *b0 = betas.data() + v.channel();
    v.spread(w.mean.data(), [&](int64_t g, int64_t) { return u[g].mean; });
    v.spread(w.scale.data(), [&](int64_t g, int64_t) { return u[g].rstd; });
    v.spread(w.gamma.data(), [&](int64_t, int64_t c) { return g0[c]; });
    for (auto* values : {&w.mean, &w.scale, &w.gamma}) arrange<T>(*values, v.width(), w.scratch);
    if (problem.act == kNone) return;
    v.spread(w.offset.data(), [&](int64_t g, int64_t c) { return b0[c] + u[g].rest * g0[c]; });
    arrange<T>(w.offset, v.width(), w.scratch);
  }

  int64_t kept_ld(const Columns& v) const { return keeps_in_dx() ? v.ld : keeps() ? 2 * v.half() : 0; }

  // The columns' coefficients for their sums; then the sums, per channel of the columns.
  void sums(int64_t at, const Columns& v, Work<A>& w, const Group* u, Sums* channels) const {
    const int64_t width = v.width(), d = v.per_group;
    coefficients(v, w, u);
    std::fill(w.s.begin(), w.s.end(), A(0));
    std::fill(w.t.begin(), w.t.end(), A(0));
    std::fill_n(w.sum.data(), width, 0.);
    std::fill_n(w.squares.data(), width, 0.);
    const auto sum = PIXFUSE_FOR_ACT(column_sums, T, problem.act);
    A* kept = kept_at(at, w);
    const int64_t kept_ld = this->kept_ld(v);
    each_block(v, [&](int64_t offset, int64_t rows, int64_t columns) {
      sum(x + at + offset, dy + at + offset, v.ld, rows, columns, v.half(), w.mean.data(), w.scale.data(),
          w.gamma.data(), w.offset.data(), w.s.data(), w.t.data(), kept + offset / v.ld * kept_ld, kept_ld);
      fold<T>(w.s.data(), w.sum.data(), columns, v.half());
      fold<T>(w.t.data(), w.squares.data(), columns, v.half());
    });
    std::fill_n(channels, v.groups * d, Sums{});
    const double *b = w.sum.data(), *t = w.squares.data();
    for (int64_t p = 0; p < v.pixels_per_row; ++p) {
      for (int64_t c = 0; c < v.groups * d; ++c) {
        for (int64_t k = 0; k < v.repeat; ++k) channels[c].b += *b++, channels[c].s += *t++;
      }
    }
    if (problem.act != kNone) return;
    for (int64_t g = 0; g < v.groups; ++g) {
      for (int64_t c = g * d; c < (g + 1) * d; ++c) channels[c].s *= double(u[g].rstd);
    }
  }

  // dx, after set(); the other coefficients are there from sums() if `fresh` is false.
  void result(int64_t at, const Columns& v, Work<A>& w, const Group* u, bool fresh) const {
    if (fresh) coefficients(v, w, u);
    v.spread(w.p.data(), [&](int64_t g, int64_t) { return u[g].p; });
    v.spread(w.q.data(), [&](int64_t g, int64_t) { return q_of(u[g]); });
    for (auto* values : {&w.p, &w.q}) arrange<T>(*values, v.width(), w.scratch);
    auto apply = [&](auto* kernel, auto* from, int64_t from_ld) {
      auto rows = [&](int64_t first, int64_t count, int64_t columns) {
        const int64_t here = at + first * v.ld;
        kernel(x + here, from + first * from_ld, dx + here, v.ld, from_ld, count, columns, v.half(), w.mean.data(),
               w.scale.data(), w.gamma.data(), w.offset.data(), w.p.data(), w.q.data());
      };
      if (v.rows) rows(0, v.rows, v.width());
      if (v.tail) rows(v.rows, 1, v.tail);
    };
    if (keeps())
      apply(column_dx<T, A, kNone>, kept_at(at, w), kept_ld(v));
    else
      apply(PIXFUSE_FOR_ACT(column_dx_of, T, problem.act), dy + at, v.ld);
  }

  // From the channels' sums of `groups` groups to their p and q, and to the parameters' sums.
  void close(int64_t first, int64_t groups, Group* u, const Sums* channels, Sums* parameters) const {
    const int64_t d = problem.per_group();
    for (int64_t g = 0; g < groups; ++g) {
      double b = 0, s = 0;
      for (int64_t k = 0; k < d; ++k) {
        const int64_t c = (first + g) * d + k;
        const Sums here = corrected(channels[g * d + k], u[g]);
        b += double(gammas[c]) * here.b;
        s += double(gammas[c]) * here.s;
        parameters[c].b += here.b;
        parameters[c].s += here.s;
      }
      set(u[g], b, s);
    }
  }

  void run() {
    const int64_t channels = problem.channels;
    // Sums over the batch: over fixed stretches of images, then those in order.
    const int64_t stretch = std::max<int64_t>(1, ceil_div(problem.samples, kSamples));
    const int64_t stretches = problem.empty() ? 0 : ceil_div(problem.samples, stretch);
    std::vector<Sums> parameters(std::max<int64_t>(stretches, 1) * channels);
    if (problem.empty()) {
    } else if (plan.pieces) {
      plan.columns ? columns_in_pieces(parameters.data()) : runs_in_pieces(parameters.data());
    } else {
      small(stretch, stretches, parameters.data());
    }
    for (int64_t c = 0; c < channels; ++c) {
      Sums total;
      for (int64_t k = 0; k < stretches; ++k) {
        total.b += parameters[k * channels + c].b;
        total.s += parameters[k * channels + c].s;
      }
      if (dbias) dbias[c] = A(total.b);
      if (dweight) dweight[c] = A(total.s);
    }
  }

  // One task per slab of groups and stretch of images.
  void small(int64_t stretch, int64_t stretches, Sums* parameters) const {
    const int64_t image = problem.image_size(), size = problem.group_size(), d = problem.per_group();
    const int64_t cost = stretch * plan.slab * size;
    parallel(stretches * plan.slabs, cost, [&](int64_t begin, int64_t end) {
      Work<A> w(widest(problem, plan));
      w.for_backward(kept_size());
      std::vector<Sums> channels(plan.slab * d);
      std::vector<Group> u(plan.slab);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % plan.slabs * plan.slab, groups = std::min(plan.slab, problem.groups - first);
        Sums* totals = parameters + i / plan.slabs * problem.channels;
        const int64_t last = std::min((i / plan.slabs + 1) * stretch, problem.samples);
        for (int64_t n = i / plan.slabs * stretch; n < last; ++n) {
          for (int64_t g = 0; g < groups; ++g) u[g] = group(n, first + g);
          if (!plan.columns) {
            const int64_t at = n * image + first * size;
            if (mean_needs_rest(u[0].mean, u[0].rstd)) u[0].rest = rest_of_run(at, size, u[0]) * -u[0].rstd;
            sums(at, problem.pixels, first * d, d, u[0], w, channels.data());
            close(first, 1, u.data(), channels.data(), totals);
            if (dx) result(at, problem.pixels, first * d, d, u[0], w);
            continue;
          }
          const Columns v = problem.channels_last ? columns_of(problem, first, groups, 0, problem.pixels)
                                                  : columns_of(problem, first, groups);
          const int64_t at = n * image + v.channel() * v.repeat;
          rests(at, v, w, u.data());
          sums(at, v, w, u.data(), channels.data());
          close(first, groups, u.data(), channels.data(), totals);
          if (dx) result(at, v, w, u.data(), false);
        }
      }
    });
  }

  // The mean of x - mean in float: what the rounding of the mean left.
  A rest_of_run(int64_t at, int64_t n, const Group& u) const {
    double total[2] = {};
    for (int64_t i = 0; i < n; i += kRun) run_moments(x + at + i, std::min(kRun, n - i), u.mean, total);
    return A(total[0] / double(n));
  }

  // The same for the groups of columns, summed; false if no group needs it.
  bool sum_rests(int64_t at, const Columns& v, Work<A>& w, const Group* u, double* totals) const {
    bool any = false;
    for (int64_t g = 0; g < v.groups; ++g) any = any || mean_needs_rest(u[g].mean, u[g].rstd);
    std::fill_n(totals, v.groups, 0.);
    if (!any) return false;
    v.spread(w.mean.data(), [&](int64_t g, int64_t) { return u[g].mean; });
    arrange<T>(w.mean, v.width(), w.scratch);
    std::fill(w.s.begin(), w.s.end(), A(0));
    std::fill_n(w.sum.data(), v.width(), 0.);
    each_block(v, [&](int64_t offset, int64_t rows, int64_t columns) {
      column_moments(x + at + offset, v.ld, rows, columns, v.half(), w.mean.data(), w.s.data(), w.t.data());
      fold<T>(w.s.data(), w.sum.data(), columns, v.half());
    });
    v.each([&](int64_t g, int64_t j) { totals[g] += w.sum[j]; });
    return true;
  }

  void set_rests(int64_t groups, Group* u, const double* totals) const {
    for (int64_t g = 0; g < groups; ++g) {
      if (mean_needs_rest(u[g].mean, u[g].rstd)) u[g].rest = A(totals[g] / double(problem.group_size())) * -u[g].rstd;
    }
  }

  void rests(int64_t at, const Columns& v, Work<A>& w, Group* u) const {
    if constexpr (std::is_same_v<A, float>) {
      std::vector<double> totals;
      bool any = false;
      for (int64_t g = 0; g < v.groups; ++g) any = any || mean_needs_rest(u[g].mean, u[g].rstd);
      if (!any) return;
      totals.resize(v.groups);
      sum_rests(at, v, w, u, totals.data());
      set_rests(v.groups, u, totals.data());
    }
  }

  void runs_in_pieces(Sums* parameters) const {
    // Pieces of channels here: gamma and beta do not change within one.
    const int64_t image = problem.image_size(), pixels = problem.pixels, channels = problem.channels;
    const int64_t groups = problem.groups, d = problem.per_group(), size = problem.group_size();
    const int64_t piece = ceil_div(std::max(kPiece, ceil_div(pixels, kPieces)), kRun) * kRun;
    const int64_t count = ceil_div(pixels, piece), cost = std::min(piece, pixels);
    const int64_t tile = std::max<int64_t>(1, kPieces / (channels * count));
    std::vector<Sums> partial(tile * channels * count), sum(tile * channels);
    std::vector<Group> u(tile * groups);
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t images = std::min(tile, problem.samples - n0), tasks = images * channels * count;
      auto extent = [&](int64_t i) { return std::pair(i % count * piece, std::min((i % count + 1) * piece, pixels)); };
      bool any = false;
      for (int64_t i = 0; i < images * groups; ++i) {
        u[i] = group(n0 + i / groups, i % groups);
        any = any || mean_needs_rest(u[i].mean, u[i].rstd);
      }
      if (any) {
        parallel(tasks, cost, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto [from, to] = extent(i);
            const int64_t at = n0 * image + i / count * pixels + from;
            partial[i].b = double(rest_of_run(at, to - from, u[i / count / d])) * double(to - from);
          }
        });
        for (int64_t i = 0; i < images * groups; ++i) {
          double total = 0;
          for (int64_t k = 0; k < d * count; ++k) total += partial[i * d * count + k].b;
          if (mean_needs_rest(u[i].mean, u[i].rstd)) u[i].rest = A(total / double(size)) * -u[i].rstd;
        }
      }
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(0);
        w.for_backward(kept_size());
        for (int64_t i = begin; i < end; ++i) {
          const auto [from, to] = extent(i);
          const int64_t at = n0 * image + i / count * pixels + from;
          sums(at, to - from, i / count % channels, 1, u[i / count / d], w, &partial[i]);
        }
      });
      for (int64_t i = 0; i < images * channels; ++i) {
        sum[i] = {};
        for (int64_t k = 0; k < count; ++k) {
          sum[i].b += partial[i * count + k].b;
          sum[i].s += partial[i * count + k].s;
        }
      }
      for (int64_t n = 0; n < images; ++n) {
        close(0, groups, u.data() + n * groups, sum.data() + n * channels, parameters);
      }
      if (!dx) continue;
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(0);
        for (int64_t i = end; i-- > begin;) {  // backwards: the last pieces are still in the cache
          const auto [from, to] = extent(i);
          const int64_t at = n0 * image + i / count * pixels + from;
          result(at, to - from, i / count % channels, 1, u[i / count / d], w);
        }
      });
    }
  }

  void columns_in_pieces(Sums* parameters) const {
    const int64_t image = problem.image_size(), groups = problem.groups, channels = problem.channels;
    const int64_t count = plan.count, tile = std::max<int64_t>(1, kPieces / count), cost = plan.piece * channels;
    std::vector<Sums> partial(tile * count * channels), sum(channels);
    std::vector<Group> u(tile * groups);
    std::vector<double> rest;
    auto piece = [&](int64_t i) {
      const int64_t from = i % count * plan.piece;
      return columns_of(problem, 0, groups, from, std::min(from + plan.piece, problem.pixels));
    };
    for (int64_t n0 = 0; n0 < problem.samples; n0 += tile) {
      const int64_t images = std::min(tile, problem.samples - n0), tasks = images * count;
      auto start = [&](int64_t i) { return (n0 + i / count) * image + i % count * plan.piece * channels; };
      bool any = false;
      for (int64_t i = 0; i < images * groups; ++i) {
        u[i] = group(n0 + i / groups, i % groups);
        any = any || mean_needs_rest(u[i].mean, u[i].rstd);
      }
      if (any) {
        rest.assign(tasks * groups, 0.);
        parallel(tasks, cost, [&](int64_t begin, int64_t end) {
          Work<A> w(widest(problem, plan));
          for (int64_t i = begin; i < end; ++i) {
            sum_rests(start(i), piece(i), w, u.data() + i / count * groups, rest.data() + i * groups);
          }
        });
        for (int64_t n = 0; n < images; ++n) {
          double* totals = rest.data() + n * count * groups;
          for (int64_t k = 1; k < count; ++k) {
            for (int64_t g = 0; g < groups; ++g) totals[g] += totals[k * groups + g];
          }
          set_rests(groups, u.data() + n * groups, totals);
        }
      }
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        w.for_backward(kept_size());
        for (int64_t i = begin; i < end; ++i) {
          sums(start(i), piece(i), w, u.data() + i / count * groups, partial.data() + i * channels);
        }
      });
      for (int64_t n = 0; n < images; ++n) {
        std::fill(sum.begin(), sum.end(), Sums{});
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t c = 0; c < channels; ++c) {
            sum[c].b += partial[(n * count + k) * channels + c].b;
            sum[c].s += partial[(n * count + k) * channels + c].s;
          }
        }
        close(0, groups, u.data() + n * groups, sum.data(), parameters);
      }
      if (!dx) continue;
      parallel(tasks, cost, [&](int64_t begin, int64_t end) {
        Work<A> w(widest(problem, plan));
        w.for_backward(kept_size());
        for (int64_t i = end; i-- > begin;) result(start(i), piece(i), w, u.data() + i / count * groups, true);
      });
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> group_norm_backward_cpu(const Tensor& dy_any, const Tensor& x_any,
                                                           const Tensor& mean_any, const Tensor& rstd_any,
                                                           const std::optional<Tensor>& weight,
                                                           const std::optional<Tensor>& bias, int64_t num_groups,
                                                           int64_t act, bool round_before_act, bool need_dx,
                                                           bool need_dweight, bool need_dbias) {
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last), dy = to_dense(dy_any, channels_last);
  const Tensor mean = to_dense(mean_any, false), rstd = to_dense(rstd_any, false);
  const Problem problem = problem_of(x, num_groups, 0, act, round_before_act, channels_last);
  const auto stats_dtype = acc_dtype(x.scalar_type());
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type() && dy.numel() == x.numel(),
                  "group_norm_backward: dy must have the dtype and size of x");
  for (const Tensor* t : {&mean, &rstd}) {
    STD_TORCH_CHECK(t->scalar_type() == stats_dtype && t->numel() == problem.samples * num_groups,
                    "group_norm_backward: mean and rstd must be [N, num_groups] in the compute dtype");
  }
  for (const auto* t : {&weight, &bias}) {
    STD_TORCH_CHECK(!*t || (*t)->numel() == problem.channels,
                    "group_norm_backward: weight and bias must have an element per channel");
  }
  Tensor dx = need_dx ? empty_dense(x, sizes_of(x), channels_last) : empty_dense(x, {0}, false);
  Tensor dweight = empty_dense(x, {need_dweight ? problem.channels : 0}, false, stats_dtype);
  Tensor dbias = empty_dense(x, {need_dbias ? problem.channels : 0}, false, stats_dtype);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    Backward<T>{problem,
                problem.empty() ? Plan{} : plan_of(problem),
                data<T>(dy),
                data<T>(x),
                data<A>(mean),
                data<A>(rstd),
                need_dx ? mutable_data<T>(dx) : nullptr,
                need_dweight ? mutable_data<A>(dweight) : nullptr,
                need_dbias ? mutable_data<A>(dbias) : nullptr,
                parameter_of<A>(weight, problem.channels, 1),
                parameter_of<A>(bias, problem.channels, 0)}
        .run();
  });
  return {dx, dweight, dbias};
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) { m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward_cpu)); }

}  // namespace
}  // namespace pixfuse
