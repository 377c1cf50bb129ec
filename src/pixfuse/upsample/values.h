// Values on their way from and to memory: conversions, and a writer that takes large outputs past the caches.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pixfuse {
namespace {

PIXFUSE_INLINE float fetch(uint8_t v) { return float(v); }
template <class T>
PIXFUSE_INLINE acc_t<T> fetch(T v) {
  return load(v);
}

template <class T>
PIXFUSE_INLINE T round_to(acc_t<T> v) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    v = v > 0.0f ? v : 0.0f;  // also NaN
    v = v < 255.0f ? v : 255.0f;
    return uint8_t(std::bit_cast<uint32_t>(v + 0x1.8p23f));  // to nearest, ties to even
  } else {
    return store<T>(v);
  }
}

// memcpy past the caches, which leaves out reading the lines that are overwritten: half the traffic of a large output.
inline void stream(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  auto* t = static_cast<char*>(to);
  auto* f = static_cast<const char*>(from);
  const size_t head = std::min(-reinterpret_cast<uintptr_t>(t) % 64, bytes), lines = (bytes - head) / 64;
  std::memcpy(t, f, head);
  t += head, f += head, bytes -= head;
  for (size_t i = 0; i < lines; ++i, t += 64, f += 64) {
    for (int k = 0; k < 64; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(t + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(f + k)));
    }
  }
  std::memcpy(t, f, bytes - 64 * lines);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Where a thread's outputs go, which lie one after another: a large tensor's in blocks, past the caches.
template <class T>
class Writer {
 public:
  Writer(T* y, int64_t total) : to_(y) {
    if (total * sizeof(T) >= kLarge) stage_.resize(kStage / sizeof(T));
  }
  ~Writer() {
    flush();
#if defined(__SSE2__)
    if (!stage_.empty()) _mm_sfence();
#endif
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  // Room for the next n outputs; the room given before keeps its contents unless it is the same.
  T* next(int64_t n) {
    if (filled_ * sizeof(T) >= kBlock || filled_ + n > int64_t(stage_.size())) flush();
    if (n > int64_t(stage_.size())) return std::exchange(to_, to_ + n);
    filled_ += n;
    return stage_.data() + filled_ - n;
  }

 private:
  static constexpr size_t kLarge = 4 << 20, kStage = 64 << 10, kBlock = 8 << 10;
  void flush() {
    if (filled_ == 0) return;  // there may be no stage at all
    stream(to_, stage_.data(), filled_ * sizeof(T));
    to_ += std::exchange(filled_, 0);
  }
  T* to_;
  std::vector<T> stage_;
  int64_t filled_ = 0;
};

}  // namespace
}  // namespace pixfuse
