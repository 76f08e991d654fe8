// What tests of links share: endpoints with memory, waiting for events, and peers in processes of
// their own that can be stopped and killed.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "link/link.h"
#include "link/region.h"

namespace psrl::link::testing {

using namespace std::chrono_literals;

inline constexpr auto kPatience = 60s;  // sanitizers on a busy machine
inline const std::string kToken = "a token for tests alone";

inline Deadline in(Clock::duration time) { return Clock::now() + time; }

// A transport under the contract. To join: add it to transports().
struct Transport {
  std::string name;
  std::unique_ptr<Endpoint> (*make)(const EndpointOptions& options);
};
std::vector<Transport> transports();

inline std::unique_ptr<Endpoint> make_endpoint(const std::string& transport,
                                               const std::string& name) {
  for (const Transport& known : transports()) {
    if (known.name == transport) return known.make({name, "127.0.0.1", 0, kToken});
  }
  throw std::runtime_error("no transport " + transport);
}

// An endpoint, some memory and the events so far.
class Node {
 public:
  Node(const std::string& transport, const std::string& name, size_t bytes = 1 << 20)
      : memory_(std::make_shared<std::vector<std::byte>>(bytes)),
        endpoint_(make_endpoint(transport, name)),
        region_(endpoint_->add_region(Bytes(*memory_), memory_)) {}

  Endpoint* operator->() { return endpoint_.get(); }
  Endpoint& endpoint() { return *endpoint_; }
  const RegionPtr& region() const { return region_; }
  std::byte* data() { return memory_->data(); }
  size_t size() const { return memory_->size(); }
  void destroy() {
    region_.reset();
    endpoint_.reset();
  }

