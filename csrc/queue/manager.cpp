#include "queue/manager.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"

namespace psrl {
namespace {

bool in_use(uint32_t incarnation) { return incarnation % 2 == 1; }

bool holds_records(ExtentState state) {
  return state == ExtentState::kGranted || state == ExtentState::kSealed;
}

}  // namespace

ArenaManager::ArenaManager(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) { recover(); }

void ArenaManager::recover() {
  // A run's members are marked before its head and freed after it, so members that no head covers
  // are left from an interrupted grant or reclaim.
  uint32_t covered_until = 0;
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    ExtentEntry& extent = arena_->extent(i);
    const uint64_t word = extent.word.load();
    switch (state_of(word)) {
      case ExtentState::kMember:
        if (i >= covered_until) {
          extent.word.store(extent_word(generation_of(word) + 1, ExtentState::kFree));
        }
        break;
      case ExtentState::kFree:
        break;
      default:
        covered_until = i + run_of(i);
        // A record freed without its count having gone down: count again. Open extents have a
        // writer who counts himself; theirs come right when they are sealed and released.
        if (state_of(word) == ExtentState::kSealed) recount(i, /*abort_unfinished=*/false);
    }
  }
}

uint32_t ArenaManager::run_of(uint32_t index) const {
  return std::clamp(arena_->extent(index).run.load(), 1u, arena_->num_extents() - index);
}

std::optional<uint32_t> ArenaManager::find_client(const std::string& name) const {
  for (uint32_t i = 0; i < arena_->max_clients(); ++i) {
    const ClientEntry& entry = arena_->client(i);
    if (in_use(entry.incarnation.load()) && name.size() <= sizeof(entry.name) &&
        entry.name_length == name.size() &&
        std::memcmp(entry.name, name.data(), name.size()) == 0) {
      return i;
    }
  }
  return std::nullopt;
}

ClientId ArenaManager::register_client(const std::string& name) {
  if (name.empty() || name.size() > sizeof(ClientEntry::name)) {
    throw StorageError("a queue client's name has 1 to 112 bytes: '" + name + "'");
  }
  release_client(name);
  for (uint32_t i = 0; i < arena_->max_clients(); ++i) {
    ClientEntry& entry = arena_->client(i);
    const uint32_t incarnation = entry.incarnation.load();
    if (in_use(incarnation)) continue;
    entry.name_length = static_cast<uint32_t>(name.size());
    std::memcpy(entry.name, name.data(), name.size());
    for (uint32_t e = 0; e < arena_->num_extents(); ++e) {
      arena_->lease_word(i, e).store(uint64_t{incarnation + 1} << 32);
    }
    entry.incarnation.store(incarnation + 1);
    return {i, incarnation + 1};
  }
  throw StorageError("the queue has its " + std::to_string(arena_->max_clients()) +
                     " clients already; " + name + " finds no place");
}

std::optional<Grant> ArenaManager::take(ClientId client, uint32_t run, bool from_the_end) {
  const uint32_t num = arena_->num_extents();
  uint32_t length = 0;
  for (uint32_t step = 0; step < num; ++step) {
    const uint32_t i = from_the_end ? num - 1 - step : step;
    const bool free = state_of(arena_->extent(i).word.load()) == ExtentState::kFree;
    length = free ? length + 1 : 0;
    if (length < run) continue;

    const uint32_t head = from_the_end ? i : i - (run - 1);
    for (uint32_t m = head + 1; m < head + run; ++m) {
      ExtentEntry& member = arena_->extent(m);
      member.word.store(extent_word(generation_of(member.word.load()), ExtentState::kMember));
    }
    ExtentEntry& extent = arena_->extent(head);
    const uint64_t generation = generation_of(extent.word.load());
    extent.bump.store(0);
    extent.live.store(0);
    extent.run.store(run);
    extent.owner.store(client.number);
    extent.owner_incarnation.store(client.incarnation);
    extent.word.store(extent_word(generation, ExtentState::kGranted));
    return Grant{head, generation, run};
  }
  return std::nullopt;
}

