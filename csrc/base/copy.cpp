#include "base/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace psrl {
namespace {

constexpr size_t kPastCaches = 128 * 1024;
constexpr size_t kPerThread = 8 << 20;
constexpr size_t kMaxThreads = 4;  // others want to work, too

#if defined(__x86_64__)
constexpr size_t kSmall = 1024;  // not worth the trouble
constexpr size_t kLine = 64;

// Whole lines to an aligned target.
__attribute__((target("avx"))) void stream_lines(std::byte* to, const std::byte* from,
                                                 size_t num_lines) {
  constexpr size_t kAhead = 8 * kLine;
  for (size_t i = 0; i < num_lines; ++i, to += kLine, from += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_NTA);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
  }
}

void copy_past_caches(const Copy& copy) {
  static const bool has_avx = __builtin_cpu_supports("avx") != 0;
  if (copy.length < kSmall || !has_avx) {
    std::memcpy(copy.to, copy.from, copy.length);
    return;
  }
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(copy.to) % kLine) % kLine;
  const size_t lines = (copy.length - head) / kLine;
  std::memcpy(copy.to, copy.from, head);
  stream_lines(copy.to + head, copy.from + head, lines);
  const size_t done = head + lines * kLine;
  std::memcpy(copy.to + done, copy.from + done, copy.length - done);
}

// Such stores are not ordered by the release that publishes the bytes.
void finish() { _mm_sfence(); }
#else
void copy_past_caches(const Copy& copy) { std::memcpy(copy.to, copy.from, copy.length); }
void finish() {}
#endif

// Those bytes of all the copies, as if they were one after the other.
void copy_range(std::span<const Copy> copies, size_t begin, size_t end) {
  size_t start = 0;
  for (const Copy& copy : copies) {
    const size_t from = std::max(begin, start);
    const size_t until = std::min(end, start + copy.length);
    if (from < until) {
      copy_past_caches({copy.to + (from - start), copy.from + (from - start), until - from});
    }
    start += copy.length;
    if (start >= end) break;
  }
  finish();
}

}  // namespace

void copy_all(std::span<const Copy> copies) {
  size_t total = 0;
  for (const Copy& copy : copies) total += copy.length;
  if (total < kPastCaches) {
    for (const Copy& copy : copies) {
      if (copy.length > 0) std::memcpy(copy.to, copy.from, copy.length);
    }
    return;
  }
  static const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t num_threads =
      std::clamp<size_t>(total / kPerThread, 1, std::min(kMaxThreads, cores));
  const size_t share = total / num_threads / 64 * 64;
  std::vector<std::jthread> helpers;
  for (size_t i = 1; i < num_threads; ++i) {
    helpers.emplace_back(
        [=] { copy_range(copies, i * share, i + 1 == num_threads ? total : (i + 1) * share); });
  }
  copy_range(copies, 0, num_threads == 1 ? total : share);
}

}  // namespace psrl
