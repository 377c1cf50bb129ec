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
#include "filter.h"

namespace pixfuse {
namespace {

// --- the operator ----------------------------------------------------------------------------------------------

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
