// upfirdn2d on the CPU, and the gradient of its filter.
//
// One item is a band of output rows of one image (a channel's plane if contiguous, a block of channels if
// channels_last), or a tile of it, so small that what it needs stays in L1. Memory is seen as rows of pixels of `chunk`
// values, so both layouts run the same loops over contiguous values. Along each axis the outputs fall into phases that
// see the same taps and whose inputs advance by `step`: no zero that was inserted is ever touched, and zeros beyond the
// image exist only in the margins of the rows at work.
//
// A separable filter (or a 2-D one that is exactly a product) first sums whole input rows into rows of the compute type
// and then filters those; any other filter does both at once. bfloat16 is converted on the fly, float16 row by row.
// Every output is computed alike whatever thread, batch or item it is in.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu.h"
#include "half_rows.h"

namespace pixfuse {
namespace {

// --- row loops -------------------------------------------------------------------------------------------------

// out[m, i] = base[m, i] + sum over K of w[k] * src[k][m, i], for `count` chunks of n values. With kBlocks n is a
// multiple of 16, so that short chunks cost no more than long rows.
template <class Src, class Dst, class A, int K, bool kAdd, bool kBlocks>
PIXFUSE_CLONES void weigh_rows(const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step,
                               Dst* out, int64_t out_step, int64_t count, int64_t n) {
  const Src* s[K];
  A v[K];
  for (int k = 0; k < K; ++k) s[k] = src[k], v[k] = w[k];
  for (int64_t m = 0; m < count; ++m) {
    const auto at = [&](int64_t i) __attribute__((always_inline)) {
      A sum = v[0] * load(s[0][i]);
      for (int k = 1; k < K; ++k) sum += v[k] * load(s[k][i]);
      if constexpr (kAdd) sum += base[i];
      out[i] = store<Dst>(sum);
    };
    if constexpr (std::is_same_v<Src, bfloat16> && std::endian::native == std::endian::little) {
      using Pair __attribute__((aligned(2), may_alias)) = uint32_t;  // two values by a shift and a mask: no widening
#pragma GCC ivdep
      for (int64_t i = 0; i < n / 2; ++i) {
        A even{}, odd{};
        for (int k = 0; k < K; ++k) {
          const uint32_t two = reinterpret_cast<const Pair*>(s[k])[i];
          const A low = std::bit_cast<float>(two << 16), high = std::bit_cast<float>(two & 0xffff0000u);
          even = k == 0 ? v[k] * low : even + v[k] * low;
          odd = k == 0 ? v[k] * high : odd + v[k] * high;
        }
        if constexpr (kAdd) even += base[2 * i], odd += base[2 * i + 1];
        out[2 * i] = store<Dst>(even);
        out[2 * i + 1] = store<Dst>(odd);
      }
      if (n % 2) at(n - 1);
    } else if constexpr (kBlocks) {
      for (int64_t b = 0; b < n; b += 16) {
#pragma GCC ivdep
        for (int64_t i = 0; i < 16; ++i) at(b + i);
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) at(i);
    }
    for (int k = 0; k < K; ++k) s[k] += src_step;
    out += out_step;
    if constexpr (kAdd) base += base_step;
  }
}

// out[r, 2 * m + p] = sum over K of w[p][k] * src[p][r, m + k]: both phases of up 2, interleaved.
template <class Dst, class A, int K>
PIXFUSE_CLONES void up2_rows(const A* even, const A* odd, int64_t in_step, const A* we, const A* wo, Dst* out,
                             int64_t out_step, int64_t rows, int64_t count) {
  A v[K], u[K];
  for (int k = 0; k < K; ++k) v[k] = we[k], u[k] = wo[k];
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC ivdep
    for (int64_t m = 0; m < count; ++m) {
      A a = v[0] * even[m], b = u[0] * odd[m];
      for (int k = 1; k < K; ++k) a += v[k] * even[m + k], b += u[k] * odd[m + k];
      out[2 * m] = store<Dst>(a);
      out[2 * m + 1] = store<Dst>(b);
    }
    even += in_step;
    odd += in_step;
    out += out_step;
  }
}

template <class Dst, class A>
PIXFUSE_CLONES void interleave2_row(const A* even, const A* odd, Dst* out, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    out[2 * m] = store<Dst>(even[m]);
    out[2 * m + 1] = store<Dst>(odd[m]);
  }
}

