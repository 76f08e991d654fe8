// Fuzzing: whatever decodes bytes that others wrote is fed with any bytes at all.
//
// Each *_fuzz.cpp has one target: good inputs, and what is done with one input. fuzz.cpp makes bad
// inputs of the good ones. Built by g++ it is a program of its own; built by clang, with
// PSRL_SANITIZE=fuzzer-no-link,address,undefined, the target runs under libFuzzer, which looks for
// inputs that reach code not reached before. Both take `-runs=N -seed=S`.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"

namespace psrl::fuzz {

// The target's: some good inputs.
std::vector<std::string> seeds();

// The target's: returns, whatever the input is; it raises only what it catches itself.
void feed(std::string_view input);

// What must hold of what was decoded.
inline void require(bool holds) {
  if (!holds) std::abort();
}

inline ConstBytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

inline std::string text_of(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace psrl::fuzz
