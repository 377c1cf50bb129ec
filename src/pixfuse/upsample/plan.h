// What a call needs to know before it starts: the shape of its rows, whether W's table is periodic, and how rows are
// cut.
#pragma once

#include <algorithm>

#include "cpu.h"
#include "taps.h"

namespace pixfuse {
namespace {

constexpr int64_t kPiece = 2048;     // values of an accumulated piece of a row, so that it stays in L1 with its sources
constexpr int64_t kGrown = 1 << 15;  // values that resample_growing keeps, so that they stay in L2
constexpr int64_t kInner = 256;      // channels of a piece

struct Shape {
  bool channels_last;
  int64_t planes, inner;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};  // D, H, W
};

inline Shape shape_of(const Tensor& x, std::span<const int64_t> out) {
  Shape s{is_channels_last(x), x.size(0), 1};
  (s.channels_last ? s.inner : s.planes) *= x.size(1);
  const int64_t axes = x.dim() - 2;
  for (int64_t d = 0; d < axes; ++d) {
    s.in[3 - axes + d] = x.size(2 + d);
    s.out[3 - axes + d] = out[d];
  }
  return s;
}

// A piece of an output row: outputs [o0, o1) from inputs [a, b).
struct Piece {
  int64_t o0, o1, a, b;
};

template <class A>
struct Plan {
  Shape shape;
  Taps axes[3];
  double gain;
  std::vector<Piece> pieces;
  std::vector<A> w;                  // the weights of W's table
  std::vector<int32_t> starts;       // and its starts
  int64_t even_lo = 0, even_hi = 0;  // the outputs that have all k_max taps
  // Where W's table is periodic, the weights and first taps of one period: outputs 2i and 2i + 1 from inputs near i
  // (kDouble) or output i from inputs near 2i (kHalve), for i from lo to hi.
  enum Phases { kNone, kDouble, kHalve } phases = kNone;
  int64_t taps = 1, lo = 0, hi = 0, offset[2] = {0, 0};
  A phase[8] = {};

  // Whether resample_growing is for it: the rows that it keeps should stay in L2.
  bool growing() const {
    return shape.in[0] == 1 && shape.out[0] == 1 && shape.out[1] > shape.in[1] && !axes[2].identity &&
           shape.inner == 1 && axes[1].k_max <= 16;
  }
  int64_t longest = 1;  // outputs of a piece

  Plan(const Shape& s, Taps d, Taps h, Taps x, double g)
      : shape(s), axes{std::move(d), std::move(h), std::move(x)}, gain(g) {
    const Taps& t = axes[2];
    w.assign(t.w.begin(), t.w.end());
    starts.assign(t.start.begin(), t.start.end());
    for (even_lo = 0; even_lo < t.out && t.stop[even_lo] - t.start[even_lo] != t.k_max;) ++even_lo;
    for (even_hi = even_lo; even_hi < t.out && t.stop[even_hi] - t.start[even_hi] == t.k_max;) ++even_hi;
    if (find_phases(2, 1))
      phases = kDouble;
    else if (find_phases(1, 2))
      phases = kHalve;
    const int64_t inner = std::min(s.inner, kInner);
    int64_t most = std::clamp(4 * t.k_max * inner, kPiece, 8 * kPiece);  // neighbours share few samples
    if (growing()) most = std::max(most, kGrown * t.in / std::max(t.in, t.out) / axes[1].k_max);
    for (int64_t o = 0; o < t.out;) {
      Piece p{o, o + 1, t.start[o], std::max(t.start[o], t.stop[o])};
      while (p.o1 < t.out && (t.stop[p.o1] - p.a) * inner <= most) p.b = std::max(p.b, t.stop[p.o1++]);
      pieces.push_back(p);
      longest = std::max(longest, p.o1 - p.o0);
      o = p.o1;
    }
  }

  // Whether W's table is periodic, `up` outputs for every `down` inputs, all but a few at the borders.
  bool find_phases(int64_t up, int64_t down) {
    const Taps& t = axes[2];
    const int64_t groups = t.out / up;
    if (t.out * down != t.in * up || groups < 8) return false;
    const int64_t middle = groups / 2, k = t.stop[middle * up] - t.start[middle * up];
    if (up == 2 ? k != 1 && k != 2 && k != 4 : k != 2 && k != 4 && k != 8) return false;
    auto same = [&](int64_t g) {
      for (int64_t p = 0; p < up; ++p) {
        const int64_t o = g * up + p, m = middle * up + p;
        if (t.stop[o] - t.start[o] != k || t.start[o] - g * down != t.start[m] - middle * down) return false;
        if (!std::equal(&t.w[o * t.k_max], &t.w[o * t.k_max] + k, &t.w[m * t.k_max])) return false;
      }
      return true;
    };
    if (!same(middle)) return false;
    for (lo = middle; lo > 0 && same(lo - 1);) --lo;
    for (hi = middle + 1; hi < groups && same(hi);) ++hi;
    if (hi - lo < groups - 8) return false;
    if (up == 2 && t.replicates) lo = 0, hi = groups;  // the borders are like the rest, on a row with margins
    taps = k;
    for (int64_t p = 0; p < up; ++p) {
      offset[p] = t.start[middle * up + p] - middle * down;
      for (int64_t j = 0; j < k; ++j) phase[p * k + j] = A(t.w[(middle * up + p) * t.k_max + j]);
    }
    return true;
  }
};

}  // namespace
}  // namespace pixfuse
