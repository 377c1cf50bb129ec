// How group_norm cuts a problem into tasks, and what a task keeps.
#pragma once

#include <limits>
#include <optional>

#include "rows.h"

namespace pixfuse {
namespace {

constexpr int64_t kRows = 64;        // rows of columns that are summed in float
constexpr int64_t kWidth = 128;      // columns that a row should have
constexpr int64_t kPixels = 32;      // a contiguous image of fewer pixels is walked in columns
constexpr int64_t kPieces = 64;      // pieces of an image or group at most
constexpr int64_t kPiece = 1 << 17;  // elements of a piece at least
// Elements of a task's share of an image above which it is cut into pieces. Measured as float32 forward, one thread,
// in parts of a copy's speed, one task against pieces: channels_last 131,072 elements (1024 pixels, 128 channels) 0.74
// and 0.66; contiguous 65,536 elements 0.79 and 0.60, 40,960 elements 0.71 and 0.62. Above, one thread would have to
// take what others could help with, and the share leaves a cache of 1 MiB (backward reads two images).
constexpr int64_t kSmall = 1 << 17;

// --- geometry --------------------------------------------------------------------------------------------------

struct Problem {
  int64_t samples, channels, groups, pixels;
  double eps;
  bool channels_last;
  Act act;

  int64_t per_group() const { return channels / groups; }
  int64_t group_size() const { return per_group() * pixels; }
  int64_t image_size() const { return channels * pixels; }
  bool empty() const { return samples == 0 || channels == 0; }
};

inline Problem problem_of(const Tensor& x, int64_t groups, double eps, int64_t act, bool round, bool channels_last) {
  STD_TORCH_CHECK(x.dim() >= 2, "group_norm: x must be at least 2-D");
  Problem p{x.size(0), x.size(1), groups, 1, eps, channels_last, act == 0 ? kNone : round ? kRoundedSilu : kSilu};
  for (int64_t d = 2; d < x.dim(); ++d) p.pixels *= x.size(d);
  STD_TORCH_CHECK(groups > 0 && p.channels % groups == 0, "group_norm: num_groups must divide the channels of x");
  STD_TORCH_CHECK(p.pixels > 0, "group_norm: x must have no empty spatial axis");
  STD_TORCH_CHECK(act == 0 || act == 1, "group_norm: act must be 0 or 1");
  return p;
}

// Which columns a task walks: those of `groups` groups from `first` on.
struct Columns {
  int64_t first, groups;   // groups
  int64_t per_group;       // channels
  int64_t repeat;          // columns per channel: the pixels of a contiguous image
  int64_t pixels_per_row;  // several in a row where there are few channels
  int64_t ld, rows, tail;  // distance of rows, whole rows, columns of the short last row

  int64_t group_columns() const { return per_group * repeat; }
  int64_t pixel_columns() const { return groups * group_columns(); }
  int64_t width() const { return pixels_per_row * pixel_columns(); }
  int64_t half() const { return (width() + 1) / 2; }
  int64_t channel() const { return first * per_group; }

  // Put channel values, value(group, channel) counted from the first of the columns, in their columns.
  template <class A, class F>
  void spread(A* __restrict to, const F& value) const {
    int64_t j = 0;
    for (int64_t g = 0; g < groups; ++g) {
      if (repeat == 1) {
        for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) to[j++] = value(g, c);
        continue;
      }
      for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) {
        const A v = value(g, c);
        for (int64_t k = 0; k < repeat; ++k) to[j++] = v;
      }
    }
    for (int64_t p = 1; p < pixels_per_row; ++p) std::copy_n(to, pixel_columns(), to + p * pixel_columns());
  }

  // f(group, column) over all columns.
  template <class F>
  void each(const F& f) const {
    int64_t j = 0;
    for (int64_t p = 0; p < pixels_per_row; ++p) {
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t d = 0; d < group_columns(); ++d, ++j) f(g, j);
      }
    }
  }
};

