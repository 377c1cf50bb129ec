// Resizing on the CPU: repetition and interpolation, each with its transpose, all from the tables of taps.h.
//
// An image lies in memory as [planes, D, H, W, inner]: inner is 1 for contiguous images (a plane per channel) and C
// for channels_last ones (a plane per image). A thread owns output rows. For each it adds up the input rows that the
// D and H tables name, weighted, into one row of the compute type that stays in L1, resizes that row along W and
// rounds it into the output; where a contiguous 2-D image grows, it resizes each input row along W once and adds
// those up, which is less. Wide rows go in pieces. Every row is computed alike whoever owns it.
// Nearest modes without gain only copy: one row is built and copied to the rows that repeat it.
#include <cstring>
#include <utility>

#include "half_rows.h"
#include "plan.h"
#include "rows.h"

namespace pixfuse {
namespace {

// --- rows along W ----------------------------------------------------------------------------------------------

// Outputs [o0, o1) of a row along W by the table. s holds the inputs from a on; y is where the outputs go.
template <class T, class A>
void resize_by_table(const Plan<A>& plan, int64_t o0, int64_t o1, const A* s, int64_t a, int64_t inner, T* y) {
  const Taps& t = plan.axes[2];
  const int64_t all = plan.shape.inner;
  if (all > 4) {
    return pixel_row<T>(s, &t.start[o0], &t.stop[o0], a, &plan.w[o0 * t.k_max], t.k_max, inner, y, all, o1 - o0);
  }
  const auto body = all == 1 ? few_row<A, 1> : all == 2 ? few_row<A, 2> : all == 3 ? few_row<A, 3> : few_row<A, 4>;
  if (all == 1 && o1 - o0 <= 4) {
    for (int64_t o = o0; o < o1; ++o) {
      A v = 0;
      for (int64_t k = t.start[o]; k < t.stop[o]; ++k) v += plan.w[o * t.k_max + k - t.start[o]] * s[k - a];
      y[o - o0] = round_to<T>(v);
    }
    return;
  }
  constexpr int64_t kBlock = 128;
  alignas(64) A block[4 * kBlock];
  const bool even = all == 1 && (t.k_max <= 2 || t.k_max == 4);
  if (even && o0 < plan.even_lo && o1 > plan.even_lo) {
    resize_by_table(plan, o0, plan.even_lo, s, a, inner, y);
    y += plan.even_lo - o0;
    o0 = plan.even_lo;
  }
  for (; even && o0 < std::min(o1, plan.even_hi);) {
    const int64_t n = std::min(kBlock, std::min(o1, plan.even_hi) - o0);
    const auto sample = t.k_max == 1 ? sample_row<A, 1> : t.k_max == 2 ? sample_row<A, 2> : sample_row<A, 4>;
    sample(s, &plan.starts[o0], int32_t(a), &plan.w[o0 * t.k_max], block, n);
    copy_row<T>(block, y, n);
    o0 += n, y += n;
  }
  for (; o0 < o1; o0 += kBlock, y += kBlock * all) {
    const int64_t n = std::min(kBlock, o1 - o0);
    body(s, &t.start[o0], &t.stop[o0], a, &plan.w[o0 * t.k_max], t.k_max, block, n);
    copy_row<T>(block, y, n * all);
  }
}

// One piece of a row along W.
template <class T, class A>
void resize_row(const Plan<A>& plan, const Piece& p, const A* s, int64_t inner, T* y) {
  const int64_t all = plan.shape.inner;
  if (plan.axes[2].identity) {
    if (inner == all) return copy_row<T>(s, y, (p.o1 - p.o0) * inner);
    for (int64_t o = 0; o < p.o1 - p.o0; ++o) copy_row<T>(s + o * inner, y + o * all, inner);
    return;
  }
  const int64_t up = plan.phases == Plan<A>::kDouble ? 2 : 1, down = plan.phases == Plan<A>::kHalve ? 2 : 1;
  const int64_t from = std::max((p.o0 + up - 1) / up, plan.lo), to = std::min(p.o1 / up, plan.hi), n = to - from;
  if (plan.phases == Plan<A>::kNone || inner != all || n <= 0) {
    return resize_by_table(plan, p.o0, p.o1, s, p.a, inner, y);
  }
  T* y0 = y + (from * up - p.o0) * all;
  const A* s0 = s + (from * down + plan.offset[0] - p.a) * all;
  const A* s1 = s + (from * down + plan.offset[1] - p.a) * all;
  const A* w = plan.phase;
  if (from * up > p.o0) resize_by_table(plan, p.o0, from * up, s, p.a, inner, y);
  switch (plan.taps + (up == 2 ? 100 : 0) + (all > 1 ? 10 : 0)) {
    case 2:
      halve_row<T, 2>(s0, w, y0, n);
      break;
    case 4:
      halve_row<T, 4>(s0, w, y0, n);
      break;
    case 8:
      halve_row<T, 8>(s0, w, y0, n);
      break;
    case 12:
      halve_pixels<T, 2>(s0, w, all, y0, n);
      break;
    case 14:
      halve_pixels<T, 4>(s0, w, all, y0, n);
      break;
    case 18:
      halve_pixels<T, 8>(s0, w, all, y0, n);
      break;
    case 101:
      double_row<T, 1>(s0, s1, w, y0, n);
      break;
    case 111:
      double_pixels<T, 1>(s0, s1, w, all, y0, n);
      break;
    case 102:
      double_row<T, 2>(s0, s1, w, y0, n);
      break;
    case 104:
      double_row<T, 4>(s0, s1, w, y0, n);
      break;
    case 112:
      double_pixels<T, 2>(s0, s1, w, all, y0, n);
      break;
    default:
      double_pixels<T, 4>(s0, s1, w, all, y0, n);
  }
  if (to * up < p.o1) resize_by_table(plan, to * up, p.o1, s, p.a, inner, y + (to * up - p.o0) * all);
}

// What lies beyond the borders of the loaded row of a piece, where doubling needs it.
template <class A>
void replicate(const Plan<A>& plan, const Piece& p, A* row, int64_t inner) {
  const Taps& t = plan.axes[2];
  if (plan.phases != Plan<A>::kDouble || !t.replicates) return;
  A* last = row + (p.b - p.a) * inner;
  for (int64_t c = 0; c < inner && p.a == 0; ++c) row[c - inner] = row[c - 2 * inner] = row[c];
  for (int64_t c = 0; c < inner && p.b == t.in; ++c) last[c] = last[c + inner] = last[c - inner];
}

template <class T>
void resample(const T* x, T* y, const Plan<acc_t<T>>& plan) {
  using A = acc_t<T>;
  const Shape& s = plan.shape;
  const Taps &td = plan.axes[0], &th = plan.axes[1], &tw = plan.axes[2];
  const int64_t blocks = (s.inner + kInner - 1) / kInner, pieces = plan.pieces.size();
  const int64_t in_row = s.in[2] * s.inner, out_row = s.out[2] * s.inner;
  int64_t longest = 1;
  for (const Piece& p : plan.pieces) longest = std::max(longest, p.b - p.a);
  const int64_t values = longest * std::min(s.inner, kInner);
  const bool quarters = plan.phases == Plan<A>::kHalve && plan.taps == 2 && plan.offset[0] == 0 && plan.lo == 0 &&
                        plan.hi == tw.out && blocks == 1;
  const int64_t items = s.planes * s.out[0] * s.out[1] * pieces * blocks;
  parallel(items, (in_row * th.k_max + out_row * tw.k_max) / (pieces * blocks), [&](int64_t begin, int64_t end) {
    std::vector<const T*> rows(td.k_max * th.k_max);
    const int64_t margin = 2 * std::min(s.inner, kInner);  // the most that a tap of kDouble lies beyond a border
    std::vector<A> w(rows.size()), buffer(values + 2 * margin);
    A* sum = buffer.data() + margin;
    const int64_t first = begin / (pieces * blocks), offset = plan.pieces[begin / blocks % pieces].o0 * s.inner;
    Writer<T> writer(y + first * out_row + offset, s.planes * s.out[0] * s.out[1] * out_row);
    int64_t row = -1, count = 0;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t at = blocks == 1 ? item : item / blocks, block = item - at * blocks;
      const int64_t now = pieces == 1 ? at : at / pieces;
      const Piece& p = plan.pieces[at - now * pieces];
      if (now != row) {
        row = now;
        const int64_t image = row / s.out[1], h = row - image * s.out[1];
        const int64_t plane = s.out[0] == 1 ? image : image / s.out[0], d = image - plane * s.out[0];
        count = 0;
        for (int64_t i = td.start[d]; i < td.stop[d]; ++i) {
          for (int64_t j = th.start[h]; j < th.stop[h]; ++j, ++count) {
            rows[count] = x + ((plane * s.in[0] + i) * s.in[1] + j) * in_row;
            w[count] = A(td.w[d * td.k_max + i - td.start[d]] * th.w[h * th.k_max + j - th.start[h]] * plan.gain);
          }
        }
      }
      const int64_t c0 = block * kInner, inner = std::min(s.inner - c0, kInner);
      T* to = blocks == 1 ? writer.next((p.o1 - p.o0) * inner) : y + row * out_row + p.o0 * s.inner + c0;
      if (quarters && count == 2) {
        const T *r0 = rows[0] + p.a * s.inner, *r1 = rows[1] + p.a * s.inner;
        if (s.inner == 1)
          quarter_row(r0, r1, w.data(), plan.phase, to, p.o1 - p.o0);
        else
          quarter_pixels(r0, r1, w.data(), plan.phase, s.inner, to, p.o1 - p.o0);
        continue;
      }
      if (count == 0) {
        std::fill(sum, sum + values, A(0));
      } else if (inner == s.inner) {
        sum_all_rows(rows.data(), p.a * inner, w.data(), count, sum, (p.b - p.a) * inner);
      } else {
        for (int64_t i = p.a; i < p.b; ++i) {
          sum_all_rows(rows.data(), i * s.inner + c0, w.data(), count, sum + (i - p.a) * inner, inner);
        }
      }
      replicate(plan, p, sum, inner);
      resize_row<T>(plan, p, sum, inner, to);
    }
  });
}

// The same for a contiguous 2-D image that grows. (channels_last gains nothing: its rows are long and would leave L1.)
template <class T>
void resample_growing(const T* x, T* y, const Plan<acc_t<T>>& plan) {
  using A = acc_t<T>;
  constexpr bool kHalf = std::is_same_v<T, float16>;
  const Shape& s = plan.shape;
  const Taps& th = plan.axes[1];
  const int64_t pieces = plan.pieces.size(), in_row = s.in[2], out_row = s.out[2];
  int64_t inputs = 1;
  for (const Piece& p : plan.pieces) inputs = std::max(inputs, p.b - p.a);
  parallel(s.planes * pieces * s.out[1], out_row * (th.k_max + plan.axes[2].k_max) / pieces,
           [&](int64_t begin, int64_t end) {
             constexpr int64_t kMargin = 2;  // the most that a tap of kDouble lies beyond a border
             std::vector<A> buffer(inputs + 2 * kMargin), ring(th.k_max * plan.longest), w(th.k_max), sum(plan.longest);
             A* loaded = buffer.data() + kMargin;
             std::vector<int64_t> held(th.k_max);
             std::vector<const A*> rows(th.k_max);
             const A one = 1;
             Writer<T> writer(pieces == 1 ? y + begin * out_row : y, pieces == 1 ? s.planes * s.out[1] * out_row : 0);
             for (int64_t item = begin; item < end; ++item) {
               const int64_t strip = item / s.out[1], h = item - strip * s.out[1];
               const int64_t plane = pieces == 1 ? strip : strip / pieces;
               const Piece& p = plan.pieces[strip - plane * pieces];
               if (h == 0 || item == begin) std::fill(held.begin(), held.end(), -1);
               const int64_t count = th.stop[h] - th.start[h], n = p.o1 - p.o0;
               int64_t slot = th.start[h] % th.k_max;
               for (int64_t k = 0; k < count; ++k, slot = slot + 1 == th.k_max ? 0 : slot + 1) {
                 const int64_t r = th.start[h] + k;
                 A* resized = ring.data() + slot * plan.longest;
                 rows[k] = resized;
                 w[k] = A(th.w[h * th.k_max + k] * plan.gain);
                 if (std::exchange(held[slot], r) == r) continue;
                 const T* from = x + (plane * s.in[1] + r) * in_row;
                 if constexpr (kHalf)
                   load_row(from + p.a, loaded, p.b - p.a);
                 else
                   sum_rows<T, 1, false>(&from, p.a, &one, loaded, p.b - p.a);
                 replicate(plan, p, loaded, 1);
                 resize_row<A>(plan, p, loaded, 1, resized);
               }
               T* to = pieces == 1 ? writer.next(n) : y + (plane * s.out[1] + h) * out_row + p.o0;
               if (count == 0) {
                 std::fill_n(to, n, T{});
               } else if (!kHalf && count == 2) {
                 mix_rows<T, 2>(rows.data(), w.data(), to, n);
               } else if (!kHalf && count == 4) {
                 mix_rows<T, 4>(rows.data(), w.data(), to, n);
               } else {
                 sum_all_rows<A>(rows.data(), 0, w.data(), count, sum.data(), n);
                 if constexpr (kHalf)
                   store_row(sum.data(), to, n);
                 else
                   copy_row<T>(sum.data(), to, n);
               }
             }
           });
}

// --- copies ----------------------------------------------------------------------------------------------------

// y[i * times + p] = x[i]
template <class T, int times>
PIXFUSE_CLONES void repeat_row(const T* __restrict x, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int p = 0; p < times; ++p) y[i * times + p] = x[i];
  }
}

