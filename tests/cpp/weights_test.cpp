// Weight slots: what a version is, when it can be seen, and what a reader is told.
#include "weights/store.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "base/errors.h"

namespace psrl::weights {
namespace {

constexpr ManifestHash kHash{0x1122334455667788, 42};
constexpr uint64_t kData = 2 * kChunkBytes + 1000;  // three chunks, the last a short one

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

class Weights : public ::testing::Test {
 protected:
  explicit Weights(uint64_t data_bytes = kData) : data_bytes_(data_bytes) {
    const uint64_t size = WeightStore::required_bytes(data_bytes);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, size)));
    std::memset(memory_.get(), 0xA5, size);  // what was there before must not matter
    span_ = {memory_.get(), size};
    store_.emplace(WeightStore::format(span_, data_bytes, nullptr));
  }

  std::vector<std::byte> filled(uint64_t version) const {
    return std::vector<std::byte>(data_bytes_, static_cast<std::byte>(version));
  }

  Ticket write(uint64_t epoch, uint64_t version) {
    const Ticket ticket = store_->begin(epoch, version, kHash);
    store_->put(ticket, 0, filled(version));
    store_->seal(ticket, data_bytes_);
    return ticket;
  }

  uint32_t publish(uint64_t epoch, uint64_t version) {
    const Ticket ticket = write(epoch, version);
    store_->commit(epoch, version, ticket.slot);
    return ticket.slot;
  }

  std::vector<std::byte> read(const Lease& lease) const {
    std::vector<std::byte> out(data_bytes_);
    store_->copy_chunks(lease, 0, store_->num_chunks(), out);
    return out;
  }

  uint64_t data_bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  Bytes span_;
  std::optional<WeightStore> store_;
};

TEST_F(Weights, AreReadAsTheyWerePut) {
  std::vector<std::byte> data(kData);
  std::mt19937_64 random(1);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  const Ticket ticket = store_->begin(1, 0, kHash);
  const uint64_t half = kChunkBytes + 13;  // two writers meet inside a chunk
  std::thread other([&] { store_->put(ticket, half, ConstBytes(data).subspan(half)); });
  store_->put(ticket, 0, ConstBytes(data).first(half));
  other.join();
  store_->checksum(ticket, 1, 2);  // shared work; the seal does the rest
  store_->seal(ticket, kData);
  store_->commit(1, 0, ticket.slot);

  const std::optional<Lease> lease = store_->acquire("reader", 0);
  ASSERT_TRUE(lease);
  EXPECT_EQ(lease->epoch, 1U);
  EXPECT_EQ(lease->manifest_hash, kHash);
  EXPECT_EQ(read(*lease), data);
  store_->verify(*lease);
  std::vector<std::byte> tail(1000);
  store_->copy_chunks(*lease, 2, 1, tail);
  EXPECT_TRUE(std::equal(tail.begin(), tail.end(), data.end() - 1000));
}

TEST_F(Weights, AreNotSeenBeforeTheCommit) {
  EXPECT_FALSE(store_->newest());
  EXPECT_FALSE(store_->acquire("reader", 0));
  const Ticket ticket = store_->begin(0, 0, kHash);
  store_->put(ticket, 0, filled(0));
  EXPECT_THROW(store_->commit(0, 0, ticket.slot), StorageError);  // not sealed
  store_->seal(ticket, kData);
  EXPECT_FALSE(store_->acquire("reader", 0));
  store_->commit(0, 0, ticket.slot);
  EXPECT_EQ(store_->newest()->version, 0U);
  EXPECT_FALSE(store_->acquire("reader", 1));
  EXPECT_FALSE(store_->acquire("reader", 0, 1));  // of the next epoch
  EXPECT_TRUE(store_->acquire("reader", 0, 0));
}