template <class A>
PIXFUSE_CLONES void split2_row(const A* in, A* even, A* odd, int64_t count) {
#pragma GCC ivdep
  for (int64_t m = 0; m < count; ++m) {
    even[m] = in[2 * m];
    odd[m] = in[2 * m + 1];
  }
}

// out[m, i] = in[m, i].
template <class Dst, class A>
PIXFUSE_CLONES void copy_chunks(const A* in, int64_t in_step, Dst* out, int64_t out_step, int64_t count, int64_t n) {
  if (n == 1) {
#pragma GCC ivdep
    for (int64_t m = 0; m < count; ++m) out[m * out_step] = store<Dst>(in[m * in_step]);
    return;
  }
  for (int64_t m = 0; m < count; ++m) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[m * out_step + i] = store<Dst>(in[m * in_step + i]);
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

template <class Src, class Dst, class A, bool kAdd, bool kBlocks>
void weigh_some(int64_t k, const Src* const* src, int64_t src_step, const A* w, const A* base, int64_t base_step,
                Dst* out, int64_t out_step, int64_t count, int64_t n) {
  auto call = [&](auto rows) { rows(src, src_step, w, base, base_step, out, out_step, count, n); };
  switch (k) {
    case 1:
      return call(weigh_rows<Src, Dst, A, 1, kAdd, kBlocks>);
    case 2:
      return call(weigh_rows<Src, Dst, A, 2, kAdd, kBlocks>);
    case 3:
      return call(weigh_rows<Src, Dst, A, 3, kAdd, kBlocks>);
    case 4:
      return call(weigh_rows<Src, Dst, A, 4, kAdd, kBlocks>);
    case 5:
      return call(weigh_rows<Src, Dst, A, 5, kAdd, kBlocks>);
    default:
      return call(weigh_rows<Src, Dst, A, 6, kAdd, kBlocks>);
  }
}

template <class Src, class Dst, class A, bool kBlocks>
void weigh_all(const Src* const* src, int64_t src_step, const A* w, int64_t taps, A* partial, Dst* out,
               int64_t out_step, int64_t count, int64_t n) {
  constexpr int64_t kMost = 6;
  if (taps <= kMost) {
    weigh_some<Src, Dst, A, false, kBlocks>(taps, src, src_step, w, nullptr, 0, out, out_step, count, n);
    return;
  }
  weigh_some<Src, A, A, false, kBlocks>(kMost, src, src_step, w, nullptr, 0, partial, n, count, n);
  int64_t t = kMost;
  for (; taps - t > kMost; t += kMost) {
    weigh_some<Src, A, A, true, kBlocks>(kMost, src + t, src_step, w + t, partial, n, partial, n, count, n);
  }
  weigh_some<Src, Dst, A, true, kBlocks>(taps - t, src + t, src_step, w + t, partial, n, out, out_step, count, n);
}

// out[m, i] = sum over `taps` of w[t] * src[t][m, i]; zero without taps. `partial` has room for count * n sums.
template <class Src, class Dst, class A>
void weigh(const Src* const* src, int64_t src_step, const A* w, int64_t taps, A* partial, Dst* out, int64_t out_step,
           int64_t count, int64_t n) {
  if (taps == 0) {
    for (int64_t m = 0; m < count; ++m) std::fill_n(out + m * out_step, n, Dst{});
  } else if (count > 1 && n % 16 == 0) {
    weigh_all<Src, Dst, A, true>(src, src_step, w, taps, partial, out, out_step, count, n);
  } else {
    weigh_all<Src, Dst, A, false>(src, src_step, w, taps, partial, out, out_step, count, n);
  }
}

// `count` chunks of n values between memory and the compute type.
template <class T>
void load_chunks(const T* in, int64_t in_step, acc_t<T>* out, int64_t count, int64_t n) {
  if (in_step == n) n *= count, count = 1;
  for (int64_t m = 0; m < count; ++m) load_row(in + m * in_step, out + m * n, n);
}
template <class T>
void store_chunks(const acc_t<T>* in, T* out, int64_t out_step, int64_t count, int64_t n) {
  if (out_step == n) n *= count, count = 1;
  for (int64_t m = 0; m < count; ++m) store_row(in + m * n, out + m * out_step, n);
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

// Chunks of so many values are read and written where they lie, `step` or `phases` pixels apart; the pixels of shorter
// ones are sorted first, so that loops run along the row.
constexpr int64_t kDirect = 8;

enum class Use { kInPlace, kConverted, kFull, kGradient };  // what is kept of the inputs: nothing, rows, rows, a row

// How an image is cut: an item is a band of `height` output rows, `width` outputs of each and `chunk` channels. A row
// at work holds `pitch` pixels, the tile's inputs and zeros beyond the image; `stack` rows lie one after another, and
// if `split` is more than 1 the pixels s, s + split, s + 2 * split, ... of all of them come first for s = 0, then for
// 1, ...
struct Tiles {
  int64_t channels, chunk, blocks, width, tiles, height, bands, split, pitch, stack, ring;

  Tiles(const Axis& v, const Axis& h, int64_t channels, Use use) : channels(channels) {
    constexpr int64_t kNarrowest = 8, kFewest = 4, kBand = 1 << 12;  // values
    const bool keeps_rows = use == Use::kConverted || use == Use::kFull;
    const auto inputs_of = [](const Axis& axis, int64_t outputs) {
      return (outputs * axis.down + axis.k) / axis.up + 1;
    };
    const int64_t rows = !keeps_rows ? 1 : v.most_taps() + (use == Use::kFull ? kFewest : 0);
    const auto kept = [&](int64_t outputs) { return inputs_of(h, outputs) * (rows + 1) + outputs; };
    const int64_t values = rows == 1 ? 1 << 15 : 1 << 13;
    const int64_t most = std::max<int64_t>(16, 4 * values / kept(kNarrowest) / 16 * 16);
    blocks = (channels + most - 1) / most;
    chunk = blocks == 1 ? channels : (channels / blocks + 16) / 16 * 16;
    blocks = (channels + chunk - 1) / chunk;
    width = kNarrowest;
    while (kept(2 * width) * chunk <= values) width *= 2;
    width = std::min((width + h.phases - 1) / h.phases * h.phases, h.out);
    tiles = (h.out + width - 1) / width;
    split = use == Use::kGradient || chunk < kDirect ? h.step : 1;
    pitch = (inputs_of(h, width) + split) / split * split;

    height = std::max<int64_t>(use == Use::kFull ? kFewest : 1, kBand / (std::max(width, pitch) * chunk));
    if (use == Use::kGradient || (use == Use::kConverted && chunk >= kDirect)) height = 1;
    height = std::min(height, v.out);
    if (height > v.phases) height -= height % v.phases;
    bands = (v.out + height - 1) / height;
    // A band of one row keeps the rows that the next band sees too.
    ring = height == 1 ? std::max<int64_t>(1, v.most_taps()) : inputs_of(v, height) + 1;
    stack = use == Use::kFull ? ring : height;
  }
};

// Where one tile lies: outputs begin .. begin + n - 1, inputs from `low` on, of which left .. right - 1 exist.
struct Place {
  int64_t image = 0, block = -1, chunk = 0, tile = -1, begin = 0, n = 0, low = 0, left = 0, right = 0;
  std::vector<int64_t> sources;  // by phase: where the first output of the phase finds its inputs in the first row
  std::vector<int64_t> outputs;  // by phase: how many

  // Whether the tile or block differs from the one before.
  bool enter(int64_t run, const Axis& h, const Tiles& t) {
    const int64_t to_tile = run % t.tiles, to_block = run / t.tiles % t.blocks;
    image = run / t.tiles / t.blocks;
    if (to_tile == tile && to_block == block) return false;
    tile = to_tile;
    block = to_block;
    chunk = std::min(t.chunk, t.channels - block * t.chunk);
    begin = tile * t.width;
    n = std::min(t.width, h.out - begin);
    low = h.low(begin);
    left = std::max<int64_t>(0, low);
    right = std::min(h.in, h.high(begin + n));
    sources.clear();
    outputs.clear();
    for (int64_t p = 0; p < h.phases; ++p) {
      outputs.push_back((n - p + h.phases - 1) / h.phases);
      for (int64_t s = 0; s < h.count[p]; ++s) {
        const int64_t at = h.first[p] + h.step * (begin / h.phases) - low + s;
        sources.push_back((at % t.split * (t.stack * t.pitch / t.split) + at / t.split) * chunk);
      }
    }
    return true;
  }
  int64_t channel(const Tiles& t) const { return block * t.chunk; }
  int64_t width() const { return std::max<int64_t>(0, right - left); }
};

// Sort the pixels of `rows` rows as Tiles says.
template <class A>
void split_rows(const A* in, int64_t rows, const Tiles& t, int64_t chunk, A* out) {
  const int64_t count = rows * t.pitch / t.split, apart = t.stack * t.pitch / t.split * chunk;
  if (t.split == 2 && chunk == 1) return split2_row(in, out, out + apart, count);
  for (int64_t s = 0; s < t.split; ++s) {
    copy_chunks(in + s * chunk, t.split * chunk, out + s * apart, chunk, count, chunk);
  }
}

// Filters rows at work into the outputs of a tile.
template <class Dst, class A>
struct RowFilter {
  const Axis& axis;
  const Tiles& tiles;
  const Place& place;
  int64_t room;
  std::vector<A> phase_rows, partial;
  std::vector<const A*> sources;

  RowFilter(const Axis& axis, const Tiles& tiles, const Place& place, int64_t rows)
      : axis(axis),
        tiles(tiles),
        place(place),
        room((tiles.width / axis.phases + 1) * tiles.chunk),
        sources(rows * std::max<int64_t>(1, axis.most_taps())) {
    if (axis.phases > 1 && tiles.chunk < kDirect) phase_rows.resize(axis.phases * tiles.height * room);
    if (sources.size() > 6) partial.resize(tiles.height * room);
  }

  // Writes `count` rows of outputs, y_row apart, with pixels y_step apart. An output row sees the rows `seen[..]`, its
  // successor those `row_step` further. taps(p) are those of phase p: of the first row seen, then of the second, ...
  template <class W>
  void operator()(const A* const* seen, int64_t seen_count, int64_t row_step, const W& taps, Dst* y, int64_t y_step,
                  int64_t y_row, int64_t count) {
    const int64_t chunk = place.chunk, phases = axis.phases;
    if (phases == 1 && tiles.split == axis.step && y_step == chunk) {
      const int64_t k = find(seen, seen_count, 0, 0, 0);
      return weigh(sources.data(), row_step, taps(0), k, partial.data(), y, y_row, count, place.n * chunk);
    }
    if (phases == 2 && chunk == 1 && y_step == 1 && seen_count == 1 && axis.step == 1 &&
        axis.count[0] == axis.count[1] && axis.count[0] >= 1 && axis.count[0] <= 6) {
      const A *even = seen[0] + place.sources[0], *odd = seen[0] + place.sources[axis.count[0]];
      const int64_t pairs = place.n / 2;
      auto run = [&](auto rows) { rows(even, odd, row_step, taps(0), taps(1), y, y_row, count, pairs); };
      switch (axis.count[0]) {
        case 1:
          run(up2_rows<Dst, A, 1>);
          break;
        case 2:
          run(up2_rows<Dst, A, 2>);
          break;
        case 3:
          run(up2_rows<Dst, A, 3>);
          break;
        case 4:
          run(up2_rows<Dst, A, 4>);
          break;
        case 5:
          run(up2_rows<Dst, A, 5>);
          break;
        default:
          run(up2_rows<Dst, A, 6>);
      }
      if (place.n % 2) {
        const int64_t k = find(seen, seen_count, 0, 0, pairs);
        weigh(sources.data(), row_step, taps(0), k, partial.data(), y + place.n - 1, y_row, count, 1);
      }
      return;
    }
    if (tiles.chunk >= kDirect) {  // also for the few channels that the last block may have
      const int64_t step = tiles.split == axis.step ? chunk : axis.step * chunk;
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t p = 0, from = 0; p < phases; from += axis.count[p++]) {
          const int64_t k = find(seen, seen_count, p, from, r * row_step);
          weigh(sources.data(), step, taps(p), k, partial.data(), y + r * y_row + p * y_step, phases * y_step,
                place.outputs[p], chunk);
        }
      }
      return;
    }
    for (int64_t p = 0, from = 0; p < phases; from += axis.count[p++]) {
      const int64_t k = find(seen, seen_count, p, from, 0);
      A* to = phase_rows.data() + p * tiles.height * room;
      weigh(sources.data(), row_step, taps(p), k, partial.data(), to, room, count, place.outputs[p] * chunk);
    }
    for (int64_t r = 0; r < count; ++r) {
      const A* from = phase_rows.data() + r * room;
      if (phases == 2 && chunk == 1) {
        interleave2_row(from, from + tiles.height * room, y, place.n / 2);
        if (place.n % 2) y[place.n - 1] = store<Dst>(from[place.n / 2]);
      } else {
        for (int64_t p = 0; p < phases; ++p) {
          copy_chunks(from + p * tiles.height * room, chunk, y + p * y_step, phases * y_step, place.outputs[p], chunk);
        }
      }
      y += y_row;
    }
  }

 private:
  int64_t find(const A* const* seen, int64_t count, int64_t p, int64_t from, int64_t further) {
    int64_t k = 0;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t t = 0; t < axis.count[p]; ++t) sources[k++] = seen[r] + place.sources[from + t] + further;
    }
    return k;
  }
};

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