// How an image is cut for tasks.
struct Plan {
  bool columns;   // else runs
  bool pieces;    // cut in pieces, else one task per slab of groups
  int64_t slab;   // groups of a task
  int64_t slabs;  // tasks per image
  int64_t piece;  // pixels (columns) or elements (runs: of the group) of a piece
  int64_t count;  // pieces (columns: of the image, runs: of the group)
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Plan plan_of(const Problem& p) {
  Plan plan{};
  plan.columns = p.channels_last || (p.pixels < kPixels && p.group_size() <= kRun);
  const int64_t columns = p.per_group() * (p.channels_last ? 1 : p.pixels);  // of a group
  plan.slab = plan.columns ? std::min(p.groups, ceil_div(kWidth, columns)) : 1;
  const int64_t twice = std::min(p.groups, 2 * plan.slab);  // longer stretches of memory, if they are few
  if (plan.columns && twice * p.group_size() <= kSmall) plan.slab = twice;
  plan.slabs = ceil_div(p.groups, plan.slab);
  const int64_t share = plan.slab * p.group_size();
  plan.pieces = share > kSmall && !(plan.columns && !p.channels_last);
  if (plan.pieces) {
    const int64_t unit = plan.columns ? p.channels : 1, total = plan.columns ? p.pixels : p.group_size();
    plan.piece = std::max(ceil_div(kPiece, unit), ceil_div(total, kPieces));
    plan.piece = ceil_div(plan.piece, kRun) * kRun;  // whole rows and whole blocks
    if (plan.columns) plan.piece = ceil_div(std::max(ceil_div(kPiece, unit), ceil_div(total, kPieces)), kRows) * kRows;
    plan.count = ceil_div(total, plan.piece);
  }
  return plan;
}

// The columns of groups [first, first + groups) in pixels [from, to) of a channels_last image.
inline Columns columns_of(const Problem& p, int64_t first, int64_t groups, int64_t from, int64_t to) {
  Columns v{first, groups, p.per_group(), 1, 1, p.channels, to - from, 0};
  if (p.channels < kWidth && groups == p.groups) {
    v.pixels_per_row = kWidth / p.channels;
    v.ld = v.pixels_per_row * p.channels;
    v.rows = (to - from) / v.pixels_per_row;
    v.tail = (to - from) % v.pixels_per_row * p.channels;
  }
  return v;
}

// The columns of groups in a contiguous image of few pixels: a single row.
inline Columns columns_of(const Problem& p, int64_t first, int64_t groups) {
  return {first, groups, p.per_group(), p.pixels, 1, p.image_size(), 1, 0};
}

// What a task keeps beside the image, per column.
template <class A>
struct Work {
  std::vector<A> shift, arranged, scratch, s, t, mean, scale, offset, gamma, p, q, kept;
  std::vector<double> sum, squares, off;

  explicit Work(int64_t width) {
    width += width % 2;
    for (auto* values : {&shift, &arranged, &scratch, &s, &t, &mean, &scale, &offset}) values->resize(width);
    sum.resize(width);
    squares.resize(width);
    off.resize(width);
  }
  void for_backward(int64_t kept_size) {
    for (auto* values : {&gamma, &p, &q}) values->resize(shift.size());
    kept.resize(kept_size);
  }
};

inline int64_t widest(const Problem& p, const Plan& plan) {
  if (!plan.columns) return 0;
  if (!p.channels_last) return plan.slab * p.group_size();
  return std::max(plan.pieces ? p.channels : plan.slab * p.per_group(), kWidth);
}

// f(rows, offset of the first) over blocks of whole rows, then f of the short row: block(offset, rows, width).
template <class F>
void each_block(const Columns& v, const F& block) {
  for (int64_t r = 0; r < v.rows; r += kRows) block(r * v.ld, std::min(kRows, v.rows - r), v.width());
  if (v.tail) block(v.rows * v.ld, int64_t(1), v.tail);
}

// A parameter as values of the compute type, NaN in its usual form.
template <class A>
std::vector<A> parameter_of(const std::optional<Tensor>& t, int64_t channels, A otherwise) {
  if (!t) return std::vector<A>(channels, otherwise);
  std::vector<A> values = parameter<A>(t);
  for (A& v : values) v = v != v ? std::numeric_limits<A>::quiet_NaN() : v;
  return values;
}

// From this many deviations on, the rounding of a mean in float is felt.
template <class A>
bool mean_needs_rest(A mean, A rstd) {
  return std::is_same_v<A, float> && std::fabs(mean) * rstd > 64;
}

}  // namespace
}  // namespace pixfuse
