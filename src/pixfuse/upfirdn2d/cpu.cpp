// upfirdn2d on the CPU, and the gradient of its filter.
//
// One item is one output row of one image (a channel's plane if contiguous, all channels if channels_last), or a tile
// of it. Memory is seen as rows of pixels of `chunk` values, 1 or C, so both layouts run the same loops over
// contiguous values. Along each axis the outputs fall into phases that see the same taps and whose inputs advance by
// `step`: no zero that was inserted is ever touched, and zeros beyond the image exist only in the margins of a row.
//
// A separable filter (or a 2-D one that is exactly a product) first sums whole input rows into one row of the compute
// type, which stays in L1, and then filters that row; any other filter keeps the few rows it looks at, converted, in
// a ring. Every output is computed alike whatever thread, batch or item it is in.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu.h"

namespace pixfuse {
namespace {

// --- row loops -------------------------------------------------------------------------------------------------

// out[m, i] = base[m, i] + sum over K of w[k] * src[k][m, i], for `count` chunks of n values.
template <class Src, class Dst, class A, int K, bool kAdd>
PIXFUSE_CLONES void weigh_rows(const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step,
                               Dst* out, int64_t out_step, int64_t count, int64_t n) {
  const Src* s[K];
  A v[K];
  for (int k = 0; k < K; ++k) s[k] = src[k], v[k] = w[k];
  for (int64_t m = 0; m < count; ++m) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      A sum = v[0] * load(s[0][i]);
      for (int k = 1; k < K; ++k) sum += v[k] * load(s[k][i]);
      if constexpr (kAdd) sum += base[i];
      out[i] = store<Dst>(sum);
    }
    for (int k = 0; k < K; ++k) s[k] += src_step;
    out += out_step;
    if constexpr (kAdd) base += base_step;
  }
}

// out[2 * m + p] = sum over K of w[p][k] * src[p][m + k]: both phases of up 2, interleaved.
template <class T, class A, int K>
PIXFUSE_CLONES void up2_row(const A* even, const A* odd, const A* we, const A* wo, T* out, int64_t count) {
  A v[K], u[K];
  for (int k = 0; k < K; ++k) v[k] = we[k], u[k] = wo[k];
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    A a = v[0] * even[m], b = u[0] * odd[m];
    for (int k = 1; k < K; ++k) a += v[k] * even[m + k], b += u[k] * odd[m + k];
    out[2 * m] = store<T>(a);
    out[2 * m + 1] = store<T>(b);
  }
}

template <class T, class A>
PIXFUSE_CLONES void interleave2_row(const A* even, const A* odd, T* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    out[2 * m] = store<T>(even[m]);
    out[2 * m + 1] = store<T>(odd[m]);
  }
}

template <class T, class A>
PIXFUSE_CLONES void split2_row(const T* in, A* even, A* odd, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    even[m] = load(in[2 * m]);
    odd[m] = load(in[2 * m + 1]);
  }
}

// out[m, i] = in[m, i], converted.
template <class Src, class Dst>
PIXFUSE_CLONES void copy_chunks(const Src* in, int64_t in_step, Dst* out, int64_t out_step, int64_t count,
                                int64_t n) {
  if (n == 1) {
#pragma GCC ivdep
    for (int64_t m = 0; m < count; ++m) out[m * out_step] = store<Dst>(load(in[m * in_step]));
    return;
  }
  for (int64_t m = 0; m < count; ++m) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[m * out_step + i] = store<Dst>(load(in[m * in_step + i]));
  }
}

template <class A>
PIXFUSE_CLONES double dot_row(const A* a, const A* b, int64_t n) {
  A lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (; i < n; ++i) lanes[0] += a[i] * b[i];
  double sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  return sum;
}

template <class Src, class Dst, class A, bool kAdd>
void weigh_some(int k, const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step, Dst* out,
                int64_t out_step, int64_t count, int64_t n) {
  auto call = [&](auto rows) { rows(src, src_step, w, base, base_step, out, out_step, count, n); };
  switch (k) {
    case 1: return call(weigh_rows<Src, Dst, A, 1, kAdd>);
    case 2: return call(weigh_rows<Src, Dst, A, 2, kAdd>);
    case 3: return call(weigh_rows<Src, Dst, A, 3, kAdd>);
    default: return call(weigh_rows<Src, Dst, A, 4, kAdd>);
  }
}