template <class T>
void pick_row(const T* x, const int64_t* index, T* __restrict y, int64_t n) {
  for (int64_t o = 0; o < n; ++o) y[o] = x[index[o]];
}

// Pixels of `inner` values: of a multiple of 64 or 16 bytes in fixed pieces, else as they come.
template <int piece>
PIXFUSE_CLONES void pick_pieces(const char* x, const int64_t* index, char* y, int64_t bytes, int64_t n) {
  for (int64_t o = 0; o < n; ++o) {
    const char* from = x + index[o] * bytes;
    char* to = y + o * bytes;
    for (int64_t b = 0; b < bytes; b += piece) std::memcpy(to + b, from + b, piece);
  }
}

void pick_pixels(const char* x, const int64_t* index, char* y, int64_t bytes, int64_t n) {
  if (bytes % 64 == 0 && bytes <= 1024) return pick_pieces<64>(x, index, y, bytes, n);
  if (bytes % 16 == 0 && bytes <= 256) return pick_pieces<16>(x, index, y, bytes, n);
  for (int64_t o = 0; o < n; ++o) std::memcpy(y + o * bytes, x + index[o] * bytes, bytes);
}

// How often each sample is repeated, if all are alike, else 0.
int64_t repetitions(const Taps& t) {
  if (t.out % t.in != 0) return 0;
  const int64_t times = t.out / t.in;
  for (int64_t o = 0; o < t.out; ++o) {
    if (t.start[o] != o / times) return 0;
  }
  return times;
}

