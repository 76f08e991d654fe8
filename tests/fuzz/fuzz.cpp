// Makes bad inputs of good ones and feeds them to the target.
#include "fuzz.h"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

#include <unistd.h>

namespace psrl::fuzz {
namespace {

const std::vector<std::string>& good() {
  static const std::vector<std::string> inputs = seeds();
  return inputs;
}

// Some changes of the kinds that decoders fall over: bits, numbers at their limits, parts that are
// missing, there twice, elsewhere, or of another input.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  const std::string& any() { return good()[below(good().size())]; }

  void change(std::string& input) {
    for (uint64_t left = 1 + below(6); left > 0; --left) change_once(input);
  }

  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }

 private:
  void change_once(std::string& input) {
    const size_t size = input.size();
    const size_t at = below(size), length = 1 + below(std::min<size_t>(size - at, 40));
    switch (below(size == 0 ? 1 : 10)) {
      case 0:
        for (uint64_t left = 1 + below(16); left > 0; --left) {
          input.insert(below(input.size() + 1), 1, static_cast<char>(random_()));
        }
        return;
      case 1:
      case 2:
        input[at] ^= static_cast<char>(1 << below(8));
        return;
      case 3:
        input[at] = static_cast<char>(random_());
        return;
      case 4:
      case 5:
      case 6:
        return put_number(input, at);
      case 7:
        input.erase(at, length);
        return;
      case 8:
        input.insert(below(size + 1), input.substr(at, length));
        return;
      default:
        const std::string& other = any();
        const size_t from = below(other.size());
        input.replace(at, length, other.substr(from, 1 + below(64)));
    }
  }

  void put_number(std::string& input, size_t at) {
    const size_t width = std::min<size_t>(size_t{1} << below(4), input.size() - at);
    uint64_t number = 0;
    std::memcpy(&number, input.data() + at, width);
    const uint64_t kLimits[] = {0,
                                1,
                                number + 1,
                                number - 1,
                                ~uint64_t{},
                                ~0ull >> 1,
                                uint64_t{1} << 63,
                                uint64_t{1} << below(64),
                                below(256),
                                input.size(),
                                random_()};
    number = kLimits[below(std::size(kLimits))];
    std::memcpy(input.data() + at, &number, width);
  }

  std::mt19937_64 random_;
};

}  // namespace
}  // namespace psrl::fuzz

#ifdef PSRL_LIBFUZZER

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  psrl::fuzz::feed({reinterpret_cast<const char*>(data), size});
  return 0;
}

// Its own mutations, ours, or a fresh start from a good input: there is no corpus in files.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  psrl::fuzz::Mutator mutator(seed);
  const uint64_t how = size < 2 ? 0 : mutator.below(16);
  if (how > 8) return LLVMFuzzerMutate(data, size, max_size);
  std::string input = how == 0 ? mutator.any() : std::string(data, data + size);
  if (how != 0 || mutator.below(2) == 0) mutator.change(input);
  input.resize(std::min(input.size(), max_size));
  std::memcpy(data, input.data(), input.size());
  return input.size();
}

#else

namespace {

uint64_t seed = 1, number = 0;
const char* program = "";
constexpr unsigned kPatienceS = 30;  // of one input

// Only what a signal handler may do.
void tell_which_input() {
  char text[300];
  const int size = std::snprintf(
      text, sizeof(text),
      "\n%s: input %llu of -seed=%llu; alone: %s -seed=%llu -first=%llu -runs=1\n", program,
      static_cast<unsigned long long>(number), static_cast<unsigned long long>(seed), program,
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(number));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, static_cast<size_t>(size));
}

void on_signal(int signal) {
  tell_which_input();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

// Of the sanitizers' run time, if there is one.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

int main(int argc, char** argv) {
  uint64_t runs = 10'000;
  program = argv[0];
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const auto take = [&](std::string_view key, uint64_t& value) {
      if (argument.starts_with(key)) value = std::strtoull(argv[i] + key.size(), nullptr, 10);
    };
    take("-runs=", runs);
    take("-seed=", seed);
    take("-first=", number);
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(tell_which_input);
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGALRM}) {
    if (signal == SIGABRT || signal == SIGALRM || __sanitizer_set_death_callback == nullptr) {
      ::signal(signal, on_signal);
    }
  }
  for (const std::string& input : psrl::fuzz::good()) psrl::fuzz::feed(input);
  for (const uint64_t end = number + runs; number < end; ++number) {
    if (number % 256 == 0) ::alarm(kPatienceS);
    // Of the seed and its number alone, so that it can be made again.
    psrl::fuzz::Mutator mutator(seed * 0x9E3779B97F4A7C15 + number);
    std::string input = mutator.any();
    mutator.change(input);
    psrl::fuzz::feed(input);
  }
  std::printf("%s: %llu inputs, -seed=%llu\n", program, static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  return 0;
}

#endif
