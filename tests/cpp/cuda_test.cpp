// The GPU's ends without a GPU: which copies a device is asked for, and what staging does when
// versions, checksums or the caller's mind change under it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "cuda/device.h"
#include "cuda/stage.h"

namespace psrl::cuda {
namespace {

using namespace std::chrono_literals;

// Copies with memcpy when `wait` is called, as late as a GPU might, and remembers what was asked.
class RecordingDevice final : public Device {
 public:
  RecordingDevice() : Device("recording") {}

  void wait() override {
    if (before_wait) before_wait();
    for (const auto& [into, from] : under_way) {
      std::memcpy(reinterpret_cast<std::byte*>(into), from.data(), from.size());
    }
    under_way.clear();
  }

  std::function<void()> before_wait;
  std::vector<std::pair<uint64_t, ConstBytes>> under_way;
  std::vector<ConstBytes> copies;
  std::vector<ConstBytes> pinned;
  bool read_only = false;
  size_t most_pinned = SIZE_MAX;

 protected:
  void start(uint64_t into, ConstBytes from) override {
    copies.push_back(from);
    under_way.emplace_back(into, from);
  }
  bool wants_registration() const override { return true; }
  void pin(ConstBytes piece, bool for_reading) override {
    if (pinned.size() >= most_pinned) throw StorageError("CUDA_ERROR_OUT_OF_MEMORY");
    pinned.push_back(piece);
    read_only = for_reading;
  }
  void unpin(ConstBytes piece) noexcept override {
    std::erase_if(pinned, [&](ConstBytes held) { return held.data() == piece.data(); });
  }
};

constexpr uint64_t kPiece = HostRegistration::kPieceBytes;

TEST(Registration, TakesWholePagesInPieces) {
  const auto segment = Segment::create("weights", 2 * kPiece + 5000, "key");
  const auto device = std::make_shared<RecordingDevice>();
  {
    const HostRegistration registration(device, segment, 0s);
    ASSERT_EQ(registration.num_pieces(), 3);
    uint64_t at = 0;
    for (const ConstBytes piece : device->pinned) {
      EXPECT_EQ(piece.data(), segment->const_bytes().data() + at);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data()) % 4096, 0);
      EXPECT_EQ(piece.size() % 4096, 0);
      at += piece.size();
    }
    EXPECT_EQ(at, 2 * kPiece + 8192);
    EXPECT_FALSE(device->read_only);
  }
  EXPECT_TRUE(device->pinned.empty());
}

TEST(Registration, SaysWhenTheMappingIsReadOnly) {
  const auto segment = Segment::create("weights", 5000, "key");
  const auto device = std::make_shared<RecordingDevice>();
  const HostRegistration registration(device, Segment::attach(segment->fd(), Access::kReadOnly),
                                      0s);
  EXPECT_TRUE(device->read_only);
}

TEST(Registration, ThatFailsLeavesNothingAndNamesTheSegment) {
  const auto segment = Segment::create("weights", 3 * kPiece, "key");
  const auto device = std::make_shared<RecordingDevice>();
  device->most_pinned = 2;
  try {
    const HostRegistration registration(device, segment, 0s);
    FAIL();
  } catch (const StorageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("segment weights: bytes 33554432 and on of 50331648"), text.npos) << text;
    EXPECT_NE(text.find("CUDA_ERROR_OUT_OF_MEMORY"), text.npos) << text;
  }
  EXPECT_TRUE(device->pinned.empty());
}

TEST(Registration, PausesBetweenPieces) {
  const auto segment = Segment::create("weights", 3 * kPiece, "key");
  const auto started = std::chrono::steady_clock::now();
  const HostRegistration registration(std::make_shared<RecordingDevice>(), segment, 30ms);
  EXPECT_GE(std::chrono::steady_clock::now() - started, 60ms);
}

TEST(Registration, IsNothingOnTheHost) {
  const auto segment = Segment::create("weights", 3 * kPiece, "key");
  const HostRegistration registration(Device::open("cpu"), segment, 1h);
  EXPECT_EQ(registration.num_pieces(), 0);
}