template <class T>
struct Image {
  T* data;
  int64_t height, width, channels;
  T* at(int64_t image, int64_t row, int64_t column) const {
    return data + ((image * height + row) * width + column) * channels;
  }
};

// Rows first, first + apart, ... of a band, of one phase: they see the input rows top + t, top + step + t, ... through
// the taps skip + t, for t < taps. All of these rows exist; a row at the edge of the image makes a group of its own.
struct Group {
  int64_t phase, first, apart, count, top, skip, taps;
};

// Call f(group) for the groups of output rows begin .. begin + n - 1.
template <class F>
void for_groups(const Axis& v, int64_t begin, int64_t n, const F& f) {
  for (int64_t j = 0; j < std::min(n, v.phases); ++j) {
    const int64_t p = (begin + j) % v.phases, rows = (n - j + v.phases - 1) / v.phases;
    const int64_t taps = v.count[p], top = v.first[p] + v.step * ((begin + j) / v.phases);
    // Rows from .. to - 1 of the phase see existing rows only.
    const int64_t from = std::clamp<int64_t>(Axis::ceil_div(-top, v.step), 0, rows);
    const int64_t to = std::clamp<int64_t>(Axis::floor_div(v.in - taps - top, v.step) + 1, from, rows);
    if (to > from) f(Group{p, j + from * v.phases, v.phases, to - from, top + v.step * from, 0, taps});
    for (int64_t r = 0; r < rows; ++r) {
      if (r == from) r = to;
      if (r == rows) break;
      const int64_t at = top + v.step * r, skip = std::clamp<int64_t>(-at, 0, taps);
      const int64_t seen = std::clamp<int64_t>(v.in - at, skip, taps) - skip;
      f(Group{p, j + r * v.phases, v.phases, 1, at + skip, skip, seen});
    }
  }
}