TEST_F(Weights, PushWaitsForNoLeaseAndRevokesTheOldOnes) {
  publish(0, 0);
  const Lease zero = *store_->acquire("slow", 0);
  publish(0, 1);
  const Lease one = *store_->acquire("slow", 1);
  EXPECT_TRUE(store_->valid(zero));  // one version old, and its successor's successor is begun:
  const Ticket ticket = store_->begin(0, 2, kHash);
  EXPECT_TRUE(store_->valid(zero));
  EXPECT_EQ(read(zero), filled(0));
  store_->put(ticket, 0, filled(2));
  store_->seal(ticket, kData);
  store_->commit(0, 2, ticket.slot);
  EXPECT_TRUE(store_->valid(zero));  // two versions old, its bytes not needed yet
  const Ticket third = store_->begin(0, 3, kHash);
  EXPECT_EQ(third.slot, zero.slot);
  EXPECT_FALSE(store_->valid(zero));
  EXPECT_THROW(read(zero), Revoked);
  EXPECT_THROW(store_->verify(zero), Revoked);
  EXPECT_THROW((void)store_->view(zero), Revoked);
  EXPECT_TRUE(store_->valid(one));
  EXPECT_EQ(read(one), filled(1));
  store_->release(zero);  // nothing to give back, no harm
  EXPECT_EQ(store_->slots()[zero.slot].leases, 0U);
}

TEST_F(Weights, RefuseWhatDoesNotFollow) {
  publish(3, 7);  // the first may be any: a resumed run
  EXPECT_THROW(store_->begin(2, 8, kHash), StaleMessage);
  EXPECT_THROW(store_->begin(3, 7, kHash), StorageError);
  EXPECT_THROW(store_->begin(3, 9, kHash), StorageError);
  const Ticket ticket = write(3, 8);
  EXPECT_THROW(store_->commit(2, 8, ticket.slot), StaleMessage);
  EXPECT_THROW(store_->commit(3, 9, ticket.slot), StorageError);
  EXPECT_THROW(store_->commit(4, 8, ticket.slot), StorageError);
  EXPECT_THROW(store_->commit(3, 8, (ticket.slot + 1) % 3), StorageError);
  EXPECT_THROW(store_->commit(3, 8, 3), StorageError);
  store_->commit(3, 8, ticket.slot);
  store_->commit(3, 8, ticket.slot);  // said twice counts once
  EXPECT_EQ(store_->newest()->version, 8U);
  store_->fence(4);
  EXPECT_THROW(store_->begin(3, 9, kHash), StaleMessage);
  publish(4, 5);  // rolled back to a checkpoint
  EXPECT_EQ(store_->newest()->version, 5U);
  EXPECT_EQ(store_->acquire("reader", 5, 4)->epoch, 4U);
}

TEST_F(Weights, RefuseASealWithATensorMissingOrTwice) {
  Ticket ticket = store_->begin(0, 0, kHash);
  store_->put(ticket, 0, ConstBytes(filled(0)).first(100));
  EXPECT_THROW(store_->seal(ticket, 200), StorageError);
  store_->put(ticket, 0, ConstBytes(filled(0)).first(100));
  EXPECT_THROW(store_->seal(ticket, 100), StorageError);
  store_->seal(ticket, 200);
  EXPECT_THROW(store_->put(ticket, 0, ConstBytes(filled(0)).first(1)), StorageError);
  EXPECT_THROW(store_->seal(ticket, 200), StorageError);
}

TEST_F(Weights, PutStaysInside) {
  const Ticket ticket = store_->begin(0, 0, kHash);
  EXPECT_THROW(store_->put(ticket, 1, filled(0)), StorageError);
  EXPECT_THROW(store_->put(ticket, UINT64_MAX, ConstBytes(filled(0)).first(1)), StorageError);
  EXPECT_THROW(store_->checksum(ticket, 3, 1), StorageError);
  EXPECT_THROW(store_->checksum(ticket, 1, UINT64_MAX), StorageError);
  store_->put(ticket, kData, {});
}