template <class T>
void copy_samples(const T* x, T* y, const Shape& s, const Taps& td, const Taps& th, const Taps& tw) {
  const int64_t times = repetitions(tw);
  const int64_t in_row = s.in[2] * s.inner, out_row = s.out[2] * s.inner;
  auto build = [&](const T* from, T* to) {
    if (times == 1)
      std::memcpy(to, from, out_row * sizeof(T));
    else if (s.inner > 1)
      pick_pixels((const char*)from, tw.start.data(), (char*)to, s.inner * sizeof(T), s.out[2]);
    else if (times == 2)
      repeat_row<T, 2>(from, to, s.in[2]);
    else if (times == 3)
      repeat_row<T, 3>(from, to, s.in[2]);
    else if (times == 4)
      repeat_row<T, 4>(from, to, s.in[2]);
    else
      pick_row(from, tw.start.data(), to, s.out[2]);
  };
  parallel(s.planes * s.out[0] * s.out[1], out_row, [&](int64_t begin, int64_t end) {
    Writer<T> writer(y + begin * out_row, s.planes * s.out[0] * s.out[1] * out_row);
    const T *source = nullptr, *built = nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t image = row / s.out[1], h = row - image * s.out[1];
      const int64_t plane = s.out[0] == 1 ? image : image / s.out[0], d = image - plane * s.out[0];
      const T* from = x + ((plane * s.in[0] + td.start[d]) * s.in[1] + th.start[h]) * in_row;
      T* to = writer.next(out_row);
      if (from != source)
        build(from, to);
      else if (to != built)
        std::memcpy(to, built, out_row * sizeof(T));
      source = from;
      built = to;
    }
  });
}

