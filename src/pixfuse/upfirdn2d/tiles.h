// Where upfirdn2d's outputs find their inputs: the phases of an axis and their taps, how an image is cut into tiles and
// bands, and a tile's rows at work, sorted and filtered along the row.
#pragma once

#include <algorithm>
#include <numeric>

#include "rows.h"

namespace pixfuse {
namespace {

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

// --- rows and items -------------------------------------------------------------------------------------------

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

}  // namespace
}  // namespace pixfuse