// out[m, i] = sum over `taps` of w[t] * src[t][m, i], at least one; `partial` is room for count * n sums.
template <class Src, class Dst, class A>
void weigh(const Src* const* src, int64_t src_step, const A* w, int64_t taps, A* partial, Dst* out, int64_t out_step,
           int64_t count, int64_t n) {
  constexpr int64_t kGroup = 4;
  if (taps <= kGroup) {
    return weigh_some<Src, Dst, A, false>(int(taps), src, src_step, w, nullptr, 0, out, out_step, count, n);
  }
  weigh_some<Src, A, A, false>(kGroup, src, src_step, w, nullptr, 0, partial, n, count, n);
  int64_t t = kGroup;
  for (; t + kGroup < taps; t += kGroup) {
    weigh_some<Src, A, A, true>(kGroup, src + t, src_step, w + t, partial, n, partial, n, count, n);
  }
  weigh_some<Src, Dst, A, true>(int(taps - t), src + t, src_step, w + t, partial, n, out, out_step, count, n);
}

// --- the geometry of one axis ----------------------------------------------------------------------------------

// Output p + phases * m sees inputs first[p] + step * m + t, for t < count[p], through taps offset[p] + up * t
// (numbered as positions in the window, that is, as in a correlation).
struct Axis {
  int64_t in, out, k, up, down, pad;
  int64_t phases, step;
  std::vector<int64_t> offset, first, count;

  Axis(int64_t in, int64_t out, int64_t k, int64_t up, int64_t down, int64_t pad)
      : in(in), out(out), k(k), up(up), down(down), pad(pad) {
    const int64_t common = std::gcd(up, down);
    phases = up / common;
    step = down / common;
    offset.resize(phases);
    first.resize(phases);
    count.resize(phases);
    for (int64_t p = 0; p < phases; ++p) {
      const int64_t window = p * down - pad;  // in upsampled positions
      first[p] = ceil_div(window, up);
      offset[p] = first[p] * up - window;
      count[p] = offset[p] < k ? (k - offset[p] + up - 1) / up : 0;
    }
  }

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0)); }
  static int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

  // The inputs that outputs begin .. end - 1 see: from the first to one beyond the last (maybe none).
  int64_t low(int64_t begin) const { return ceil_div(begin * down - pad, up); }
  int64_t high(int64_t end) const { return std::max(low(end - 1), floor_div((end - 1) * down - pad + k - 1, up) + 1); }

  int64_t most_taps() const { return *std::max_element(count.begin(), count.end()); }
};

// The taps of every phase, one after another, from the taps in the order of positions.
template <class A>
struct Weights {
  std::vector<int64_t> begin;
  std::vector<A> taps;

  Weights(const Axis& axis, const A* window) {
    for (int64_t p = 0; p < axis.phases; ++p) {
      begin.push_back(int64_t(taps.size()));
      for (int64_t t = 0; t < axis.count[p]; ++t) taps.push_back(window[axis.offset[p] + axis.up * t]);
    }
  }
};

// How rows are cut and stored: a tile is `width` outputs of a row, and its inputs lie in `step` rows of `pitch` pixels,
// input s + step * i of the tile in row s at i.
struct Tiles {
  int64_t width, tiles, inputs, pitch;

  Tiles(const Axis& axis, int64_t chunk) {
    constexpr int64_t kValues = 1 << 14;
    const int64_t ratio = (axis.step + axis.phases - 1) / axis.phases;
    int64_t pixels = std::max<int64_t>(8, kValues / (chunk * ratio));
    width = std::min((pixels + axis.phases - 1) / axis.phases * axis.phases, axis.out);
    tiles = (axis.out + width - 1) / width;
    inputs = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      inputs = std::max(inputs, axis.high(end(tile, axis)) - axis.low(begin(tile)));
    }
    inputs = std::max<int64_t>(inputs, 1);
    pitch = (inputs + axis.step - 1) / axis.step + 1;
  }
  int64_t begin(int64_t tile) const { return tile * width; }
  int64_t end(int64_t tile, const Axis& axis) const { return std::min(axis.out, (tile + 1) * width); }
};

// --- the filter along a row --------------------------------------------------------------------------------------

// Writes the outputs of a tile from `rows` stored input rows and the taps between each of them and each phase.
template <class T>
struct Emitter {
  using A = acc_t<T>;
  const Axis& axis;
  const Tiles& tiles;
  int64_t chunk;
  std::vector<A> partial;
  std::vector<A> phase_rows;
  std::vector<const A*> sources;