// Call band(b) for the items from .. to - 1, which are the bands of one tile after another; enter(run) before each
// tile.
template <class Enter, class Band>
void for_items(int64_t from, int64_t to, int64_t bands, const Enter& enter, const Band& band) {
  for (int64_t item = from; item < to;) {
    const int64_t first = item % bands, last = std::min(bands, first + to - item);
    enter(item / bands);
    for (int64_t b = first; b < last; ++b) band(b);
    item += last - first;
  }
}

// Finished rows on their way to memory: where they are computed, and what is left to do then.
template <class T>
struct Sink {
  static constexpr bool kConvert = std::is_same_v<T, float16>;
  using Row = std::conditional_t<kConvert, float, T>;
  const Image<T>& y;
  std::vector<Row> rows;
  T* out = nullptr;
  Row* to = nullptr;
  int64_t step = 0, row = 0;

  Sink(const Image<T>& y, const Tiles& t) : y(y), rows(kConvert ? t.height * t.width * t.chunk : 0) {}

  void open(const Place& place, const Tiles& t, int64_t first_row) {
    out = y.at(place.image, first_row, place.begin) + place.channel(t);
    step = kConvert ? place.chunk : y.channels;
    row = (kConvert ? place.n : y.width) * step;
    if constexpr (kConvert)
      to = rows.data();
    else
      to = out;
  }
  void close(const Place& place, int64_t count) {
    if constexpr (kConvert) {
      if (place.n == y.width && place.chunk == y.channels) return store_row(rows.data(), out, count * row);
      for (int64_t r = 0; r < count; ++r) {
        store_chunks(to + r * row, out + r * y.width * y.channels, y.channels, place.n, place.chunk);
      }
    }
  }
};

