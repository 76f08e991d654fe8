#include "base/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace psrl {
namespace {

constexpr size_t kSmall = 1024;  // not worth the trouble

#if defined(__x86_64__)
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

bool has_avx() {
  static const bool has = __builtin_cpu_supports("avx") != 0;
  return has;
}
#endif

}  // namespace

void copy_past_caches(std::byte* to, const std::byte* from, size_t length) {
#if defined(__x86_64__)
  if (length >= kSmall && has_avx()) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    const size_t lines = (length - head) / kLine;
    std::memcpy(to, from, head);
    stream_lines(to + head, from + head, lines);
    const size_t done = head + lines * kLine;
    std::memcpy(to + done, from + done, length - done);
    _mm_sfence();  // such stores are not ordered by the release that publishes the bytes
    return;
  }
#endif
  std::memcpy(to, from, length);
}

}  // namespace psrl