  Emitter(const Axis& axis, const Tiles& tiles, int64_t chunk, int64_t rows)
      : axis(axis),
        tiles(tiles),
        chunk(chunk),
        partial((tiles.width / axis.phases + 1) * chunk),
        phase_rows(axis.phases > 1 ? (tiles.width / axis.phases + 1) * axis.phases * chunk : 0),
        sources(rows * std::max<int64_t>(1, axis.most_taps())) {}

  // weights(p) gives the taps of phase p: those of the first row, then those of the second, ...
  template <class W>
  void emit(const A* const* rows, int64_t count, int64_t tile, const W& weights, T* y) {
    const int64_t begin = tiles.begin(tile), n = tiles.end(tile, axis) - begin, low = axis.low(begin);
    const int64_t m0 = begin / axis.phases;
    auto outputs = [&](int64_t p) { return (n - p + axis.phases - 1) / axis.phases; };
    auto find_sources = [&](int64_t p) {
      const int64_t start = axis.first[p] + axis.step * m0 - low;
      int64_t k = 0;
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t t = 0; t < axis.count[p]; ++t) {
          const int64_t at = start + t;
          sources[k++] = rows[r] + (at % axis.step * tiles.pitch + at / axis.step) * chunk;
        }
      }
      return k;
    };
    if (axis.phases == 1) {
      const int64_t taps = find_sources(0);
      if (taps) weigh(sources.data(), 0, weights(0), taps, partial.data(), y, 0, 1, n * chunk);
      else std::fill_n(y, n * chunk, T{});
      return;
    }
    if (axis.phases == 2 && chunk == 1 && count == 1 && axis.step == 1 && axis.count[0] == axis.count[1] &&
        axis.count[0] <= 4 && axis.count[0] > 0) {
      find_sources(0);
      const A* even = sources[0];
      find_sources(1);
      const A* odd = sources[0];
      const int64_t pairs = n / 2;
      auto run = [&](auto row) { row(even, odd, weights(0), weights(1), y, pairs); };
      switch (axis.count[0]) {
        case 1: run(up2_row<T, A, 1>); break;
        case 2: run(up2_row<T, A, 2>); break;
        case 3: run(up2_row<T, A, 3>); break;
        default: run(up2_row<T, A, 4>);
      }
      if (n % 2) {
        const int64_t taps = find_sources(0);
        for (int64_t t = 0; t < taps; ++t) sources[t] += pairs;
        weigh(sources.data(), 0, weights(0), taps, partial.data(), y + n - 1, 0, 1, 1);
      }
      return;
    }
    const int64_t room = (tiles.width / axis.phases + 1) * chunk;
    const bool direct = chunk >= 8;  // long chunks are written where they belong, short ones by way of phase rows
    for (int64_t p = 0; p < axis.phases; ++p) {
      const int64_t taps = find_sources(p), m = outputs(p);
      T* out = y + p * chunk;
      const int64_t out_step = axis.phases * chunk;
      if (taps == 0) {
        if (direct) {
          for (int64_t i = 0; i < m; ++i) std::fill_n(out + i * out_step, chunk, T{});
        } else {
          std::fill_n(phase_rows.data() + p * room, m * chunk, A(0));
        }
      } else if (direct) {
        weigh(sources.data(), chunk, weights(p), taps, partial.data(), out, out_step, m, chunk);
      } else {
        weigh(sources.data(), 0, weights(p), taps, partial.data(), phase_rows.data() + p * room, 0, 1, m * chunk);
      }
    }
    if (direct) return;
    if (axis.phases == 2 && chunk == 1) {
      interleave2_row(phase_rows.data(), phase_rows.data() + room, y, n / 2);
      if (n % 2) y[n - 1] = store<T>(phase_rows[n / 2]);
      return;
    }
    for (int64_t p = 0; p < axis.phases; ++p) {
      copy_chunks(phase_rows.data() + p * room, chunk, y + p * chunk, axis.phases * chunk, outputs(p), chunk);
    }
  }
};

