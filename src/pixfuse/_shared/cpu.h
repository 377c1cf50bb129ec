// What every CPU kernel uses: dtypes and their conversions, the two layouts, outputs, threads.
//
// Kernels are plain row loops that the compiler vectorises. A row function carries PIXFUSE_CLONES, so that one
// library holds a version for any x86-64, one for AVX2 and one for AVX-512, chosen when it is loaded.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && !defined(PIXFUSE_SANITIZE)
#define PIXFUSE_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PIXFUSE_CLONES
#endif
#define PIXFUSE_INLINE inline __attribute__((always_inline))

namespace pixfuse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- dtypes: 16-bit floats are stored as their bits, and converted without branches so that loops vectorise ----

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// The type that a kernel computes in: double for double, float for everything else.
template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

PIXFUSE_INLINE float load(float v) { return v; }
PIXFUSE_INLINE double load(double v) { return v; }
PIXFUSE_INLINE float load(bfloat16 v) { return std::bit_cast<float>(uint32_t(v.bits) << 16); }
PIXFUSE_INLINE float load(float16 v) {
  uint32_t magnitude = uint32_t(v.bits & 0x7fff) << 13;
  float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // subnormals come out right, inf and NaN do not
  uint32_t bits = std::bit_cast<uint32_t>(scaled);
  bits = (v.bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000u : bits;
  return std::bit_cast<float>(bits | uint32_t(v.bits & 0x8000) << 16);
}

// Rounding is to nearest, ties to even; NaN stays NaN.
template <class T>
PIXFUSE_INLINE T store(acc_t<T> v) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    uint32_t bits = std::bit_cast<uint32_t>(v);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
  } else if constexpr (std::is_same_v<T, float16>) {
    uint32_t bits = std::bit_cast<uint32_t>(v);
    uint32_t magnitude = bits & 0x7fffffffu;
    // Normal halves: rebias the exponent and round. Subnormal halves: let a float addition round.
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
    uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x47800000u ? special : half;
    return {uint16_t(half | (bits >> 16 & 0x8000u))};
  } else {
    return v;
  }
}

// Call f with a value of the C++ type of a floating dtype: f(float{}), f(bfloat16{}), ...
template <class F>
void dispatch_floating(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::BFloat16:
      return f(bfloat16{});
    case ScalarType::Half:
      return f(float16{});
    default:
      STD_TORCH_CHECK(false, "pixfuse: a float64, float32, bfloat16 or float16 tensor is required");
  }
}

inline ScalarType acc_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// --- layouts: the same two, by the same rules, as in layout.py -------------------------------------------------

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}

inline bool is_channels_last(const Tensor& t) {
  int64_t rank = t.dim();
  if (rank < 3 || rank > 5 || t.stride(1) == 0) return false;
  int64_t reach = 0;
  for (int64_t d = 1; d != 0; d = d == 1 ? rank - 1 : (d == 2 ? 0 : d - 1)) {
    if (t.size(d) == 0 || t.stride(d) < reach) return false;
    reach = t.stride(d) * t.size(d);
  }
  return reach != t.stride(1);
}

inline std::vector<int64_t> dense_strides(std::span<const int64_t> sizes, bool channels_last) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  auto place = [&](size_t d) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  };
  if (channels_last) place(1);
  for (size_t d = sizes.size(); d-- > 0;) {
    if (!(channels_last && d == 1)) place(d);
  }
  return strides;
}

// An uninitialised dense tensor. new_empty fills it with NaN in deterministic mode, which the tests look at; the
// strides come after, since a call of empty_strided by name takes four times as long.
inline Tensor empty_dense(const Tensor& like, std::span<const int64_t> sizes, bool channels_last,
                          std::optional<ScalarType> dtype = std::nullopt) {
  int32_t kind;
  if (dtype)
    kind = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  else
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &kind));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), sizes.data(), int64_t(sizes.size()), &kind, nullptr,
                                                   nullptr, 0, nullptr, &handle));
  Tensor result(handle);
  if (!channels_last) return result;
  const auto strides = dense_strides(sizes, true);
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(handle, int64_t(sizes.size()), sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty_dense(const Tensor& like, std::initializer_list<int64_t> sizes, bool channels_last,
                          std::optional<ScalarType> dtype = std::nullopt) {
  return empty_dense(like, std::span(sizes.begin(), sizes.size()), channels_last, dtype);
}

inline bool is_dense(const Tensor& t, bool channels_last) {
  auto sizes = t.sizes();
  auto strides = dense_strides({sizes.data(), sizes.size()}, channels_last);
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) != 1 && t.stride(d) != strides[d]) return false;
  }
  return true;
}

// t itself where its elements already lie densely in the layout, else a dense copy.
inline Tensor to_dense(const Tensor& t, bool channels_last) {
  if (t.numel() == 0 || is_dense(t, channels_last)) return t;
  Tensor copy = empty_dense(t, sizes_of(t), channels_last);
  return torch::stable::copy_(copy, t);
}

// A parameter vector (bias, weight) of any floating dtype, or nothing, as dense values of type A.
template <class A>
std::vector<A> parameter(const std::optional<Tensor>& t) {
  std::vector<A> values;
  if (!t) return values;
  values.resize(t->numel());
  int64_t stride = t->dim() ? t->stride(0) : 1;
  dispatch_floating(t->scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const T* from = data<T>(*t);
    for (size_t i = 0; i < values.size(); ++i) values[i] = A(load(from[i * stride]));
  });
  return values;
}

// --- threads ---------------------------------------------------------------------------------------------------

// Run f(begin, end) over [0, count). `cost` is about how many elements one item touches. What f computes for an item
// must not depend on how the items are split. f must not throw.
template <class F>
void parallel(int64_t count, int64_t cost, const F& f) {
  constexpr int64_t kGrain = 1 << 15;  // elements a thread should have at least
  int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(cost, 1));
  if (count <= grain) {
    if (count > 0) f(int64_t(0), count);
    return;
  }
  torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace pixfuse