std::vector<Grant> ArenaManager::grant(ClientId client, uint64_t bytes, uint32_t count,
                                       std::span<const uint32_t> held) {
  arena_->check_client(client);
  sweep();
  const uint64_t extent_bytes = arena_->extent_bytes();
  const uint64_t run = std::max<uint64_t>(1, (bytes + extent_bytes - 1) / extent_bytes);
  if (run > arena_->num_extents()) {
    throw ArenaFull("a row of " + std::to_string(bytes) + " bytes cannot fit in an arena of " +
                    std::to_string(arena_->capacity()) + "; raise transfer_queue.arena_bytes");
  }

  std::vector<Grant> grants;
  bool fits = false;
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    const ExtentEntry& extent = arena_->extent(i);
    const uint64_t word = extent.word.load();
    if (state_of(word) != ExtentState::kGranted || extent.owner.load() != client.number ||
        extent.owner_incarnation.load() != client.incarnation ||
        std::find(held.begin(), held.end(), i) != held.end()) {
      continue;
    }
    const uint64_t room = run_of(i) * extent_bytes;
    const uint64_t bump = std::min(extent.bump.load(), room);
    grants.push_back({i, generation_of(word), run_of(i)});
    fits |= bytes <= room - bump;
  }
  if (fits) return grants;

  // Runs from the end, single extents from the start: so runs find neighbours for longer.
  if (run > 1) {
    if (const auto taken = take(client, static_cast<uint32_t>(run), true)) grants.push_back(*taken);
    return grants;
  }
  for (uint32_t i = 0; i < std::max(1u, count); ++i) {
    const auto taken = take(client, 1, false);
    if (!taken) break;
    grants.push_back(*taken);
  }
  return grants;
}

bool ArenaManager::free(const RecordRef& ref) {
  if (ref.extent >= arena_->num_extents()) return false;
  ExtentEntry& extent = arena_->extent(ref.extent);
  const uint64_t word = extent.word.load();
  if (generation_of(word) != ref.generation || !holds_records(state_of(word))) return false;
  const Bytes data = arena_->data(ref.extent, run_of(ref.extent));
  const uint64_t end = std::min<uint64_t>(extent.bump.load(), data.size());
  if (ref.offset % kAlignment != 0 || ref.offset >= end ||
      sizeof(RecordHeader) > end - ref.offset) {
    return false;
  }
  auto* header = reinterpret_cast<RecordHeader*>(data.data() + ref.offset);
  if (header->magic != kRecordMagic || header->length != ref.length) return false;
  auto committed = static_cast<uint32_t>(RecordState::kCommitted);
  if (!header->state.compare_exchange_strong(committed,
                                             static_cast<uint32_t>(RecordState::kFreed))) {
    return false;
  }
  extent.live.fetch_sub(1);
  return true;
}

void ArenaManager::for_each_record(
    uint32_t index, const std::function<void(RecordHeader&, uint64_t, uint64_t)>& visit) const {
  const ExtentEntry& extent = arena_->extent(index);
  const Bytes data = arena_->data(index, run_of(index));
  // A header's length is written before the bump passes it, so up to there all can be walked.
  const uint64_t end = std::min<uint64_t>(extent.bump.load(std::memory_order_acquire), data.size());
  for (uint64_t offset = 0; offset + sizeof(RecordHeader) <= end;) {
    auto& header = *reinterpret_cast<RecordHeader*>(data.data() + offset);
    const uint64_t length = header.length;
    if (header.magic != kRecordMagic || length < sizeof(RecordHeader) || length % kAlignment != 0 ||
        length > end - offset) {
      throw ChecksumMismatch("extent " + std::to_string(index) + " is damaged at byte " +
                             std::to_string(offset));
    }
    visit(header, offset, length);
    offset += length;
  }
}