// Store `count` pixels, of which the first is input `at` of the tile, as Tiles says.
template <class Src, class A>
void store_inputs(const Src* in, int64_t at, int64_t count, const Axis& axis, const Tiles& tiles, int64_t chunk,
                  A* row) {
  if (axis.step == 1) return copy_chunks(in, 0, row + at * chunk, 0, 1, count * chunk);
  if (axis.step == 2 && chunk == 1) {
    A *even = row + (at + 1) / 2, *odd = row + tiles.pitch + at / 2;
    int64_t i = 0;
    if (at % 2 && count) *odd++ = load(in[i++]);
    const int64_t pairs = (count - i) / 2;
    split2_row(in + i, even, odd, pairs);
    if (i + 2 * pairs < count) even[pairs] = load(in[count - 1]);
    return;
  }
  for (int64_t s = 0; s < std::min(axis.step, count); ++s) {
    const int64_t to = at + s;
    copy_chunks(in + s * chunk, axis.step * chunk,
                row + (to % axis.step * tiles.pitch + to / axis.step) * chunk, chunk,
                (count - s + axis.step - 1) / axis.step, chunk);
  }
}

// --- the operator ----------------------------------------------------------------------------------------------

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
      h = f->size(0);
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
    if (f.scalar_type() == ScalarType::Double) fill(data<double>(f));
    else fill(data<float>(f));
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

template <class T>
struct Image {
  const T* x;
  int64_t height, width, chunk;
  const T* at(int64_t image, int64_t row, int64_t column) const {
    return x + ((image * height + row) * width + column) * chunk;
  }
};

// The part of an item that lies inside the image: rows first .. first + count - 1 of the window's, columns begin .. end.
struct Inside {
  int64_t skip, count, top, begin, end;

  Inside(const Axis& v, const Axis& h, const Tiles& tiles, int64_t i, int64_t tile) {
    const int64_t q = i % v.phases, first = v.first[q] + v.step * (i / v.phases);
    skip = std::clamp<int64_t>(-first, 0, v.count[q]);
    count = std::clamp<int64_t>(v.in - first, skip, v.count[q]) - skip;
    top = first + skip;
    begin = std::max<int64_t>(0, h.low(tiles.begin(tile)));
    end = std::min(h.in, h.high(tiles.end(tile, h)));
  }
  bool empty() const { return count <= 0 || begin >= end; }
};

template <class T>
void separable_rows(const Image<T>& x, T* y, const Axis& v, const Axis& h, const Tiles& tiles,
                    const Filter<acc_t<T>>& filter, int64_t images) {
  using A = acc_t<T>;
  const Weights<A> down(v, filter.column.data()), along(h, filter.row.data());
  const int64_t chunk = x.chunk;
  parallel(images * tiles.tiles * v.out, tiles.width * chunk, [&](int64_t from, int64_t to) {
    Emitter<T> emitter(h, tiles, chunk, 1);
    std::vector<A> sum(tiles.inputs * chunk), partial(v.most_taps() > 4 ? tiles.inputs * chunk : 0);
    std::vector<A> stored(h.step > 1 ? h.step * tiles.pitch * chunk : 0);
    std::vector<const T*> rows(std::max<int64_t>(1, v.most_taps()));
    int64_t current = -1;
    for (int64_t item = from; item < to; ++item) {
      const int64_t i = item % v.out, tile = item / v.out % tiles.tiles, image = item / v.out / tiles.tiles;
      const int64_t low = h.low(tiles.begin(tile)), n = tiles.end(tile, h) - tiles.begin(tile);
      T* out = y + ((image * v.out + i) * h.out + tiles.begin(tile)) * chunk;
      const Inside part(v, h, tiles, i, tile);
      if (part.empty()) {
        std::fill_n(out, n * chunk, T{});
        continue;
      }
      if (current != tile) {  // the margins stay zero until another tile has others
        std::fill(sum.begin(), sum.end(), A(0));
        std::fill(stored.begin(), stored.end(), A(0));
        current = tile;
      }
      for (int64_t t = 0; t < part.count; ++t) rows[t] = x.at(image, part.top + t, part.begin);
      A* inside = sum.data() + (part.begin - low) * chunk;
      const int64_t width = part.end - part.begin;
      weigh(rows.data(), 0, down.taps.data() + down.begin[i % v.phases] + part.skip, part.count, partial.data(),
            inside, 0, 1, width * chunk);
      const A* row = sum.data();
      if (h.step > 1) {
        store_inputs(inside, part.begin - low, width, h, tiles, chunk, stored.data());
        row = stored.data();
      }
      emitter.emit(&row, 1, tile, [&](int64_t p) { return along.taps.data() + along.begin[p]; }, out);
    }
  });
}