// --- the operators ---------------------------------------------------------------------------------------------

// The tables of the three axes; those that x lacks are the identity of one sample.
template <class F>
std::array<Taps, 3> tables(int64_t axes, const F& table) {
  std::array<Taps, 3> t{identity_taps(1), identity_taps(1), identity_taps(1)};
  for (int64_t d = 0; d < axes; ++d) t[3 - axes + d] = table(d);
  return t;
}

// x by the tables t; `copy`: every weight is one and every output has one tap.
Tensor apply(const Tensor& x_any, std::array<Taps, 3> t, double gain, bool copy) {
  const int64_t axes = x_any.dim() - 2;
  std::vector<int64_t> out;
  for (int64_t d = 0; d < axes; ++d) out.push_back(t[3 - axes + d].out);
  const Shape s = shape_of(x_any, out);
  const Tensor x = to_dense(x_any, s.channels_last);
  out.insert(out.begin(), {x.size(0), x.size(1)});
  Tensor y = empty_dense(x, out, s.channels_last);
  if (y.numel() == 0) return y;
  if (copy) {
    auto run = [&](auto kind) {
      using T = decltype(kind);
      copy_samples(data<T>(x), mutable_data<T>(y), s, t[0], t[1], t[2]);
    };
    switch (x.element_size()) {
      case 1:
        run(uint8_t{});
        break;
      case 2:
        run(uint16_t{});
        break;
      case 4:
        run(uint32_t{});
        break;
      default:
        run(uint64_t{});
    }
    return y;
  }
  auto run = [&](auto kind) {
    using T = decltype(kind);
    const Plan<acc_t<T>> plan(s, std::move(t[0]), std::move(t[1]), std::move(t[2]), gain);
    if (plan.growing())
      resample_growing(data<T>(x), mutable_data<T>(y), plan);
    else
      resample(data<T>(x), mutable_data<T>(y), plan);
  };
  if (x.scalar_type() == ScalarType::Byte)
    run(uint8_t{});
  else
    dispatch_floating(x.scalar_type(), run);
  return y;
}