template <class T>
void separable_rows(const Image<const T>& x, const Image<T>& y, const Axis& v, const Axis& h,
                    const Filter<acc_t<T>>& filter, int64_t images) {
  using A = acc_t<T>;
  using Row = typename Sink<T>::Row;
  constexpr bool kConvert = Sink<T>::kConvert;
  const Weights<A> down(v, filter.column.data()), along(h, filter.row.data());
  const Tiles tiles(v, h, x.channels, kConvert ? Use::kConverted : Use::kInPlace);
  const int64_t cost = tiles.height * tiles.width * tiles.chunk;
  parallel(images * tiles.blocks * tiles.tiles * tiles.bands, cost, [&](int64_t from, int64_t to) {
    Place place;
    Sink<T> sink(y, tiles);
    RowFilter<Row, A> filter_row(h, tiles, place, 1);
    const int64_t most = tiles.height * tiles.pitch * tiles.chunk;
    std::vector<A> sums(most), sorted(tiles.split > 1 ? most : 0), partial(v.most_taps() > 6 ? most : 0);
    std::vector<Row> loaded(kConvert ? tiles.ring * tiles.pitch * tiles.chunk : 0);
    std::vector<int64_t> held(tiles.ring);
    std::vector<const Row*> seen(std::max<int64_t>(1, v.most_taps()));
    auto enter = [&](int64_t run) {
      if (place.enter(run, h, tiles)) std::fill(sums.begin(), sums.end(), A(0));  // the margins stay so
      std::fill(held.begin(), held.end(), -1);
    };
    auto taps = [&](int64_t p) { return along.taps.data() + along.begin[p]; };
    for_items(from, to, tiles.bands, enter, [&](int64_t band) {
      const int64_t begin = band * tiles.height, count = std::min(tiles.height, v.out - begin);
      const int64_t chunk = place.chunk, width = place.width(), row_size = tiles.pitch * chunk;
      const int64_t low = std::clamp<int64_t>(v.low(begin), 0, v.in);
      const int64_t high = std::clamp<int64_t>(v.high(begin + count), low, v.in);
      if constexpr (kConvert) {
        const T* in = x.at(place.image, low, place.left) + place.channel(tiles);
        if (tiles.height > 1 && width == x.width && chunk == x.channels) {
          load_row(in, loaded.data(), (high - low) * width * chunk);
        } else if (width > 0) {
          for (int64_t r = low; r < high; ++r, in += x.width * x.channels) {
            const int64_t at = tiles.height == 1 ? r % tiles.ring : r - low;
            if (tiles.height == 1 && held[at] == r) continue;
            held[at] = r;
            load_chunks(in, x.channels, loaded.data() + at * width * chunk, width, chunk);
          }
        }
      }
      // Down the columns. A kept row is `width` pixels, one in memory is x.width.
      const int64_t pixel = kConvert ? chunk : x.channels, in_row = (kConvert ? width : x.width) * pixel;
      for_groups(v, begin, count, [&](const Group& g) {
        for (int64_t t = 0; t < g.taps; ++t) {
          const int64_t r = g.top + t;
          if constexpr (kConvert) {
            seen[t] = loaded.data() + (tiles.height == 1 ? r % tiles.ring : r - low) * in_row;
          } else {
            seen[t] = x.at(place.image, r, place.left) + place.channel(tiles);
          }
        }
        const A* weights = down.taps.data() + down.begin[g.phase] + g.skip;
        A* inside = sums.data() + g.first * row_size + (place.left - place.low) * chunk;
        if (pixel == chunk) {
          weigh(seen.data(), v.step * in_row, weights, g.taps, partial.data(), inside, g.apart * row_size, g.count,
                width * chunk);
          return;
        }
        for (int64_t r = 0; r < g.count; ++r) {
          weigh(seen.data(), pixel, weights, g.taps, partial.data(), inside + r * g.apart * row_size, chunk, width,
                chunk);
          for (int64_t t = 0; t < g.taps; ++t) seen[t] += v.step * in_row;
        }
      });
      // Along the rows.
      const A* rows = sums.data();
      if (tiles.split > 1) {
        split_rows(sums.data(), count, tiles, chunk, sorted.data());
        rows = sorted.data();
      }
      sink.open(place, tiles, begin);
      filter_row(&rows, 1, row_size / tiles.split, taps, sink.to, sink.step, sink.row, count);
      sink.close(place, count);
    });
  });
}