template <class T>
void full_rows(const Image<T>& x, T* y, const Axis& v, const Axis& h, const Tiles& tiles,
               const Filter<acc_t<T>>& filter, int64_t images) {
  using A = acc_t<T>;
  const FullWeights<A> weights(v, h, filter.full);
  const int64_t chunk = x.chunk, ring = std::max<int64_t>(1, v.most_taps());
  const int64_t slot_size = h.step * tiles.pitch * chunk;
  parallel(images * tiles.tiles * v.out, tiles.width * chunk * ring, [&](int64_t from, int64_t to) {
    Emitter<T> emitter(h, tiles, chunk, ring);
    std::vector<A> slots(ring * slot_size);
    std::vector<int64_t> held(ring, -1);
    std::vector<const A*> rows(ring);
    int64_t current = -1;
    for (int64_t item = from; item < to; ++item) {
      const int64_t i = item % v.out, tile = item / v.out % tiles.tiles, image = item / v.out / tiles.tiles;
      const int64_t low = h.low(tiles.begin(tile)), n = tiles.end(tile, h) - tiles.begin(tile);
      T* out = y + ((image * v.out + i) * h.out + tiles.begin(tile)) * chunk;
      const Inside part(v, h, tiles, i, tile);
      if (part.empty()) {
        std::fill_n(out, n * chunk, T{});
        continue;
      }
      if (current != item / v.out) {
        std::fill(slots.begin(), slots.end(), A(0));
        std::fill(held.begin(), held.end(), -1);
        current = item / v.out;
      }
      for (int64_t t = 0; t < part.count; ++t) {
        const int64_t r = part.top + t, at = r % ring;
        rows[t] = slots.data() + at * slot_size;
        if (held[at] != r) {
          store_inputs(x.at(image, r, part.begin), part.begin - low, part.end - part.begin, h, tiles, chunk,
                       slots.data() + at * slot_size);
          held[at] = r;
        }
      }
      const int64_t q = i % v.phases;
      auto taps = [&](int64_t p) {
        return weights.taps.data() + weights.begin[q * weights.phases + p] + part.skip * h.count[p];
      };
      emitter.emit(rows.data(), part.count, tile, taps, out);
    }
  });
}

void check_filter(const std::optional<Tensor>& f, ScalarType dtype) {
  if (!f) return;
  STD_TORCH_CHECK((f->dim() == 1 || f->dim() == 2) && f->numel() > 0, "upfirdn2d: f must have shape [kh, kw] or [k]");
  STD_TORCH_CHECK(f->scalar_type() == ScalarType::Float ||
                      (f->scalar_type() == ScalarType::Double && dtype == ScalarType::Double),
                  "upfirdn2d: f must be float32 (or float64 for float64 x)");
  STD_TORCH_CHECK(f->is_cpu(), "upfirdn2d: f must be on the device of x");
}

Tensor upfirdn2d_cpu(const Tensor& x_any, const std::optional<Tensor>& f, int64_t up_x, int64_t up_y, int64_t down_x,
                     int64_t down_y, int64_t pad_x, int64_t pad_y, int64_t out_w, int64_t out_h, bool flip,
                     double gain) {
  STD_TORCH_CHECK(x_any.dim() == 4, "upfirdn2d: x must be 4-D");
  STD_TORCH_CHECK(up_x > 0 && up_y > 0 && down_x > 0 && down_y > 0, "upfirdn2d: up and down must be at least 1");
  STD_TORCH_CHECK(out_w > 0 && out_h > 0, "upfirdn2d: the result must not be empty");
  check_filter(f, x_any.scalar_type());
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last);
  const int64_t batch = x.size(0), channels = x.size(1), height = x.size(2), width = x.size(3);
  Tensor y = empty_dense(x, {batch, channels, out_h, out_w}, channels_last);
  if (y.numel() == 0) return y;
  const int64_t chunk = channels_last ? channels : 1, images = channels_last ? batch : batch * channels;
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const Filter<acc_t<T>> filter(f, flip, gain);
    const int64_t fh = f && f->dim() == 1 ? filter.w : filter.h;
    const Axis v(height, out_h, fh, up_y, down_y, pad_y), h(width, out_w, filter.w, up_x, down_x, pad_x);
    const Tiles tiles(h, chunk);
    const Image<T> image{data<T>(x), height, width, chunk};
    (filter.separable ? separable_rows<T> : full_rows<T>)(image, mutable_data<T>(y), v, h, tiles, filter, images);
  });
  return y;
}

// --- the gradient of the filter --------------------------------------------------------------------------------