void check_axes(const Tensor& x, size_t entries) {
  STD_TORCH_CHECK(x.dim() >= 3 && x.dim() <= 5 && entries == size_t(x.dim() - 2),
                  "upsample: a 3-D to 5-D image and one entry for each spatial axis are required");
}

Tensor upsample_nearest_cpu(const Tensor& x, std::vector<int64_t> scale, double gain) {
  check_axes(x, scale.size());
  for (int64_t times : scale) STD_TORCH_CHECK(times >= 1, "upsample_nearest: scale must be at least 1");
  auto t = tables(x.dim() - 2, [&](int64_t d) { return repeat_taps(x.size(2 + d), scale[d]); });
  return apply(x, std::move(t), gain, gain == 1);
}

Tensor upsample_nearest_backward_cpu(const Tensor& dy, std::vector<int64_t> scale, double gain) {
  check_axes(dy, scale.size());
  for (int64_t times : scale) STD_TORCH_CHECK(times >= 1, "upsample_nearest: scale must be at least 1");
  auto t =
      tables(dy.dim() - 2, [&](int64_t d) { return repeat_taps(dy.size(2 + d) / scale[d], scale[d]).transposed(); });
  return apply(dy, std::move(t), gain, false);
}

Tensor interpolate_cpu(const Tensor& x, std::vector<int64_t> size, int64_t mode, bool align_corners, bool antialias,
                       std::vector<double> scale) {
  check_axes(x, size.size());
  check_axes(x, scale.size());
  auto t = tables(x.dim() - 2, [&](int64_t d) {
    STD_TORCH_CHECK(size[d] >= 1 && x.size(2 + d) >= 1, "interpolate: empty spatial axis");
    return interpolation_taps(x.size(2 + d), size[d], scale[d], mode, align_corners, antialias);
  });
  return apply(x, std::move(t), 1, mode == kNearest || mode == kNearestExact);
}

Tensor interpolate_backward_cpu(const Tensor& dy, std::vector<int64_t> size, int64_t mode, bool align_corners,
                                bool antialias, std::vector<double> scale) {
  check_axes(dy, size.size());
  check_axes(dy, scale.size());
  auto t = tables(dy.dim() - 2, [&](int64_t d) {
    STD_TORCH_CHECK(size[d] >= 1 && dy.size(2 + d) >= 1, "interpolate: empty spatial axis");
    return interpolation_taps(size[d], dy.size(2 + d), scale[d], mode, align_corners, antialias).transposed();
  });
  return apply(dy, std::move(t), 1, false);
}

STABLE_TORCH_LIBRARY_IMPL(pixfuse, CPU, m) {
  m.impl("upsample_nearest", TORCH_BOX(&upsample_nearest_cpu));
  m.impl("upsample_nearest_backward", TORCH_BOX(&upsample_nearest_backward_cpu));
  m.impl("interpolate", TORCH_BOX(&interpolate_cpu));
  m.impl("interpolate_backward", TORCH_BOX(&interpolate_backward_cpu));
}

}  // namespace
}  // namespace pixfuse