void ArenaManager::recount(uint32_t index, bool abort_unfinished) {
  uint32_t live = 0;
  for_each_record(index, [&](RecordHeader& header, uint64_t, uint64_t) {
    auto state = static_cast<RecordState>(header.state.load());
    if (state == RecordState::kWriting && abort_unfinished) {
      state = RecordState::kAborted;
      header.state.store(static_cast<uint32_t>(state));
    }
    if (state == RecordState::kWriting || state == RecordState::kCommitted) ++live;
  });
  arena_->extent(index).live.store(live);
}

Released ArenaManager::release_client(const std::string& name) {
  Released released;
  const auto number = find_client(name);
  if (!number) return released;
  released.known = true;
  ClientEntry& entry = arena_->client(*number);
  const uint32_t incarnation = entry.incarnation.load();
  released.client = {*number, incarnation};

  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    ExtentEntry& extent = arena_->extent(i);
    uint64_t word = extent.word.load();
    if (!holds_records(state_of(word)) || extent.owner.load() != *number ||
        extent.owner_incarnation.load() != incarnation) {
      continue;
    }
    if (state_of(word) == ExtentState::kGranted &&
        extent.word.compare_exchange_strong(
            word, extent_word(generation_of(word), ExtentState::kSealed))) {
      ++released.num_extents;
    }
    recount(i, /*abort_unfinished=*/true);
    collect(i, released.records);
  }
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    const uint64_t next = uint64_t{incarnation + 1} << 32;
    released.num_leases += arena_->lease_word(*number, i).exchange(next) & 0xFFFFFFFF;
  }
  // Last, so that a manager that dies in the middle finds the client again by name.
  entry.incarnation.store(incarnation + 1);
  sweep();
  return released;
}

void ArenaManager::collect(uint32_t index, std::vector<RecordInfo>& into) const {
  const ExtentEntry& extent = arena_->extent(index);
  const Bytes data = arena_->data(index, run_of(index));
  for_each_record(index, [&](RecordHeader& header, uint64_t offset, uint64_t length) {
    if (header.state.load(std::memory_order_acquire) !=
        static_cast<uint32_t>(RecordState::kCommitted)) {
      return;
    }
    RecordInfo info;
    info.ref = {index, generation_of(extent.word.load()), offset, length};
    info.description = decode(data.subspan(offset, length));
    info.written_ns = header.written_ns;
    into.push_back(std::move(info));
  });
}

std::vector<RecordInfo> ArenaManager::scan() const {
  std::vector<RecordInfo> records;
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    if (holds_records(state_of(arena_->extent(i).word.load()))) collect(i, records);
  }
  std::stable_sort(records.begin(), records.end(), [](const RecordInfo& a, const RecordInfo& b) {
    return a.written_ns < b.written_ns;
  });
  return records;
}

void ArenaManager::sweep() {
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    ExtentEntry& extent = arena_->extent(i);
    uint64_t word = extent.word.load();
    if (state_of(word) == ExtentState::kSealed && extent.live.load() == 0) {
      // From here no new lease succeeds (see Lease for why this order is enough).
      word = extent_word(generation_of(word) + 1, ExtentState::kDraining);
      extent.word.store(word);
    }
    if (state_of(word) != ExtentState::kDraining) continue;
    bool leased = false;
    for (uint32_t c = 0; c < arena_->max_clients() && !leased; ++c) {
      leased = (arena_->lease_word(c, i).load() & 0xFFFFFFFF) != 0;
    }
    if (leased) continue;
    const uint32_t run = run_of(i);
    extent.word.store(extent_word(generation_of(word), ExtentState::kFree));
    for (uint32_t m = i + 1; m < i + run; ++m) {
      ExtentEntry& member = arena_->extent(m);
      const uint64_t generation = generation_of(member.word.load());
      member.word.store(extent_word(generation + 1, ExtentState::kFree));
    }
  }
}

uint64_t ArenaManager::free_bytes() {
  sweep();
  uint64_t num_free = 0;
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    num_free += state_of(arena_->extent(i).word.load()) == ExtentState::kFree ? 1 : 0;
  }
  return num_free * arena_->extent_bytes();
}

}  // namespace psrl