Tensor upfirdn2d_filter_backward_cpu(const Tensor& x_any, const Tensor& dy_any, int64_t fw, int64_t fh, int64_t up_x,
                                     int64_t up_y, int64_t down_x, int64_t down_y, int64_t pad_x, int64_t pad_y,
                                     bool flip, double gain) {
  STD_TORCH_CHECK(x_any.dim() == 4 && dy_any.dim() == 4 && x_any.scalar_type() == dy_any.scalar_type() &&
                      x_any.size(0) == dy_any.size(0) && x_any.size(1) == dy_any.size(1),
                  "upfirdn2d_filter_backward: dy must be 4-D with the dtype, batch and channels of x");
  STD_TORCH_CHECK(fw > 0 && fh > 0 && up_x > 0 && up_y > 0 && down_x > 0 && down_y > 0,
                  "upfirdn2d_filter_backward: sizes and factors must be at least 1");
  const bool channels_last = is_channels_last(x_any);
  const Tensor x = to_dense(x_any, channels_last), dy = to_dense(dy_any, channels_last);
  const int64_t batch = x.size(0), channels = x.size(1);
  const int64_t chunk = channels_last ? channels : 1, images = channels_last ? batch : batch * channels;
  Tensor df = empty_dense(x, {fh, fw}, false, acc_dtype(x.scalar_type()));
  const Axis v(x.size(2), dy.size(2), fh, up_y, down_y, pad_y), h(x.size(3), dy.size(3), fw, up_x, down_x, pad_x);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const Image<T> image{data<T>(x), v.in, h.in, chunk};
    const T* dys = data<T>(dy);
    A* result = mutable_data<A>(df);
    const int64_t rows = dy.numel() ? images * v.out : 0;
    // Fixed blocks of rows, whatever the threads: each sums its own part of the gradient.
    const int64_t block = std::max<int64_t>(8, (rows + 63) / 64), blocks = (rows + block - 1) / block;
    std::vector<double> sums(blocks * fh * fw);
    if (blocks) {
      const Tiles tiles(h, chunk);
      parallel(blocks, block * h.out * chunk, [&](int64_t from, int64_t to) {
        std::vector<A> stored(h.step * tiles.pitch * chunk);
        const int64_t room = (tiles.width / h.phases + 1) * chunk;
        std::vector<A> phase_rows(h.phases * room);
        for (int64_t b = from; b < to; ++b) {
          double* sum = sums.data() + b * fh * fw;
          for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
            const int64_t begin = tiles.begin(tile), n = tiles.end(tile, h) - begin, low = h.low(begin);
            std::fill(stored.begin(), stored.end(), A(0));
            for (int64_t row = b * block; row < std::min((b + 1) * block, rows); ++row) {
              const int64_t i = row % v.out, q = i % v.phases;
              const Inside part(v, h, tiles, i, tile);
              if (part.empty()) continue;
              const T* from_dy = dys + (row * h.out + begin) * chunk;
              for (int64_t p = 0; p < h.phases; ++p) {
                copy_chunks(from_dy + p * chunk, h.phases * chunk, phase_rows.data() + p * room, chunk,
                            (n - p + h.phases - 1) / h.phases, chunk);
              }
              for (int64_t s = 0; s < part.count; ++s) {
                store_inputs(image.at(row / v.out, part.top + s, part.begin), part.begin - low,
                             part.end - part.begin, h, tiles, chunk, stored.data());
                double* out = sum + (v.offset[q] + v.up * (part.skip + s)) * fw;
                for (int64_t p = 0; p < h.phases; ++p) {
                  const int64_t start = h.first[p] + h.step * (begin / h.phases) - low;
                  for (int64_t t = 0; t < h.count[p]; ++t) {
                    const int64_t at = start + t;
                    out[h.offset[p] + h.up * t] +=
                        dot_row(phase_rows.data() + p * room,
                                stored.data() + (at % h.step * tiles.pitch + at / h.step) * chunk,
                                (n - p + h.phases - 1) / h.phases * chunk);
                  }
                }
              }
            }
          }
        }
      });
    }
    for (int64_t k = 0; k < fh * fw; ++k) {
      double sum = 0;
      for (int64_t b = 0; b < blocks; ++b) sum += sums[b * fh * fw + k];
      result[flip ? k : fh * fw - 1 - k] = A(sum * gain);
    }
  });
  return df;
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("upfirdn2d", TORCH_BOX(&upfirdn2d_cpu));
  m.impl("upfirdn2d_filter_backward", TORCH_BOX(&upfirdn2d_filter_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