TEST_F(Weights, SlotOfADeadWriterIsTakenByTheNextEpochOrAbandoned) {
  publish(0, 0);
  const Ticket dead = store_->begin(0, 1, kHash);
  store_->put(dead, 0, ConstBytes(filled(1)).first(77));
  EXPECT_THROW(store_->begin(0, 1, kHash), StorageError);  // it might be alive
  store_->abandon(dead.slot);
  store_->abandon(dead.slot);
  EXPECT_THROW(store_->put(dead, 0, filled(1)), Revoked);
  const Ticket again = store_->begin(0, 1, kHash);
  EXPECT_NE(store_->slots()[again.slot].state, SlotState::kFree);

  const Ticket next = store_->begin(1, 0, kHash);  // a new epoch asks nobody
  EXPECT_NE(next.slot, store_->newest()->slot);
  EXPECT_EQ(read(*store_->acquire("reader", 0)), filled(0));
  store_->put(next, 0, filled(9));
  store_->seal(next, kData);
  store_->commit(1, 0, next.slot);
  EXPECT_EQ(read(*store_->acquire("reader", 0)), filled(9));
  EXPECT_THROW(store_->abandon(next.slot), StorageError);
}

// The one moment at which a commit is half done: the slot says so, the word that readers look at
// does not.
TEST_F(Weights, HeadKilledInACommitLeavesTheOldVersion) {
  publish(0, 0);
  publish(0, 1);
  const Ticket ticket = write(0, 2);
  const Plan plan(kData);
  auto* slot = reinterpret_cast<SlotHeader*>(span_.data() + plan.slot(ticket.slot));
  slot->word.store(SlotWord{SlotState::kCommitted, ticket.generation}.pack());

  WeightStore restarted = WeightStore::open(span_, nullptr);
  EXPECT_EQ(restarted.newest()->version, 1U);
  EXPECT_EQ(read(*restarted.acquire("reader", 0)), filled(1));
  restarted.commit(0, 2, ticket.slot);  // said again
  EXPECT_EQ(read(*restarted.acquire("reader", 2)), filled(2));

  const Ticket lost = write(0, 3);
  slot = reinterpret_cast<SlotHeader*>(span_.data() + plan.slot(lost.slot));
  slot->word.store(SlotWord{SlotState::kCommitted, lost.generation}.pack());
  EXPECT_EQ(restarted.begin(1, 2, kHash).slot, lost.slot);  // or taken by the next epoch
  EXPECT_EQ(read(*restarted.acquire("reader", 2)), filled(2));
}

TEST_F(Weights, DamageIsTold) {
  const uint32_t slot = publish(0, 0);
  const Lease lease = *store_->acquire("reader", 0);
  const ConstBytes bytes = store_->view(lease);
  auto* data = const_cast<std::byte*>(bytes.data());
  for (const uint64_t at : {uint64_t{0}, kChunkBytes - 1, kChunkBytes + 5, kData - 1}) {
    data[at] ^= std::byte{0x10};
    EXPECT_THROW(read(lease), ChecksumMismatch) << at;
    EXPECT_THROW(store_->verify(lease), ChecksumMismatch) << at;
    data[at] ^= std::byte{0x10};
  }
  // Two equal-sized chunks that changed places.
  std::memset(data, 1, kChunkBytes);
  EXPECT_THROW(store_->verify(lease), ChecksumMismatch);
  EXPECT_EQ(store_->slots()[slot].state, SlotState::kCommitted);
}

TEST_F(Weights, SwappedChunksAreTold) {
  std::vector<std::byte> data(kData);
  std::memset(data.data(), 1, kChunkBytes);
  std::memset(data.data() + kChunkBytes, 2, kChunkBytes);
  const Ticket ticket = store_->begin(0, 0, kHash);
  store_->put(ticket, 0, data);
  store_->seal(ticket, kData);
  store_->commit(0, 0, ticket.slot);
  const Lease lease = *store_->acquire("reader", 0);
  auto* bytes = const_cast<std::byte*>(store_->view(lease).data());
  std::swap_ranges(bytes, bytes + kChunkBytes, bytes + kChunkBytes);
  EXPECT_THROW(store_->verify(lease), ChecksumMismatch);
}

