// What is special to the ucx transport; the promises that it shares with tcp are in
// link_contract_test.cpp.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <future>
#include <random>

#include "base/errors.h"
#include "link/link.h"

#ifndef PSRL_WITH_UCX

namespace psrl::link {
namespace {

TEST(LinkUcx, SaysThatItWasNotBuilt) { EXPECT_THROW(make_ucx_endpoint({}), LinkError); }

}  // namespace
}  // namespace psrl::link

#else

#include "link/ucx_wire.h"
#include "link_testing.h"

namespace psrl::link::testing {
namespace {

// Before any test, also those of the contract: the UCX that this build has headers of, and sockets,
// as between nodes, unless the caller has chosen.
const bool environment_is_set = [] {
#ifdef PSRL_TEST_UCX
  ::setenv("PSRL_UCX", PSRL_TEST_UCX, 0);
#endif
#ifdef __SANITIZE_THREAD__
  ::setenv("UCX_MEM_EVENTS", "n", 0);  // its hooks patch functions that the sanitizer has patched
#endif
  return ::setenv("UCX_TLS", "tcp,self", 0) == 0;
}();

// An environment variable for the time of a test.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Setting() { ::unsetenv(name_); }

 private:
  const char* name_;
};

// A put and a pull of some MiB, and windows that are withdrawn in the middle of both.
void exercise() {
  constexpr size_t kBytes = 24 << 20;
  Node a("ucx", "a", kBytes), b("ucx", "b", kBytes);
  const PeerId peer = a.connect(b->address());
  a.fill(1);
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{5, 3, kBytes - 8}}, "n")).status, Status::kOk);
  ASSERT_TRUE(b.next(Event::Kind::kNotice));
  EXPECT_TRUE(b.holds(1, 3, kBytes - 8, 5));
  b.fill(2);
  const OpId pull = a.pull(peer, b.window(WindowAccess::kPull), {{5, 3, kBytes - 8}});
  EXPECT_EQ(a.done(pull).status, Status::kOk);
  EXPECT_TRUE(a.holds(2, 5, kBytes - 8, 3));
  for (const auto access : {WindowAccess::kPut, WindowAccess::kPull}) {
    std::memset(a.data(), access == WindowAccess::kPut ? 1 : 0, kBytes);
    std::memset(b.data(), access == WindowAccess::kPut ? 0 : 1, kBytes);
    const Advert window = b.window(access);
    const bool put = access == WindowAccess::kPut;
    const OpId op =
        put ? a.put(peer, window, {{0, 0, kBytes}}) : a.pull(peer, window, {{0, 0, kBytes}});
    (put ? b : a).wait_for_byte(0);
    b->withdraw(window);
    std::memset(b.data(), 2, kBytes);
    const Event event = a.done(op);
    EXPECT_TRUE(event.status == Status::kStale || event.status == Status::kOk ||
                event.status == Status::kPeerLost)
        << event.text;
    a.done(a->flush(peer, in(kPatience)));
    ASSERT_EQ(b.data()[0], std::byte{2});
    ASSERT_EQ(std::memcmp(b.data(), b.data() + 1, kBytes - 1), 0) << "not all bytes are alike";
    if (event.status == Status::kPeerLost) return;  // slow to answer on a busy machine: cut off
  }
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, kBytes}})).status, Status::kOk);
}

TEST(LinkUcx, TrueGets) {
  const Setting setting("PSRL_UCX_GET", "1");
  exercise();
}

TEST(LinkUcx, ChunksInMessages) {
  const Setting setting("PSRL_UCX_PUT", "0");
  exercise();
}

TEST(LinkUcx, TellsWhichUcxOverWhat) {
  Node a("ucx", "a"), b("ucx", "b");
  EXPECT_EQ(a->describe().rfind("ucx 1.", 0), 0u) << a->describe();
  EXPECT_NE(a->describe().find("libucp.so.0"), std::string::npos) << a->describe();
  a.connect(b->address());
  EXPECT_NE(a->describe().find(" over tcp/"), std::string::npos) << a->describe();
}

TEST(LinkUcx, IdleCostsNothing) {
  Node a("ucx", "a"), b("ucx", "b");
  const PeerId peer = a.connect(b->address());
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, a.size()}}, "n")).status, Status::kOk);
  const auto used = [] {
    timespec time;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  std::this_thread::sleep_for(100ms);
  const auto before = used();
  std::this_thread::sleep_for(2s);
  EXPECT_LT(used() - before, 10ms);  // 0.5 %
}

