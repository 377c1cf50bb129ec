// filtered_lrelu on the CPU: value, tangent and adjoint by one kernel.
//
// A job computes a tile of the result for several images at once: a vector register holds one pixel of 16 planes (8 of
// float64), taken from consecutive channels in channels_last, else from any planes or tiles by a transpose at load and
// store. So every step is a sum of taps times whole vectors, with no tail and no shuffle, whatever the factors are:
//   ring of source rows -> vertical taps -> horizontal taps, activation -> one row of the upsampled image
//                       -> horizontal taps -> vertical taps, added to the rows of the result at work.
// Vertical taps serve four rows of the upsampled image at once, so that the rings, which lie in the second cache, are
// read half as often; all else that exists of that image fits the first. The adjoint is the same pipeline
// with the filters exchanged, and the activation replaced by its factor, which a second pipeline from x gives.
// Each number is the same sequence of operations in any tile and lane: batch and threads do not show.
#include <algorithm>
#include <limits>
#include <numeric>

#include "stages.h"

namespace pixfuse {
namespace {

// --- the pipeline ----------------------------------------------------------------------------------------------

// `from` through `main` up, and the factor at `x` through `factor` up where there is one, then `f` down by `down`.
// The upsampled sample that meets tap 0 of result 0 has the position -pad.
template <class T>
struct Problem {
  using A = acc_t<T>;
  const Image<const T>& from;
  const Up<A>& main;
  const Image<const T>* x;  // null: activate
  const Up<A>* factor;
  const Filter<A>& f;
  int64_t down, pad_x, pad_y;
  std::vector<A> bias;  // of x, or of from
  Activation<A> act;
  const Image<T>& y;
  bool block;
};

// Tiles of about this many upsampled columns and rows of the result: the rings stay in the second cache, memory is read
// in long pieces, and what neighbouring tiles both compute stays small. Half the rows at most where there are few jobs.
constexpr int64_t kUpsampledWidth = 256, kTileHeight = 128, kFewJobs = 16, kScratchBytes = 1 << 20;

template <class T>
void run(const Problem<T>& p) {
  using A = acc_t<T>;
  constexpr int64_t L = kLanes<A>;
  const Image<T>& y = p.y;
  if (y.n == 0 || y.c == 0) return;
  // Tiles begin at the same phase of every factor.
  const int64_t unit = std::lcm(p.main.up, std::lcm(p.down, p.factor ? p.factor->up : 1));
  auto balanced = [&](int64_t size, int64_t wanted) {
    return round_up(ceil_div(size, ceil_div(size, std::max<int64_t>(wanted, 1))), unit);
  };
  auto margin = [&](auto of) { return std::max(of(p.main), p.factor ? of(*p.factor) : 0); };
  const int64_t before = margin(UpStage<T>::before), after = margin(UpStage<T>::after);
  auto need = [&](int64_t width) {
    const DownStage<T> down(p.f, p.down, before, after);
    const int64_t wide = down.upsampled(round_up(width, kFew), p.f.w);
    return down.need(width) + UpStage<T>::need(p.main, wide) +
           (p.factor ? UpStage<T>::need(*p.factor, wide) + before + wide + after : 0);
  };
  const int64_t blocks = ceil_div(y.c, L), planes = y.n * y.c;
  auto tiles_of = [&](int64_t width, int64_t height) { return ceil_div(y.w, width) * ceil_div(y.h, height); };
  auto jobs_of = [&](int64_t tiles) { return p.block ? y.n * tiles * blocks : ceil_div(planes * tiles, L); };
  // Smaller where more of the lanes are filled then: a few planes are seen in many tiles.
  int64_t width = 0, height = 0, least = 0;
  for (int64_t wide : {kUpsampledWidth, kUpsampledWidth / 2}) {
    int64_t w = balanced(y.w, std::max<int64_t>(wide / p.down, 8));
    while (w > unit && need(w) * kVectorBytes > kScratchBytes) w = round_up(w / 2, unit);
    for (int64_t high = kTileHeight; high >= 4; high /= 2) {
      const int64_t h = balanced(y.h, high), jobs = jobs_of(tiles_of(w, h));
      if (high == kTileHeight && jobs < kFewJobs) continue;
      const int64_t cost = jobs * (w * p.down + p.f.w + p.main.f.w) * (h * p.down + p.f.h + p.main.f.h);
      if (width == 0 || cost < least) width = w, height = h, least = cost;
    }
  }
  const int64_t across = ceil_div(y.w, width), tiles = tiles_of(width, height), jobs = jobs_of(tiles);

  parallel(jobs, width * height * p.down * p.down * L, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch;
    scratch.reserve(need(width));
    const std::vector<A> none;
    UpStage<T> main(p.from, p.x ? none : p.bias, p.main);
    UpStage<T> factor(p.x ? *p.x : p.from, p.bias, p.factor ? *p.factor : p.main);
    DownStage<T> down(p.f, p.down, before, after);
    for (int64_t job = begin; job < end; ++job) {
      Lanes<A> lanes;
      lanes.block = p.block;
      int64_t w = 0, h = 0, my[L], mx[L];
      for (int64_t l = 0; l < L; ++l) {
        int64_t plane, tile;
        if (p.block) {
          const int64_t c = job % blocks * L + l, rest = job / blocks;
          if (c >= y.c) break;
          tile = rest % tiles, plane = rest / tiles * y.c + c;
        } else {
          const int64_t item = job * L + l;
          if (item >= planes * tiles) break;
          tile = item / planes, plane = item % planes;
        }
        lanes.n[l] = plane / y.c, lanes.c[l] = plane % y.c;
        lanes.y0[l] = tile / across * height, lanes.x0[l] = tile % across * width;
        my[l] = lanes.y0[l] * p.down - p.pad_y, mx[l] = lanes.x0[l] * p.down - p.pad_x;
        w = std::max(w, std::min(width, y.w - lanes.x0[l]));
        h = std::max(h, std::min(height, y.h - lanes.y0[l]));
        lanes.count = l + 1;
      }
      scratch.reset();
      down.begin(scratch, w);
      const int64_t wide = down.upsampled(round_up(w, kFew), p.f.w), high = down.upsampled(h, p.f.h);
      main.begin(scratch, lanes, my, mx, wide);
      A* v = nullptr;
      if (p.x) {
        factor.begin(scratch, lanes, my, mx, wide);
        v = scratch.take(before + wide + after) + before * L;
      }
      for (int64_t i = 0; i < high; i += kBatch) {
        const int64_t rows = std::min(kBatch, high - i);
        main.batch(rows);
        if (p.x) factor.batch(rows);
        for (int64_t r = 0; r < rows; ++r) {
          if ((i + r) % p.down >= p.f.h) continue;  // no tap meets this row
          A* row = down.row(i + r);
          if (p.x) {
            factor.template row<Then::kNothing>(r, v, p.act, v);
            main.template row<Then::kFactor>(r, row, p.act, v);
          } else {
            main.template row<Then::kActivate>(r, row, p.act, row);
          }
          down.filter(i + r, r);
        }
        down.batch(i, rows, h, lanes, y);
      }
    }
  });
}

// --- the operators ---------------------------------------------------------------------------------------------

struct Scalars {
  int64_t up, down, pad_x, pad_y, out_w, out_h;
  bool flip;
  double gain, slope, clamp;

