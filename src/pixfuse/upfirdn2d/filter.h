// The taps of upfirdn2d's filter: as a column times a row where they are that, and by pairs of phases where they are
// not.
#pragma once

#include <cmath>
#include <optional>

#include "tiles.h"

namespace pixfuse {
namespace {

// The taps in the order of positions (turned around for a convolution).
template <class A>
struct Filter {
  int64_t w = 1, h = 1;
  bool separable = true;
  std::vector<A> column, row;  // separable: taps down a column and along a row
  std::vector<A> full;         // [h, w] otherwise

  Filter(const std::optional<Tensor>& f, bool flip, double gain) {
    std::vector<A> taps{A(1)};
    bool is_vector = true;
    if (f) {
      is_vector = f->dim() == 1;
      w = f->size(f->dim() - 1);
      h = f->size(0);  // w for a vector, which serves both axes
      taps = is_vector ? read(*f, 1, w, 0, f->stride(0)) : read(*f, h, w, f->stride(0), f->stride(1));
      if (!flip) std::reverse(taps.begin(), taps.end());
    }
    if (is_vector) {
      column = row = taps;
    } else if (!factor(taps)) {
      separable = false;
      full = taps;
    }
    for (A& t : separable ? row : full) t = A(double(t) * gain);
  }

 private:
  static std::vector<A> read(const Tensor& f, int64_t h, int64_t w, int64_t stride_h, int64_t stride_w) {
    std::vector<A> taps(h * w);
    auto fill = [&](auto* from) {
      for (int64_t a = 0; a < h; ++a) {
        for (int64_t b = 0; b < w; ++b) taps[a * w + b] = A(from[a * stride_h + b * stride_w]);
      }
    };
    if (f.scalar_type() == ScalarType::Double)
      fill(data<double>(f));
    else
      fill(data<float>(f));
    return taps;
  }

  // Write the taps as column times row, if they are exactly that. Taps that are small whole numbers times some unit
  // factor at the smallest one.
  bool factor(const std::vector<A>& taps) {
    if (h == 1 || w == 1) {
      column = h == 1 ? std::vector<A>{A(1)} : taps;
      row = h == 1 ? taps : std::vector<A>{A(1)};
      return true;
    }
    int64_t unit = -1;
    for (int64_t i = 0; i < h * w; ++i) {
      if (!std::isfinite(taps[i])) return false;
      if (taps[i] != 0 && (unit < 0 || std::fabs(taps[i]) < std::fabs(taps[unit]))) unit = i;
    }
    if (unit < 0) return false;
    std::vector<A> down(h), along(w);
    A size = 0;
    for (int64_t a = 0; a < h; ++a) size += std::fabs(down[a] = taps[a * w + unit % w] / taps[unit]);
    const int exponent = std::ilogb(size) + 1;  // keeps the sums down a column below the largest value of x
    for (int64_t a = 0; a < h; ++a) down[a] = std::ldexp(down[a], -exponent);
    for (int64_t b = 0; b < w; ++b) along[b] = std::ldexp(taps[unit / w * w + b], exponent);
    for (int64_t a = 0; a < h; ++a) {
      for (int64_t b = 0; b < w; ++b) {
        const A tap = taps[a * w + b];
        if (down[a] * along[b] != tap || std::fma(down[a], along[b], -tap) != 0) return false;
      }
    }
    column = std::move(down);
    row = std::move(along);
    return true;
  }
};

// The taps of every pair of phases: for phase p of a row and q of a column, [rows, taps along the row].
template <class A>
struct FullWeights {
  int64_t phases;
  std::vector<int64_t> begin;
  std::vector<A> taps;

  FullWeights(const Axis& v, const Axis& h, const std::vector<A>& full) : phases(h.phases) {
    for (int64_t q = 0; q < v.phases; ++q) {
      for (int64_t p = 0; p < h.phases; ++p) {
        begin.push_back(int64_t(taps.size()));
        for (int64_t s = 0; s < v.count[q]; ++s) {
          for (int64_t t = 0; t < h.count[p]; ++t) {
            taps.push_back(full[(v.offset[q] + v.up * s) * h.k + h.offset[p] + h.up * t]);
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace pixfuse
