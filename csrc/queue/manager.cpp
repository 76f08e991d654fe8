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

ArenaManager::ArenaManager(std::shared_ptr<Arena> arena)
    : arena_(std::move(arena)), open_(arena_->max_clients()) {
  recover();
}

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
          free_.add(i, 1);
        }
        break;
      case ExtentState::kFree:
        free_.add(i, 1);
        break;
      default:
        covered_until = i + run_of(i);
        if (state_of(word) == ExtentState::kGranted && extent.owner.load() < open_.size()) {
          open_[extent.owner.load()].push_back(i);
        }
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

bool ArenaManager::is_open(uint32_t index, ClientId client) const {
  const ExtentEntry& extent = arena_->extent(index);
  return state_of(extent.word.load()) == ExtentState::kGranted &&
         extent.owner.load() == client.number &&
         extent.owner_incarnation.load() == client.incarnation;
}

Grant ArenaManager::give(ClientId client, uint32_t head, uint32_t run) {
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
  open_[client.number].push_back(head);
  return {head, generation, run};
}

// Runs from the end, single extents from the start: so runs find neighbours for longer.
std::vector<Grant> ArenaManager::take(ClientId client, uint32_t run, uint32_t count,
                                      uint32_t keep) {
  std::vector<Grant> grants;
  if (free_.size() < uint64_t{run} + keep) return grants;
  if (run > 1) {
    if (const auto head = free_.take_last(run)) grants.push_back(give(client, *head, run));
    return grants;
  }
  for (uint32_t i = 0; i < std::max(1u, count) && free_.size() > keep; ++i) {
    const auto head = free_.take_first(1);
    if (!head) break;
    grants.push_back(give(client, *head, 1));
  }
  return grants;
}

std::vector<Grant> ArenaManager::grant(ClientId client, uint64_t bytes, uint32_t count,
                                       std::span<const uint32_t> held, uint32_t keep) {
  arena_->check_client(client);
  const uint64_t extent_bytes = arena_->extent_bytes();
  const uint64_t run = std::max<uint64_t>(1, (bytes + extent_bytes - 1) / extent_bytes);
  if (run + keep > arena_->num_extents()) {
    throw ArenaFull("a row of " + std::to_string(bytes) + " bytes cannot fit in an arena of " +
                    std::to_string(arena_->capacity()) + "; raise transfer_queue.arena_bytes");
  }

  std::vector<Grant> grants;
  bool fits = false;
  std::vector<uint32_t>& open = open_[client.number];
  std::erase_if(open, [&](uint32_t i) {
    if (is_open(i, client)) return false;
    reclaim(i);  // sealed since, and perhaps all freed before that
    return true;
  });
  for (const uint32_t i : open) {
    if (std::find(held.begin(), held.end(), i) != held.end()) continue;
    const ExtentEntry& extent = arena_->extent(i);
    const uint64_t room = run_of(i) * extent_bytes;
    const uint64_t bump = std::min(extent.bump.load(), room);
    grants.push_back({i, generation_of(extent.word.load()), run_of(i)});
    fits |= bytes <= room - bump;
  }
  if (fits) return grants;

  auto taken = take(client, static_cast<uint32_t>(run), count, keep);
  if (taken.empty()) {
    sweep();
    taken = take(client, static_cast<uint32_t>(run), count, keep);
  }
  grants.insert(grants.end(), taken.begin(), taken.end());
  return grants;
}

RecordHeader* ArenaManager::find(const RecordRef& ref) const {
  if (ref.extent >= arena_->num_extents()) return nullptr;
  const ExtentEntry& extent = arena_->extent(ref.extent);
  const uint64_t word = extent.word.load();
  if (generation_of(word) != ref.generation || !holds_records(state_of(word))) return nullptr;
  const Bytes data = arena_->data(ref.extent, run_of(ref.extent));
  const uint64_t end = std::min<uint64_t>(extent.bump.load(), data.size());
  if (ref.offset % kAlignment != 0 || ref.offset >= end ||
      sizeof(RecordHeader) > end - ref.offset) {
    return nullptr;
  }
  auto* header = reinterpret_cast<RecordHeader*>(data.data() + ref.offset);
  const bool found = header->magic == kRecordMagic && header->length == ref.length &&
                     header->state.load() == static_cast<uint32_t>(RecordState::kCommitted);
  return found ? header : nullptr;
}