TEST_F(Weights, LeasesAreCountedPerClient) {
  const uint32_t slot = publish(0, 0);
  const Lease a = *store_->acquire("a", 0);
  const Lease b = *store_->acquire("b", 0);
  (void)store_->acquire("a", 0);
  EXPECT_EQ(store_->slots()[slot].leases, 3U);
  store_->release(b);
  store_->release(b);  // never below zero
  EXPECT_EQ(store_->slots()[slot].leases, 2U);
  EXPECT_EQ(store_->release_client("a"), 2U);
  EXPECT_EQ(store_->release_client("a"), 0U);
  EXPECT_EQ(store_->release_client("unknown"), 0U);
  store_->release(a);
  EXPECT_EQ(store_->slots()[slot].leases, 0U);
  for (size_t i = 0; i < kMaxClients - 2; ++i) {
    (void)store_->acquire("client-" + std::to_string(i), 0);
  }
  EXPECT_THROW((void)store_->acquire("one too many", 0), StorageError);
  EXPECT_TRUE(store_->acquire("a", 0));  // a known one
}

TEST_F(Weights, OpenFindsWhatWasCommitted) {
  publish(2, 5);
  WeightStore other = WeightStore::open(span_, nullptr);
  EXPECT_EQ(other.data_bytes(), kData);
  EXPECT_EQ(other.newest()->version, 5U);
  EXPECT_THROW(WeightStore::open(span_.first(span_.size() - kPage), nullptr), StorageError);
  EXPECT_THROW(WeightStore::open(span_.first(8), nullptr), StorageError);
  EXPECT_THROW(WeightStore::format(span_.first(span_.size() - kPage), kData, nullptr),
               StorageError);
  EXPECT_THROW(WeightStore::format(span_, 0, nullptr), StorageError);
  EXPECT_THROW(WeightStore::format(span_, UINT64_MAX - 5, nullptr), StorageError);
  EXPECT_THROW(WeightStore::open(span_.subspan(64), nullptr), StorageError);
  std::memset(span_.data(), 0, 8);
  EXPECT_THROW(WeightStore::open(span_, nullptr), StorageError);
}

TEST_F(Weights, StayWithinTheirMemoryWhateverIsWrittenToTheHeader) {
  publish(1, 1);
  auto* header = reinterpret_cast<StoreHeader*>(memory_.get());
  const auto lease = store_->acquire("replica", 1);
  const Ticket ticket = store_->begin(1, 2, kHash);
  header->data_bytes = uint64_t{1} << 50;
  EXPECT_EQ(store_->data_bytes(), kData);
  EXPECT_THROW(store_->put(ticket, kData, filled(2)), StorageError);
  EXPECT_EQ(store_->view(*lease).size(), kData);
  EXPECT_THROW(WeightStore::open(span_, nullptr), StorageError);

  header->newest.store(NewestWord{9, 0, 7}.pack());
  EXPECT_THROW(store_->newest(), StorageError);
  EXPECT_THROW(store_->acquire("replica", 1), StorageError);
  EXPECT_THROW(store_->slots(), StorageError);
}

TEST_F(Weights, ReadersNeverSeeAMixtureWhileVersionsArePushed) {
  publish(0, 0);
  constexpr uint64_t kVersions = 60;
  std::thread writer([&] {
    for (uint64_t version = 1; version <= kVersions; ++version) publish(0, version);
  });
  uint64_t seen = 0;
  uint64_t reads = 0;
  while (seen < kVersions) {
    const Lease lease = *store_->acquire("reader", 0);
    ASSERT_GE(lease.version, seen);
    try {
      const std::vector<std::byte> data = read(lease);
      ASSERT_EQ(data, filled(lease.version));
      seen = lease.version;
      ++reads;
    } catch (const Revoked&) {
    }
    store_->release(lease);
  }
  writer.join();
  EXPECT_GT(reads, 0U);
}