TEST(Copies, StayWithinAPiece) {
  const auto segment = Segment::create("weights", 2 * kPiece + 5000, "key");
  const auto device = std::make_shared<RecordingDevice>();
  HostRegistration registration(device, segment, 0s);
  const ConstBytes data = segment->const_bytes();
  std::vector<std::byte> into(data.size());
  const auto lengths = [&](uint64_t offset, uint64_t length) {
    device->copies.clear();
    device->copy(reinterpret_cast<uint64_t>(into.data()), data.subspan(offset, length));
    device->wait();
    std::vector<uint64_t> sizes;
    for (const ConstBytes copy : device->copies) sizes.push_back(copy.size());
    return sizes;
  };
  using Sizes = std::vector<uint64_t>;
  EXPECT_EQ(lengths(0, 100), Sizes({100}));
  EXPECT_EQ(lengths(kPiece - 100, 100), Sizes({100}));
  EXPECT_EQ(lengths(kPiece - 100, 101), Sizes({100, 1}));
  EXPECT_EQ(lengths(kPiece, 200), Sizes({200}));
  EXPECT_EQ(lengths(5, data.size() - 5), Sizes({kPiece - 5, kPiece, 5000}));
  registration.close();
  EXPECT_EQ(lengths(0, data.size()), Sizes({data.size()}));
}