bool ArenaManager::free(const RecordRef& ref) {
  RecordHeader* header = find(ref);
  if (header == nullptr) return false;
  auto committed = static_cast<uint32_t>(RecordState::kCommitted);
  if (!header->state.compare_exchange_strong(committed,
                                             static_cast<uint32_t>(RecordState::kFreed))) {
    return false;
  }
  if (arena_->extent(ref.extent).live.fetch_sub(1) == 1) reclaim(ref.extent);
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
    released.num_records += extent.live.load();
  }
  open_[*number].clear();
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

ScanPage ArenaManager::scan(uint32_t first, size_t max_records,
                            std::optional<ClientId> owner) const {
  ScanPage page;
  page.next = first;
  for (; page.next < arena_->num_extents() && page.records.size() < max_records; ++page.next) {
    const ExtentEntry& extent = arena_->extent(page.next);
    if (!holds_records(state_of(extent.word.load()))) continue;
    if (owner && (extent.owner.load() != owner->number ||
                  extent.owner_incarnation.load() != owner->incarnation)) {
      continue;
    }
    collect(page.next, page.records);
  }
  return page;
}

std::vector<RecordInfo> ArenaManager::scan() const {
  std::vector<RecordInfo> records = scan(0, SIZE_MAX).records;
  std::stable_sort(records.begin(), records.end(), [](const RecordInfo& a, const RecordInfo& b) {
    return a.written_ns < b.written_ns;
  });
  return records;
}

std::vector<uint32_t> ArenaManager::incarnations() const {
  std::vector<uint32_t> lives;
  for (uint32_t i = 0; i < arena_->max_clients(); ++i) {
    lives.push_back(arena_->client(i).incarnation.load());
  }
  return lives;
}

void ArenaManager::reclaim(uint32_t i) {
  ExtentEntry& extent = arena_->extent(i);
  uint64_t word = extent.word.load();
  if (state_of(word) == ExtentState::kSealed && extent.live.load() == 0) {
    // From here no new lease succeeds (see Lease for why this order is enough).
    word = extent_word(generation_of(word) + 1, ExtentState::kDraining);
    extent.word.store(word);
  }
  if (state_of(word) != ExtentState::kDraining) return;
  for (uint32_t c = 0; c < arena_->max_clients(); ++c) {
    if ((arena_->lease_word(c, i).load() & 0xFFFFFFFF) != 0) return;
  }
  const uint32_t run = run_of(i);
  extent.word.store(extent_word(generation_of(word), ExtentState::kFree));
  for (uint32_t m = i + 1; m < i + run; ++m) {
    ExtentEntry& member = arena_->extent(m);
    const uint64_t generation = generation_of(member.word.load());
    member.word.store(extent_word(generation + 1, ExtentState::kFree));
  }
  free_.add(i, run);
}

void ArenaManager::sweep() {
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) reclaim(i);
}

ArenaUsage ArenaManager::usage() {
  sweep();
  ArenaUsage usage;
  const uint64_t bytes = arena_->extent_bytes();
  uint64_t* group = &usage.free;
  for (uint32_t i = 0; i < arena_->num_extents(); ++i) {
    switch (state_of(arena_->extent(i).word.load())) {
      case ExtentState::kFree:
        group = &usage.free;
        break;
      case ExtentState::kGranted:
        group = &usage.open;
        break;
      case ExtentState::kSealed:
        group = &usage.rows;
        break;
      case ExtentState::kDraining:
        group = &usage.leased;
        break;
      case ExtentState::kMember:
        break;  // of the extent before
    }
    *group += bytes;
  }
  return usage;
}

}  // namespace psrl