template <class T>
void full_rows(const Image<const T>& x, const Image<T>& y, const Axis& v, const Axis& h, const Filter<acc_t<T>>& filter,
               int64_t images) {
  using A = acc_t<T>;
  const FullWeights<A> weights(v, h, filter.full);
  const Tiles tiles(v, h, x.channels, Use::kFull);
  const int64_t cost = tiles.height * tiles.width * tiles.chunk * std::max<int64_t>(1, v.most_taps());
  parallel(images * tiles.blocks * tiles.tiles * tiles.bands, cost, [&](int64_t from, int64_t to) {
    Place place;
    Sink<T> sink(y, tiles);
    RowFilter<typename Sink<T>::Row, A> filter_row(h, tiles, place, std::max<int64_t>(1, v.most_taps()));
    const int64_t most = tiles.stack * tiles.pitch * tiles.chunk;
    std::vector<A> loaded(most), sorted(tiles.split > 1 ? most : 0);
    std::vector<const A*> seen(std::max<int64_t>(1, v.most_taps()));
    auto enter = [&](int64_t run) {
      if (place.enter(run, h, tiles)) std::fill(loaded.begin(), loaded.end(), A(0));  // the margins stay so
    };
    for_items(from, to, tiles.bands, enter, [&](int64_t band) {
      const int64_t begin = band * tiles.height, count = std::min(tiles.height, v.out - begin);
      const int64_t chunk = place.chunk, width = place.width(), row_size = tiles.pitch * chunk;
      const int64_t low = std::clamp<int64_t>(v.low(begin), 0, v.in);
      const int64_t high = std::clamp<int64_t>(v.high(begin + count), low, v.in);
      for (int64_t r = low; width > 0 && r < high; ++r) {
        load_chunks(x.at(place.image, r, place.left) + place.channel(tiles), x.channels,
                    loaded.data() + (r - low) * row_size + (place.left - place.low) * chunk, width, chunk);
      }
      const A* rows = loaded.data();
      if (tiles.split > 1) {
        split_rows(loaded.data(), high - low, tiles, chunk, sorted.data());
        rows = sorted.data();
      }
      sink.open(place, tiles, begin);
      for_groups(v, begin, count, [&](const Group& g) {
        for (int64_t t = 0; t < g.taps; ++t) seen[t] = rows + (g.top + t - low) * (row_size / tiles.split);
        auto taps = [&](int64_t p) {
          return weights.taps.data() + weights.begin[g.phase * weights.phases + p] + g.skip * h.count[p];
        };
        filter_row(seen.data(), g.taps, v.step * row_size / tiles.split, taps, sink.to + g.first * sink.row, sink.step,
                   g.apart * sink.row, g.count);
      });
      sink.close(place, count);
    });
  });
}