TEST(Devices, AreKnownByName) {
  EXPECT_EQ(Device::open("cpu")->name(), "cpu");
  for (const char* name :
       {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999"}) {
    EXPECT_THROW(Device::open(name), StorageError) << name;
  }
  EXPECT_THROW(Device::open("cuda:4096"), StorageError);  // no driver, or not as many GPUs
}

constexpr weights::ManifestHash kHash{0x1122334455667788, 42};
constexpr uint64_t kData = 2 * weights::kChunkBytes + 1000;

class Staging : public ::testing::Test {
 protected:
  Staging()
      : segment_(Segment::create("weights", weights::WeightStore::required_bytes(kData), "key")),
        store_(weights::WeightStore::format(segment_->bytes(), kData, segment_)),
        device_(std::make_shared<RecordingDevice>()),
        stager_(store_, kHash, "replica", device_, reinterpret_cast<uint64_t>(buffer_.data())) {}

  void publish(uint64_t version, const weights::ManifestHash& hash = kHash) {
    const weights::Ticket ticket = store_.begin(0, version, hash);
    store_.put(ticket, 0, std::vector<std::byte>(kData, static_cast<std::byte>(version)));
    store_.seal(ticket, kData);
    store_.commit(0, version, ticket.slot);
  }

  Staged finished() { return stager_.wait(30s).value(); }

  std::string failure() {
    try {
      finished();
    } catch (const StorageError& error) {
      return error.what();
    }
    return "nothing failed";
  }

  bool buffer_has(uint64_t version) const {
    return std::ranges::all_of(
        buffer_, [&](std::byte value) { return value == static_cast<std::byte>(version); });
  }

  uint32_t num_leases() const {
    uint32_t num = 0;
    for (const auto& slot : store_.slots()) num += slot.leases;
    return num;
  }

  std::vector<std::byte> buffer_ = std::vector<std::byte>(kData);
  std::shared_ptr<Segment> segment_;
  weights::WeightStore store_;
  std::shared_ptr<RecordingDevice> device_;
  WeightStager stager_;
};

TEST_F(Staging, BringsTheNewestVersionAgainAndAgain) {
  EXPECT_THROW(stager_.wait(0s), StorageError);
  for (uint64_t version = 1; version <= 5; ++version) {
    publish(version);
    stager_.start({.min_version = version});
    const Staged staged = finished();
    EXPECT_EQ(staged.lease.version, version);
    EXPECT_EQ(staged.num_revoked, 0);
    EXPECT_GT(staged.seconds, 0);
    EXPECT_TRUE(buffer_has(version));
    EXPECT_EQ(stager_.progress().num_bytes, kData);
    EXPECT_FALSE(stager_.progress().running);
  }
  EXPECT_EQ(num_leases(), 0);
}

TEST_F(Staging, HasOneChunkInFlight) {
  publish(1);
  size_t most = 0;
  device_->before_wait = [&] { most = std::max(most, device_->under_way.size()); };
  stager_.start({});
  finished();
  EXPECT_EQ(most, 1);
  EXPECT_EQ(device_->copies.size(), 3);
}

TEST_F(Staging, WaitsForItsVersionAndCanBeCalledOff) {
  stager_.start({.timeout = 1h});
  EXPECT_FALSE(stager_.wait(20ms).has_value());
  EXPECT_TRUE(stager_.progress().running);
  EXPECT_THROW(stager_.start({}), StorageError);
  publish(1);
  EXPECT_EQ(finished().lease.version, 1);
  stager_.start({.min_version = 2, .timeout = 1h});
  stager_.cancel();
  EXPECT_NE(failure().find("cancelled"), std::string::npos);
  stager_.start({});
  EXPECT_EQ(finished().lease.version, 1);
}

TEST_F(Staging, StopsAfterTheChunkInFlightWhenCalledOff) {
  publish(1);
  device_->before_wait = [&] { stager_.cancel(); };
  stager_.start({});
  EXPECT_NE(failure().find("cancelled"), std::string::npos);
  EXPECT_EQ(device_->copies.size(), 1);
  EXPECT_EQ(num_leases(), 0);
}

TEST_F(Staging, EndsWithItsOwner) {
  auto stager = std::make_unique<WeightStager>(store_, kHash, "short-lived", device_,
                                               reinterpret_cast<uint64_t>(buffer_.data()));
  stager->start({.timeout = 1h});
  stager.reset();
}

TEST_F(Staging, BeginsAnewWhenItsLeaseIsRevoked) {
  publish(1);
  int waits = 0;
  // While the last chunk is under way, after its comparison: the copy would be torn.
  device_->before_wait = [&] {
    if (++waits != 3) return;
    for (uint64_t version = 2; version <= 4; ++version) publish(version);
  };
  stager_.start({.timeout = 10s});
  const Staged staged = finished();
  EXPECT_EQ(staged.lease.version, 4);
  EXPECT_EQ(staged.num_revoked, 1);
  EXPECT_TRUE(buffer_has(4));
  EXPECT_EQ(num_leases(), 0);
}

TEST_F(Staging, GivesUpAtItsDeadline) {
  publish(1);
  uint64_t version = 1;
  device_->before_wait = [&] {
    for (int i = 0; i < 3; ++i) publish(++version);
  };
  stager_.start({.timeout = 50ms});
  const std::string text = failure();
  EXPECT_NE(text.find("in time"), text.npos) << text;
  EXPECT_NE(text.find("leases were revoked"), text.npos) << text;
  stager_.start({.min_version = version + 1});
  EXPECT_NE(failure().find("the newest is version " + std::to_string(version)), text.npos);
  EXPECT_EQ(num_leases(), 0);
}

TEST_F(Staging, FindsDamage) {
  publish(1);
  const auto lease = store_.acquire("vandal", 0);
  const_cast<std::byte*>(store_.view(*lease).data())[weights::kChunkBytes + 7] ^= std::byte{1};
  store_.release(*lease);
  stager_.start({});
  EXPECT_THROW(finished(), ChecksumMismatch);
  EXPECT_TRUE(device_->under_way.empty());
  EXPECT_EQ(num_leases(), 0);
  publish(2);
  stager_.start({});
  EXPECT_EQ(finished().lease.version, 2);
}

TEST_F(Staging, RefusesAnotherModel) {
  publish(1, {7, 8});
  stager_.start({});
  const std::string text = failure();
  EXPECT_NE(text.find("different models"), text.npos) << text;
  EXPECT_NE(text.find("0700000000000000080000000000000"), text.npos) << text;
  EXPECT_EQ(num_leases(), 0);
}

TEST_F(Staging, InPlaceComparesAndKeepsTheLease) {
  publish(1);
  stager_.start({.in_place = true});
  const Staged staged = finished();
  EXPECT_TRUE(device_->copies.empty());
  EXPECT_EQ(num_leases(), 1);
  store_.release(staged.lease);
}

}  // namespace
}  // namespace psrl::cuda