TEST_F(Weights, RunsAreCopiedWhereTheyBelong) {
  std::vector<std::byte> from(60);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i);
  const Ticket ticket = store_->begin(0, 0, kHash);
  const std::vector<CopyRuns> copies = {
      {.offset = 1, .into = 10, .length = 3, .num = 4, .stride = 5, .into_stride = 100},
      {.offset = 59, .into = data_bytes_ - 1, .length = 1},
      {.offset = 0, .into = 0, .length = 0, .num = 0}};
  store_->put(ticket, from, copies);
  EXPECT_EQ(store_->slots()[ticket.slot].written, 13);
  const Bytes memory = store_->memory(ticket);
  EXPECT_EQ(memory.data(), span_.data() + store_->memory_offset(ticket.slot));
  for (size_t i = 0; i < 4; ++i) {
    for (size_t j = 0; j < 3; ++j) EXPECT_EQ(memory[10 + i * 100 + j], from[1 + i * 5 + j]);
  }
  EXPECT_EQ(memory.back(), from[59]);
}

TEST_F(Weights, RunsThatReachOutsideAreRefused) {
  std::vector<std::byte> from(60);
  const Ticket ticket = store_->begin(0, 0, kHash);
  constexpr uint64_t kHuge = ~uint64_t{0} / 2;
  for (const CopyRuns& bad : std::vector<CopyRuns>{
           {.offset = 58, .into = 0, .length = 3},
           {.offset = 0, .into = data_bytes_ - 2, .length = 3},
           {.offset = 0, .into = 0, .length = 3, .num = 2, .stride = 58, .into_stride = 3},
           {.offset = 0, .into = 0, .length = 3, .num = 3, .stride = kHuge, .into_stride = 3},
           {.offset = 0, .into = 0, .length = 1, .num = kHuge},
           {.offset = kHuge * 2, .into = 0, .length = 3},
           {.offset = 0, .into = 0, .length = kHuge * 2}}) {
    EXPECT_THROW(store_->put(ticket, from, {&bad, 1}), StorageError);
  }
  EXPECT_EQ(store_->slots()[ticket.slot].written, 0);
}

TEST_F(Weights, ANodeThatWasAwaySkipsVersions) {
  publish(0, 3);
  EXPECT_THROW(store_->begin(0, 7, kHash), StorageError);
  EXPECT_THROW(store_->begin(0, 3, kHash, Follows::kAny), StorageError);
  const Ticket ticket = store_->begin(0, 7, kHash, Follows::kAny);
  std::ranges::copy(filled(7), store_->memory(ticket).begin());  // as a link does
  store_->arrived(ticket, data_bytes_);
  store_->seal(ticket, data_bytes_);
  EXPECT_THROW(store_->commit(0, 7, ticket.slot), StorageError);
  store_->commit(0, 7, ticket.slot, Follows::kAny);
  EXPECT_EQ(store_->newest()->version, 7);
  EXPECT_EQ(read(*store_->acquire("r", 7)), filled(7));
}

TEST_F(Weights, ChecksumsOfWhatArrivedAreNotComputedAgain) {
  const Ticket first = write(0, 0);
  const std::vector<uint32_t> sums = store_->checksums(first.slot);
  store_->commit(0, 0, first.slot);
  const Ticket ticket = store_->begin(0, 1, kHash);
  EXPECT_THROW(store_->checksums(ticket.slot), StorageError);
  std::ranges::copy(filled(0), store_->memory(ticket).begin());
  store_->arrived(ticket, data_bytes_);
  store_->arrived(ticket, 0, sums[0]);
  store_->arrived(ticket, 1, sums[1] + 1);  // the caller's word is taken, and readers find out
  store_->seal(ticket, data_bytes_);
  EXPECT_EQ(store_->checksums(ticket.slot)[2], sums[2]);
  store_->commit(0, 1, ticket.slot);
  EXPECT_THROW(store_->verify(*store_->acquire("r", 1)), ChecksumMismatch);
  store_->abandon(store_->begin(0, 2, kHash).slot);
  EXPECT_THROW(store_->arrived(ticket, 1), StorageError);
}

}  // namespace
}  // namespace psrl::weights