// A sender that stands still in the middle of a put cannot be asked to stop: it is cut off, and
// what it had sent goes nowhere.
TEST(LinkUcx, WithdrawCutsOffASenderThatStandsStill) {
  constexpr size_t kBytes = 32 << 20;
  for (const char* put : {"1", "0"}) {
    const Setting setting("PSRL_UCX_PUT", put);
    PeerProcess child("ucx", kBytes);
    ASSERT_EQ(child.ask("fill 40"), "ok");
    Node b("ucx", "b", kBytes);
    const Advert window = b.window();
    ASSERT_EQ(child.ask("put " + b->address() + " " + to_hex(window.encode())), "ok");
    const auto connected = b.next(Event::Kind::kPeerConnected);
    ASSERT_TRUE(connected);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(b.next(Event::Kind::kNotice));
    child.signal(SIGSTOP);
    const Deadline begun = Clock::now();
    b->withdraw(window);
    EXPECT_LT(Clock::now() - begun, 10s);
    std::memset(b.data(), 2, kBytes);
    child.signal(SIGCONT);
    std::this_thread::sleep_for(300ms);
    ASSERT_EQ(b.data()[0], std::byte{2});
    ASSERT_EQ(std::memcmp(b.data(), b.data() + 1, kBytes - 1), 0) << "not all bytes are alike";
  }
}

// ---- messages

ucx::Message some_message(std::mt19937_64& random) {
  ucx::Message message{.kind = static_cast<ucx::Kind>(1 + random() % 14),
                       .status = static_cast<Status>(random() % 6),
                       .access = random() % 2 ? WindowAccess::kPut : WindowAccess::kPull,
                       .op = random(),
                       .window = random(),
                       .generation = random(),
                       .base = random()};
  message.text.assign(random() % 40, static_cast<char>(random()));
  message.key.assign(random() % 40, static_cast<char>(random()));
  for (size_t i = random() % 5; i > 0; --i)
    message.pieces.push_back({random(), random(), random()});
  return message;
}

TEST(LinkUcxWire, MessagesSurvive) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const ucx::Message sent = some_message(random);
    const std::string bytes = encode(sent) + "payload";
    std::string_view rest;
    const ucx::Message got = ucx::decode(bytes, &rest);
    EXPECT_EQ(encode(got), encode(sent));
    EXPECT_EQ(rest, "payload");
  }
}

TEST(LinkUcxWire, BrokenMessagesAreRefused) {
  std::mt19937_64 random(2);
  std::string_view rest;
  for (int i = 0; i < 50'000; ++i) {
    std::string bytes = encode(some_message(random));
    for (size_t changes = 1 + random() % 3; changes > 0; --changes) {
      bytes[random() % (i % 2 ? bytes.size() : 56)] = static_cast<char>(random());
    }
    bytes.resize(random() % (bytes.size() + 1));
    try {
      ucx::decode(bytes, &rest);
      EXPECT_GE(bytes.size(), 56u);
    } catch (const LinkError&) {
    }
  }
  EXPECT_THROW(ucx::decode("", &rest), LinkError);
}

// ---- two namespaces with a real link between them; the parts run in `ip netns exec`

class Namespaces {
 public:
  static constexpr const char* kHosts[2] = {"10.93.71.1", "10.93.71.2"};
  Namespaces() : stem_("psrlt" + std::to_string(::getpid())) {
    made_ = run("ip netns add " + ns(0)) && run("ip netns add " + ns(1)) &&
            run("ip link add veth0 netns " + ns(0) + " type veth peer name veth0 netns " + ns(1));
    for (int side = 0; made_ && side < 2; ++side) {
      const std::string in_ns = "ip -n " + ns(side) + " ";
      made_ = run(in_ns + "addr add " + kHosts[side] + "/24 dev veth0") &&
              run(in_ns + "link set veth0 up") && run(in_ns + "link set lo up");
    }
  }
  ~Namespaces() {
    for (int side = 0; side < 2; ++side) run("ip netns del " + ns(side));
  }
  bool made() const { return made_; }
  // Runs one of the disabled tests below in a namespace; true if it passes.
  bool run_test(int side, const std::string& name, const std::string& file) const {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    return std::system(("ip netns exec " + ns(side) + " env -u GTEST_FILTER PSRL_TEST_FILE=" +
                        file + " " + self + " --gtest_brief=1 --gtest_also_run_disabled_tests" +
                        " --gtest_filter=LinkUcxNamespaces.DISABLED_" + name)
                           .c_str()) == 0;
  }

 private:
  std::string ns(int side) const { return stem_ + "ab"[side]; }
  static bool run(const std::string& command) {
    return std::system((command + " > /dev/null 2>&1").c_str()) == 0;
  }
  std::string stem_;
  bool made_ = false;
};

