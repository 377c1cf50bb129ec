// Which input samples make an output sample, and with what weights: taps.py in C++.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace pixfuse {

enum Mode : int64_t { kNearest, kNearestExact, kLinear, kCubic, kArea, kLanczos };

// The map along one axis: output o is the sum over k < stop[o] - start[o] of w[o * k_max + k] * x[start[o] + k].
struct Taps {
  int64_t in = 1, out = 1, k_max = 1;
  bool identity = false;
  bool replicates = false;  // what an output would take from beyond the border it takes from the outermost sample
  std::vector<int64_t> start, stop;
  std::vector<double> w;

  // Size the table by its starts and stops, and fill it: weight(o, j) belongs to input j of output o.
  template <class F>
  void fill(const F& weight, bool normalise = false) {
    k_max = 1;
    for (int64_t o = 0; o < out; ++o) k_max = std::max(k_max, stop[o] - start[o]);
    w.assign(out * k_max, 0.0);
    for (int64_t o = 0; o < out; ++o) {
      double* row = w.data() + o * k_max;
      double sum = 0;
      const int64_t count = stop[o] - start[o];
      for (int64_t k = 0; k < count; ++k) sum += row[k] = weight(o, start[o] + k);
      for (int64_t k = 0; normalise && k < count; ++k) row[k] /= sum;
    }
  }

  // The map from the outputs back to the inputs, with the same weights.
  Taps transposed() const {
    Taps t{out, in, 1, identity, false, std::vector<int64_t>(in), std::vector<int64_t>(in), {}};
    for (int64_t i = 0; i < in; ++i) {
      t.start[i] = std::upper_bound(stop.begin(), stop.end(), i) - stop.begin();
      t.stop[i] = std::max<int64_t>(t.start[i], std::upper_bound(start.begin(), start.end(), i) - start.begin());
    }
    t.fill([&](int64_t i, int64_t o) { return w[o * k_max + i - start[o]]; });
    return t;
  }
};

inline double cubic(double d, double a) {
  if (d <= 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
  return d < 2 ? ((d - 5) * d + 8) * a * d - 4 * a : 0.0;
}

inline double sinc(double d) {
  constexpr double kPi = 3.14159265358979323846;
  return d == 0 ? 1.0 : std::sin(kPi * d) / (kPi * d);
}

inline Taps identity_taps(int64_t size) {
  Taps t{size, size, 1, true, false, std::vector<int64_t>(size), std::vector<int64_t>(size), {}};
  for (int64_t o = 0; o < size; ++o) t.stop[o] = (t.start[o] = o) + 1;
  t.fill([](int64_t, int64_t) { return 1.0; });
  return t;
}

// Every sample `times` times.
inline Taps repeat_taps(int64_t size, int64_t times) {
  if (times == 1) return identity_taps(size);
  Taps t{size, size * times, 1, false, false, std::vector<int64_t>(size * times), std::vector<int64_t>(size * times),
         {}};
  for (int64_t o = 0; o < t.out; ++o) t.stop[o] = (t.start[o] = o / times) + 1;
  t.fill([](int64_t, int64_t) { return 1.0; });
  return t;
}

// See taps.py for the rules.
inline Taps interpolation_taps(int64_t in, int64_t out, double scale, int64_t mode, bool align_corners,
                               bool antialias) {
  if (in == out) return identity_taps(in);
  Taps t{in, out, 1, false, false, std::vector<int64_t>(out), std::vector<int64_t>(out), {}};
  if (mode == kArea) {
    for (int64_t o = 0; o < out; ++o) {
      t.start[o] = o * in / out;
      t.stop[o] = ((o + 1) * in + out - 1) / out;
    }
    t.fill([](int64_t, int64_t) { return 1.0; }, true);
    return t;
  }
  double step = scale > 0 ? 1 / scale : double(in) / double(out);
  if (align_corners) step = out > 1 ? double(in - 1) / double(out - 1) : 0.0;
  if (mode == kNearest || mode == kNearestExact) {
    const double offset = mode == kNearestExact ? 0.5 : 0.0, snap = 1 + 0x1p-50;
    for (int64_t o = 0; o < out; ++o) {
      t.start[o] = std::min(int64_t(std::floor((double(o) + offset) * step * snap)), in - 1);
      t.stop[o] = t.start[o] + 1;
    }
    t.fill([](int64_t, int64_t) { return 1.0; });
    return t;
  }
  if (antialias) {
    const double stretch = std::max(step, 1.0), reach = (mode == kLinear ? 1 : mode == kCubic ? 2 : 3) * stretch;
    for (int64_t o = 0; o < out; ++o) {
      const double center = step * (double(o) + 0.5);
      t.start[o] = std::max<int64_t>(int64_t(center - reach + 0.5), 0);
      t.stop[o] = std::min(int64_t(center + reach + 0.5), in);
    }
    t.fill(
        [&](int64_t o, int64_t j) {
          const double d = std::fabs((double(j) - step * (double(o) + 0.5) + 0.5) / stretch);
          if (mode == kLinear) return std::max(1 - d, 0.0);
          if (mode == kCubic) return cubic(d, -0.5);
          return d < 3 ? sinc(d) * sinc(d / 3) : 0.0;
        },
        true);
    return t;
  }
  t.replicates = !align_corners;
  std::vector<int64_t> base(out);
  std::vector<double> part(out);
  for (int64_t o = 0; o < out; ++o) {
    double source = align_corners ? step * double(o) : step * (double(o) + 0.5) - 0.5;
    const bool before = source < 0;
    if (mode == kLinear) source = std::max(source, 0.0);
    const double floor = std::min(std::floor(source), double(in - 1));
    base[o] = int64_t(floor) - (mode == kLinear ? 0 : 1);
    part[o] = std::clamp(source - floor, 0.0, 1.0);
    t.start[o] = std::max<int64_t>(base[o], 0);
    t.stop[o] = std::min(base[o] + (mode == kLinear ? 1 : 3), in - 1) + 1;
    if (mode == kLinear && before) t.stop[o] = 1;  // the second sample has no weight: not even its NaN may pass
  }
  const int taps = mode == kLinear ? 2 : 4;
  t.fill([&](int64_t o, int64_t j) {
    double sum = 0;
    for (int k = 0; k < taps; ++k) {  // the outermost sample stands for those beyond the border
      if (std::clamp<int64_t>(base[o] + k, 0, in - 1) != j) continue;
      if (mode == kLinear)
        sum += k ? part[o] : 1 - part[o];
      else
        sum += cubic(std::fabs(part[o] + 1 - k), -0.75);
    }
    return sum;
  });
  return t;
}

}  // namespace pixfuse