void check_filter(const std::optional<Tensor>& f, ScalarType dtype) {
  if (!f) return;
  STD_TORCH_CHECK((f->dim() == 1 || f->dim() == 2) && f->numel() > 0, "upfirdn2d: f must have shape [kh, kw] or [k]");
  STD_TORCH_CHECK(
      f->scalar_type() == ScalarType::Float || (f->scalar_type() == ScalarType::Double && dtype == ScalarType::Double),
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
  const int64_t inner = channels_last ? channels : 1, images = channels_last ? batch : batch * channels;
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const Filter<acc_t<T>> filter(f, flip, gain);
    const Axis v(height, out_h, filter.h, up_y, down_y, pad_y), h(width, out_w, filter.w, up_x, down_x, pad_x);
    const Image<const T> from{data<T>(x), height, width, inner};
    const Image<T> to{mutable_data<T>(y), out_h, out_w, inner};
    (filter.separable ? separable_rows<T> : full_rows<T>)(from, to, v, h, filter, images);
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
  const int64_t inner = channels_last ? channels : 1, images = channels_last ? batch : batch * channels;
  Tensor df = empty_dense(x, {fh, fw}, false, acc_dtype(x.scalar_type()));
  const Axis v(x.size(2), dy.size(2), fh, up_y, down_y, pad_y), h(x.size(3), dy.size(3), fw, up_x, down_x, pad_x);
  dispatch_floating(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const Image<const T> from_x{data<T>(x), v.in, h.in, inner}, from_dy{data<T>(dy), v.out, h.out, inner};
    A* result = mutable_data<A>(df);
    // Fixed blocks of rows, whatever the threads: each sums its own part of the gradient.
    const Tiles tiles(v, h, inner, Use::kGradient);
    const int64_t rows = dy.numel() ? images * tiles.blocks * tiles.tiles * v.out : 0;
    const int64_t block = std::max<int64_t>(8, (rows + 63) / 64), blocks = (rows + block - 1) / block;
    std::vector<double> sums(blocks * fh * fw);
    parallel(blocks, block * tiles.width * tiles.chunk, [&](int64_t from, int64_t to) {
      Place place;
      std::vector<A> loaded(std::max(tiles.pitch, tiles.width) * tiles.chunk), sorted(tiles.pitch * tiles.chunk);
      const int64_t room = (tiles.width / h.phases + 1) * tiles.chunk;
      std::vector<A> phase_rows(h.phases * room);
      auto enter = [&](int64_t run) { place.enter(run, h, tiles); };
      for (int64_t b = from; b < to; ++b) {
        double* sum = sums.data() + b * fh * fw;
        for_items(b * block, std::min((b + 1) * block, rows), v.out, enter, [&](int64_t i) {
          const int64_t chunk = place.chunk, width = place.width(), margin = (place.left - place.low) * chunk;
          if (width == 0) return;
          const T* dys = from_dy.at(place.image, i, place.begin) + place.channel(tiles);
          load_chunks(dys, inner, loaded.data(), place.n, chunk);
          for (int64_t p = 0; p < h.phases; ++p) {
            copy_chunks(loaded.data() + p * chunk, h.phases * chunk, phase_rows.data() + p * room, chunk,
                        place.outputs[p], chunk);
          }
          std::fill(loaded.begin(), loaded.end(), A(0));
          for_groups(v, i, 1, [&](const Group& g) {
            for (int64_t s = 0; s < g.taps; ++s) {
              const T* xs = from_x.at(place.image, g.top + s, place.left) + place.channel(tiles);
              load_chunks(xs, inner, loaded.data() + margin, width, chunk);
              split_rows(loaded.data(), 1, tiles, chunk, sorted.data());
              double* out = sum + (v.offset[g.phase] + v.up * (g.skip + s)) * fw;
              for (int64_t p = 0, at = 0; p < h.phases; ++p) {
                for (int64_t t = 0; t < h.count[p]; ++t) {
                  out[h.offset[p] + h.up * t] += dot_row(phase_rows.data() + p * room,
                                                         sorted.data() + place.sources[at++], place.outputs[p] * chunk);
                }
              }
            }
          });
        });
      }
    });
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