  // These look at memory also where a race detector cannot see why they may: another process said
  // that the bytes are there.
  [[gnu::no_sanitize("thread"), gnu::noinline]] void fill(uint64_t seed) {
    std::byte* const data = this->data();
    for (size_t i = 0; i < size(); ++i) data[i] = pattern(seed, i);
  }
  static std::byte pattern(uint64_t seed, size_t at) {
    return static_cast<std::byte>((seed * 1'000'003 + at * 2'654'435'761u) >> 13);
  }
  [[gnu::no_sanitize("thread"), gnu::noinline]] bool holds(uint64_t seed, size_t offset,
                                                           size_t length, size_t from = ~0ull) {
    const std::byte* const data = this->data();
    if (from == ~0ull) from = offset;
    for (size_t i = 0; i < length; ++i) {
      if (data[offset + i] != pattern(seed, from + i)) return false;
    }
    return true;
  }

  // Waits until a byte that is 0 changes under us: a look at what is under way.
  [[gnu::no_sanitize("thread"), gnu::noinline]] void wait_for_byte(size_t at) {
    const volatile std::byte* const byte = data() + at;
    const Deadline deadline = in(kPatience);
    while (*byte == std::byte{0} && Clock::now() < deadline) std::this_thread::yield();
  }

  Advert window(WindowAccess access = WindowAccess::kPut) {
    return endpoint_->advertise(region_, 0, size(), access);
  }

  // Waits for the first event that `wanted` likes and takes it out; nothing at the deadline.
  std::optional<Event> wait(const std::function<bool(const Event&)>& wanted,
                            Clock::duration patience = kPatience) {
    const Deadline deadline = in(patience);
    while (true) {
      for (Event& event : endpoint_->poll()) events.push_back(std::move(event));
      for (auto event = events.begin(); event != events.end(); ++event) {
        if (!wanted(*event)) continue;
        const Event found = *event;
        events.erase(event);
        return found;
      }
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return std::nullopt;
      pollfd polled{endpoint_->fd(), POLLIN, 0};
      ::poll(&polled, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    }
  }

  // The end of an operation.
  Event done(OpId op, Clock::duration patience = kPatience) {
    const auto event =
        wait([op](const Event& e) { return e.kind == Event::Kind::kDone && e.op == op; }, patience);
    if (!event) {
      ADD_FAILURE() << "operation " << op << " did not end";
      return {Event::Kind::kDone, 0, op, Status::kTimeout, "the test gave up"};
    }
    return *event;
  }
  // The next event of a kind, of any peer or one.
  std::optional<Event> next(Event::Kind kind, PeerId peer = 0,
                            Clock::duration patience = kPatience) {
    return wait([=](const Event& e) { return e.kind == kind && (peer == 0 || e.peer == peer); },
                patience);
  }
  PeerId connect(const std::string& address) {
    const Event event = done(endpoint_->connect(address, in(kPatience)));
    EXPECT_EQ(event.status, Status::kOk) << event.text;
    return event.peer;
  }
  OpId put(PeerId peer, const Advert& into, std::vector<Piece> pieces, std::string_view notice = {},
           Clock::duration time = kPatience, EventSink* sink = nullptr) {
    return endpoint_->put(peer, into, region_, pieces, notice, in(time), sink);
  }
  OpId pull(PeerId peer, const Advert& from, std::vector<Piece> pieces,
            Clock::duration time = kPatience, EventSink* sink = nullptr) {
    return endpoint_->pull(peer, from, region_, pieces, in(time), sink);
  }

  std::vector<Event> events;  // not taken yet

 private:
  std::shared_ptr<std::vector<std::byte>> memory_;
  std::unique_ptr<Endpoint> endpoint_;
  RegionPtr region_;
};

inline std::string to_hex(std::string_view bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text.empty() ? "-" : text;
}

inline std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// Another process with one endpoint. It is this test program again, started afresh (no threads or
// descriptors of ours in it), and does what it is told, line by line, over two pipes: see
// link_peer_test.cpp. It ends with its pipe.
class PeerProcess {
 public:
  PeerProcess(const std::string& transport, size_t bytes) {
    int to[2], from[2];
    if (::pipe(to) != 0 || ::pipe(from) != 0) throw std::runtime_error("pipe");
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addclose(&actions, to[1]);
    ::posix_spawn_file_actions_addclose(&actions, from[0]);
    ::posix_spawn_file_actions_adddup2(&actions, to[0], 3);
    ::posix_spawn_file_actions_adddup2(&actions, from[1], 4);
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> arguments = {self, "--gtest_filter=LinkPeer.DISABLED_Run",
                                          "--gtest_also_run_disabled_tests", "--gtest_brief=1"};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    std::vector<std::string> settings = {"PSRL_LINK_PEER=" + transport + " " +
                                         std::to_string(bytes)};
    std::vector<char*> envp;
    for (std::string& setting : settings) envp.push_back(setting.data());
    for (char** variable = environ; *variable != nullptr; ++variable) {
      // The test runner's wishes are not for this process.
      if (std::strncmp(*variable, "GTEST_", 6) != 0) envp.push_back(*variable);
    }
    envp.push_back(nullptr);
    if (::posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv.data(), envp.data()) != 0) {
      throw std::runtime_error("posix_spawn");
    }
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(to[0]);
    ::close(from[1]);
    to_ = ::fdopen(to[1], "w");
    from_ = ::fdopen(from[0], "r");
    std::istringstream hello(read());
    std::string put, pull;
    hello >> address >> put >> pull;
    put_window = Advert::decode(from_hex(put));
    pull_window = Advert::decode(from_hex(pull));
  }
  ~PeerProcess() {
    if (pid_ > 0) ::kill(pid_, SIGCONT);
    std::fclose(to_);
    wait();
    std::fclose(from_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  std::string ask(const std::string& line) {
    std::fprintf(to_, "%s\n", line.c_str());
    std::fflush(to_);
    return read();
  }
  void signal(int number) { ::kill(pid_, number); }
  void stop() {  // has stopped when it returns
    signal(SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  void kill() {
    signal(SIGKILL);
    wait();
  }

  std::string address;
  Advert put_window, pull_window;

 private:
  std::string read() {
    char line[8192] = "";
    if (std::fgets(line, sizeof(line), from_) == nullptr) return "gone";
    line[std::strcspn(line, "\n")] = 0;
    return line;
  }
  void wait() {
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  FILE *to_ = nullptr, *from_ = nullptr;
};

}  // namespace psrl::link::testing
