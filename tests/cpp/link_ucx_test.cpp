// What is special to the ucx transport; the promises that it shares with tcp are in
// link_contract_test.cpp.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/errors.h"
#include "link/link.h"
#include "link/region.h"

namespace psrl::link {
namespace {

using namespace std::chrono_literals;

// Before any test: UCX and its settings are those of this build, unless the caller has chosen.
const bool environment_is_set = [] {
#ifdef PSRL_TEST_UCX
  ::setenv("PSRL_UCX", PSRL_TEST_UCX, 0);
#endif
  return ::setenv("UCX_TLS", "tcp,self", 0) == 0;
}();

#ifndef PSRL_WITH_UCX

TEST(LinkUcx, SaysThatItWasNotBuilt) { EXPECT_THROW(make_ucx_endpoint({}), LinkError); }

#else

class Memory {
 public:
  explicit Memory(size_t size, int fill = 0)
      : bytes_(std::make_shared<std::vector<std::byte>>(size, static_cast<std::byte>(fill))) {}
  RegionPtr add_to(Endpoint& endpoint) const { return endpoint.add_region(*bytes_, bytes_); }
  std::byte* data() const { return bytes_->data(); }
  size_t size() const { return bytes_->size(); }
  void scribble(unsigned seed) const {
    for (size_t i = 0; i < bytes_->size(); ++i) {
      (*bytes_)[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 13);
    }
  }

 private:
  std::shared_ptr<std::vector<std::byte>> bytes_;
};

Event wait_for(Endpoint& endpoint, Event::Kind kind, OpId op = 0) {
  static std::map<Endpoint*, std::vector<Event>> unread;
  auto& seen = unread[&endpoint];
  for (const auto until = Clock::now() + 10s; Clock::now() < until;) {
    for (auto& event : endpoint.poll()) seen.push_back(std::move(event));
    for (auto at = seen.begin(); at != seen.end(); ++at) {
      if (at->kind != kind || (op != 0 && at->op != op)) continue;
      const Event found = *at;
      seen.erase(at);
      return found;
    }
    std::this_thread::sleep_for(100us);
  }
  ADD_FAILURE() << "no such event";
  return {};
}

struct Pair {
  std::unique_ptr<Endpoint> a = make_ucx_endpoint({.name = "a", .token = {}});
  std::unique_ptr<Endpoint> b = make_ucx_endpoint({.name = "b", .token = {}});
  PeerId b_of_a = 0, a_of_b = 0;
  Pair() {
    const OpId op = a->connect(b->address(), Clock::now() + 5s);
    const Event done = wait_for(*a, Event::Kind::kDone, op);
    EXPECT_EQ(done.status, Status::kOk) << done.text;
    EXPECT_EQ(done.text, "b");
    b_of_a = done.peer;
    const Event connected = wait_for(*b, Event::Kind::kPeerConnected);
    EXPECT_EQ(connected.text, "a");
    a_of_b = connected.peer;
  }
};

TEST(LinkUcx, PutsAndPulls) {
  Pair pair;
  std::cerr << pair.a->describe() << "\n";
  const Memory source(32 << 20), target(32 << 20);
  source.scribble(1);
  const auto from = source.add_to(*pair.a);
  const auto into = target.add_to(*pair.b);
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1}, uint64_t{1000}, uint64_t{65537}, uint64_t{32 << 20}}) {
    std::memset(target.data(), 0, target.size());
    const auto advert = pair.b->advertise(into, 0, target.size(), WindowAccess::kPut);
    const std::vector<Piece> pieces{{0, 0, size}};
    const OpId put = pair.a->put(pair.b_of_a, advert, from, pieces, "there", Clock::now() + 5s);
    const Event done = wait_for(*pair.a, Event::Kind::kDone, put);
    EXPECT_EQ(done.status, Status::kOk) << done.text;
    EXPECT_EQ(wait_for(*pair.b, Event::Kind::kNotice).text, "there");
    EXPECT_EQ(std::memcmp(source.data(), target.data(), size), 0);
    pair.b->withdraw(advert);
    const OpId again = pair.a->put(pair.b_of_a, advert, from, pieces, "stale", Clock::now() + 5s);
    EXPECT_EQ(wait_for(*pair.a, Event::Kind::kDone, again).status, Status::kStale);

    std::memset(target.data(), 0, target.size());
    const auto readable = pair.a->advertise(from, 0, source.size(), WindowAccess::kPull);
    const OpId pull = pair.b->pull(pair.a_of_b, readable, into, pieces, Clock::now() + 5s);
    const Event pulled = wait_for(*pair.b, Event::Kind::kDone, pull);
    EXPECT_EQ(pulled.status, Status::kOk) << pulled.text;
    EXPECT_EQ(std::memcmp(source.data(), target.data(), size), 0);
  }
  std::thread other([&] { EXPECT_TRUE(pair.b->close(Clock::now() + 2s)); });
  EXPECT_TRUE(pair.a->close(Clock::now() + 2s));
  other.join();
  EXPECT_EQ(wait_for(*pair.a, Event::Kind::kPeerLost).status, Status::kClosed);
  EXPECT_EQ(wait_for(*pair.b, Event::Kind::kPeerLost).status, Status::kClosed);
}

#endif

}  // namespace
}  // namespace psrl::link