  // The gain is in the taps that lead to the activation, and in those that lead to its derivative.
  template <class A>
  Activation<A> activation() const {
    return {A(slope), clamp < 0 ? std::numeric_limits<A>::infinity() : A(clamp)};
  }
};

void check(const Tensor& x, const std::optional<Tensor>& fu, const std::optional<Tensor>& fd,
           const std::optional<Tensor>& b, const Scalars& s) {
  STD_TORCH_CHECK(x.dim() == 4, "filtered_lrelu: x must be 4-D");
  STD_TORCH_CHECK(s.up > 0 && s.down > 0 && s.out_w > 0 && s.out_h > 0, "filtered_lrelu: sizes must be positive");
  for (const auto* f : {&fu, &fd}) {
    STD_TORCH_CHECK(!*f || (((*f)->dim() == 1 || (*f)->dim() == 2) && (*f)->numel() > 0),
                    "filtered_lrelu: filters must be 1-D or 2-D and not empty");
  }
  STD_TORCH_CHECK(!b || b->numel() == x.size(1), "filtered_lrelu: b must have ", x.size(1), " elements");
}

// Lanes are blocks of channels where these lie side by side and fill half a vector at least.
template <class A>
bool in_blocks(const Tensor& x, bool channels_last) {
  return channels_last && x.size(1) >= kLanes<A> / 2;
}

Tensor side_by_side(const Tensor& t, bool block) { return block && t.stride(1) != 1 ? to_dense(t, true) : t; }

Tensor filtered_lrelu_cpu(const Tensor& x_any, const std::optional<Tensor>& fu, const std::optional<Tensor>& fd,
                          const std::optional<Tensor>& b, int64_t up, int64_t down, int64_t pad_x, int64_t pad_y,
                          int64_t out_w, int64_t out_h, bool flip, double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  const bool channels_last = is_channels_last(x_any);
  Tensor y = empty_dense(x_any, {x_any.size(0), x_any.size(1), out_h, out_w}, channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block);
    const Image<const T> from(x, data<T>(x));
    const Image<T> to(y, mutable_data<T>(y));
    const Up<A> main(fu, up, pad_x, pad_y, flip, gain * double(up * up));
    const Filter<A> f(fd, flip, 1);
    run<T>({from, main, nullptr, nullptr, f, down, 0, 0, parameter<A>(b), s.activation<A>(), to, block});
  });
  return y;
}