constexpr size_t kNamespaceBytes = 32 << 20;

std::shared_ptr<std::vector<std::byte>> pattern() {
  auto memory = std::make_shared<std::vector<std::byte>>(kNamespaceBytes);
  for (size_t i = 0; i < memory->size(); ++i) (*memory)[i] = Node::pattern(3, i);
  return memory;
}

// The next event of a kind; others are kept. For one endpoint in a process.
Event take(Endpoint& endpoint, Event::Kind kind) {
  static std::vector<Event> events;
  for (const Deadline deadline = in(kPatience); Clock::now() < deadline;) {
    for (Event& event : endpoint.poll()) events.push_back(std::move(event));
    for (auto event = events.begin(); event != events.end(); ++event) {
      if (event->kind != kind) continue;
      const Event found = *event;
      events.erase(event);
      return found;
    }
    std::this_thread::sleep_for(1ms);
  }
  ADD_FAILURE() << "no event";
  return {};
}

TEST(LinkUcxNamespaces, DISABLED_Receiver) {
  const char* const file = std::getenv("PSRL_TEST_FILE");
  if (file == nullptr) GTEST_SKIP() << "a helper of another test";
  const auto endpoint =
      make_ucx_endpoint({.name = "b", .host = Namespaces::kHosts[1], .token = {}});
  const auto memory = std::make_shared<std::vector<std::byte>>(kNamespaceBytes);
  const RegionPtr region = endpoint->add_region(Bytes(*memory), memory);
  const Advert put = endpoint->advertise(region, 0, kNamespaceBytes, WindowAccess::kPut);
  const Advert pull = endpoint->advertise(region, 0, kNamespaceBytes, WindowAccess::kPull);
  std::ofstream(std::string(file) + ".part")
      << endpoint->address() << " " << to_hex(put.encode()) << " " << to_hex(pull.encode()) << "\n";
  std::filesystem::rename(std::string(file) + ".part", file);
  EXPECT_EQ(take(*endpoint, Event::Kind::kNotice).text, "there");
  EXPECT_TRUE(*memory == *pattern());
  EXPECT_EQ(take(*endpoint, Event::Kind::kPeerLost).status, Status::kClosed);
}

TEST(LinkUcxNamespaces, DISABLED_Sender) {
  const char* const file = std::getenv("PSRL_TEST_FILE");
  if (file == nullptr) GTEST_SKIP() << "a helper of another test";
  const Deadline deadline = in(kPatience);
  while (!std::filesystem::exists(file) && Clock::now() < deadline)
    std::this_thread::sleep_for(1ms);
  std::string address, put, pull;
  std::ifstream(file) >> address >> put >> pull;
  const auto endpoint =
      make_ucx_endpoint({.name = "a", .host = Namespaces::kHosts[0], .token = {}});
  endpoint->connect(address, in(kPatience));
  const Event connected = take(*endpoint, Event::Kind::kDone);
  ASSERT_EQ(connected.status, Status::kOk) << connected.text;
  EXPECT_NE(endpoint->describe().find(" over tcp/veth0"), std::string::npos)
      << endpoint->describe();
  auto memory = pattern();
  const RegionPtr region = endpoint->add_region(Bytes(*memory), memory);
  const Piece all{0, 0, kNamespaceBytes};
  endpoint->pull(connected.peer, Advert::decode(from_hex(pull)), region, {&all, 1}, in(kPatience));
  EXPECT_EQ(take(*endpoint, Event::Kind::kDone).status, Status::kOk);
  EXPECT_EQ((*memory)[kNamespaceBytes - 1], std::byte{0});
  *memory = *pattern();
  endpoint->put(connected.peer, Advert::decode(from_hex(put)), region, {&all, 1}, "there",
                in(kPatience));
  EXPECT_EQ(take(*endpoint, Event::Kind::kDone).status, Status::kOk);
  EXPECT_TRUE(endpoint->close(in(kPatience)));
}

TEST(LinkUcxNamespaces, OverARealLink) {
  const Namespaces namespaces;
  if (!namespaces.made()) GTEST_SKIP() << "network namespaces need root and iproute2";
  std::string file = (std::filesystem::temp_directory_path() / "psrl-XXXXXX").string();
  ::close(::mkstemp(file.data()));
  std::filesystem::remove(file);
  auto receiver =
      std::async(std::launch::async, [&] { return namespaces.run_test(1, "Receiver", file); });
  EXPECT_TRUE(namespaces.run_test(0, "Sender", file));
  EXPECT_TRUE(receiver.get());
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace psrl::link::testing

#endif  // PSRL_WITH_UCX