Tensor filtered_lrelu_tangent_cpu(const Tensor& v_any, const Tensor& x_any, const std::optional<Tensor>& fu,
                                  const std::optional<Tensor>& fd, const std::optional<Tensor>& b, int64_t up,
                                  int64_t down, int64_t pad_x, int64_t pad_y, int64_t out_w, int64_t out_h, bool flip,
                                  double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  STD_TORCH_CHECK(v_any.scalar_type() == x_any.scalar_type() && sizes_of(v_any) == sizes_of(x_any),
                  "filtered_lrelu_tangent: v must have the dtype and shape of x");
  const bool channels_last = is_channels_last(x_any);
  Tensor y = empty_dense(x_any, {x_any.size(0), x_any.size(1), out_h, out_w}, channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block), v = side_by_side(v_any, block);
    const Image<const T> from(v, data<T>(v)), at(x, data<T>(x));
    const Image<T> to(y, mutable_data<T>(y));
    const Up<A> main(fu, up, pad_x, pad_y, flip, gain * double(up * up));
    const Filter<A> f(fd, flip, 1);
    run<T>({from, main, &at, &main, f, down, 0, 0, parameter<A>(b), s.activation<A>(), to, block});
  });
  return y;
}

Tensor filtered_lrelu_backward_cpu(const Tensor& dy_any, const Tensor& x_any, const std::optional<Tensor>& fu,
                                   const std::optional<Tensor>& fd, const std::optional<Tensor>& b, int64_t up,
                                   int64_t down, int64_t pad_x, int64_t pad_y, int64_t out_w, int64_t out_h, bool flip,
                                   double gain, double slope, double clamp) {
  const Scalars s{up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp};
  check(x_any, fu, fd, b, s);
  STD_TORCH_CHECK(dy_any.scalar_type() == x_any.scalar_type() && dy_any.dim() == 4 && dy_any.size(0) == x_any.size(0) &&
                      dy_any.size(1) == x_any.size(1) && dy_any.size(2) == out_h && dy_any.size(3) == out_w,
                  "filtered_lrelu_backward: dy must have the dtype of x and the shape of y");
  const bool channels_last = is_channels_last(x_any);
  Tensor dx = empty_dense(x_any, sizes_of(x_any), channels_last);
  dispatch_floating(x_any.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const bool block = in_blocks<A>(x_any, channels_last);
    const Tensor x = side_by_side(x_any, block), dy = side_by_side(dy_any, block);
    const Image<const T> from(dy, data<T>(dy)), at(x, data<T>(x));
    const Image<T> to(dx, mutable_data<T>(dx));
    const Up<A> factor(fu, up, pad_x, pad_y, flip, gain * double(up * up));
    const Filter<A> shape(fd, flip, 1);
    const Up<A> main(fd, down, shape.w - 1, shape.h - 1, !flip, gain);
    const Filter<A> f(fu, !flip, double(up * up));
    run<T>({from, main, &at, &factor, f, up, f.w - 1 - pad_x, f.h - 1 - pad_y, parameter<A>(b), s.activation<A>(), to,
            block});
  });
  return dx;
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("filtered_lrelu", TORCH_BOX(&filtered_lrelu_cpu));
  m.impl("filtered_lrelu_tangent", TORCH_BOX(&filtered_lrelu_tangent_cpu));
  m.impl("filtered_lrelu_backward", TORCH_BOX(&filtered_lrelu_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
