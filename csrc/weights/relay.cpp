#include "weights/relay.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <span>

#include "base/checksum.h"
#include "base/errors.h"
#include "link/region.h"
#include "link/wire.h"

namespace psrl::weights {
namespace {

using link::Advert;
using link::Event;
using link::PeerId;
using link::Status;

// Notices: "psrl.w" | u64 transfer | u8 kind | the rest.
//   unit: u64 window, u64 generation, u32 unit, u32 sum before, u32 sum after
//   ask:  u32 unit
constexpr std::string_view kTag = "psrl.w";
constexpr size_t kPrefixBytes = kTag.size() + 8;
enum class Kind : uint8_t { kUnit = 1, kAsk = 2 };
constexpr size_t kUnitBytes = kPrefixBytes + 1 + 16 + 12;
constexpr size_t kAskBytes = kPrefixBytes + 1 + 4;

std::string prefix_of(uint64_t transfer) {
  std::string prefix(kTag);
  link::put<uint64_t>(prefix, transfer);
  return prefix;
}

uint64_t bytes_of(const Unit& unit) {
  uint64_t bytes = 0;
  for (const Range& range : unit) bytes += range.length;
  return bytes;
}

void require_units(const RelayOptions& options, uint64_t length) {
  const auto refuse = [](uint64_t unit, const char* what) {
    throw StorageError("weights: unit " + std::to_string(unit) + " of a transfer " + what);
  };
  if (options.units.size() > UINT32_MAX) throw StorageError("weights: too many units");
  uint64_t expected = 0;  // where the next unit begins, if units fill chunks
  for (uint64_t i = 0; i < options.units.size(); ++i) {
    for (const Range& range : options.units[i]) {
      if (range.offset > length || range.length > length - range.offset) {
        refuse(i, "reaches outside of the memory");
      }
    }
    if (options.chunk_bytes == 0) continue;
    if (options.units[i].size() != 1 || options.units[i][0].length == 0) {
      refuse(i, "is not one range, and so fills no chunk");
    }
    const Range& range = options.units[i][0];
    if (range.offset != expected) refuse(i, "does not begin where the one before ends");
    expected += range.length;
    if (range.offset / options.chunk_bytes != (expected - 1) / options.chunk_bytes) {
      refuse(i, "lies in two chunks");
    }
  }
  if (options.chunk_bytes == 0) return;
  const uint64_t chunks = (length + options.chunk_bytes - 1) / options.chunk_bytes;
  if (expected != length) throw StorageError("weights: units do not fill the memory");
  if (!options.expected.empty() && options.expected.size() != chunks) {
    throw StorageError("weights: " + std::to_string(options.expected.size()) + " sums for " +
                       std::to_string(chunks) + " chunks");
  }
}

}  // namespace

std::shared_ptr<Relay> Relay::open(link::Endpoint& endpoint, link::RegionPtr region,
                                   uint64_t offset, uint64_t length, RelayOptions options,
                                   std::vector<bool> have) {
  require_units(options, length);
  if (have.size() != options.units.size()) {
    throw StorageError("weights: " + std::to_string(have.size()) + " entries for " +
                       std::to_string(options.units.size()) + " units");
  }
  region->read(offset, length);  // raises if it is outside
  std::shared_ptr<Relay> relay(
      new Relay(endpoint, std::move(region), offset, length, std::move(options), std::move(have)));
  endpoint.route_notices(relay->prefix_, relay.get());
  return relay;
}

Relay::Relay(link::Endpoint& endpoint, link::RegionPtr region, uint64_t offset, uint64_t length,
             RelayOptions options, std::vector<bool> have)
    : endpoint_(endpoint),
      region_(std::move(region)),
      offset_(offset),
      length_(length),
      options_(std::move(options)),
      prefix_(prefix_of(options_.transfer)),
      changed_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      have_(std::move(have)),
      summed_(have_.size()),
      sums_(have_.size()),
      attempts_(have_.size()),
      changed_at_(link::Clock::now()) {
  if (changed_.get() < 0) throw_errno("weights: eventfd");
  for (uint64_t unit = 0; unit < have_.size(); ++unit) {
    if (!have_[unit]) continue;
    ++num_have_;
    have_bytes_ += bytes_of(options_.units[unit]);
  }
  had_bytes_ = have_bytes_;
}

// --- The owner's side ----------------------------------------------------------------------------

Advert Relay::open_window(const std::string& key) {
  close_window(key);
  const Advert advert = endpoint_.advertise(region_, offset_, length_, link::WindowAccess::kPut);
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      windows_[key] = advert;
      return advert;
    }
  }
  endpoint_.withdraw(advert);
  throw StorageError("weights: the transfer is over at this node");
}

void Relay::close_window(const std::string& key) {
  Advert advert;
  {
    const std::lock_guard lock(mutex_);
    const auto found = windows_.find(key);
    if (found == windows_.end()) return;
    advert = found->second;
    windows_.erase(found);
  }
  endpoint_.withdraw(advert);  // may wait for the progress thread, which may wait for the mutex
}

void Relay::send_to(const std::string& name, PeerId peer, const Advert& into, uint64_t first,
                    uint64_t end, const std::vector<bool>& has) {
  if (has.size() != have_.size() || first > end || end > have_.size()) {
    throw StorageError("weights: " + name + " wants units " + std::to_string(first) + " to " +
                       std::to_string(end) + " and has told of " + std::to_string(has.size()) +
                       ", of " + std::to_string(have_.size()));
  }
  if (into.length != length_) {
    throw StorageError("weights: " + name + "'s window has " + std::to_string(into.length) +
                       " bytes, not " + std::to_string(length_));
  }
  const std::lock_guard lock(mutex_);
  if (closed_) throw StorageError("weights: the transfer is over at this node");
  Successor& successor = successors_[name] = {};
  successor.number = next_number_++;
  successor.peer = peer;
  successor.into = into;
  successor.first = first;
  successor.end = end;
  for (uint64_t unit = first; unit < end; ++unit) {
    if (has[unit]) continue;
    ++successor.wanted;
    if (have_[unit]) enqueue(successor, unit);
  }
  changed_at_ = link::Clock::now();
  pump(name, successor);
}

void Relay::stop_sending(const std::string& name) {
  const std::lock_guard lock(mutex_);
  successors_.erase(name);
}

std::vector<bool> Relay::have() const {
  const std::lock_guard lock(mutex_);
  return have_;
}

RelayProgress Relay::progress() const {
  const std::lock_guard lock(mutex_);
  RelayProgress progress;
  progress.num_units = have_.size();
  progress.have = num_have_;
  progress.have_bytes = have_bytes_;
  progress.damaged = damaged_;
  progress.in_flight = flights_.size();
  progress.idle_s = std::chrono::duration<double>(link::Clock::now() - changed_at_).count();
  progress.problem = problem_;
  progress.complete = num_have_ == have_.size();
  for (const auto& [name, s] : successors_) {
    progress.successors.push_back({name, s.wanted, s.arrived, s.in_flight, s.problem});
  }
  return progress;
}

std::vector<uint32_t> Relay::chunk_sums() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> sums;
  if (!within_chunks()) return sums;
  for (uint64_t unit = 0; unit < sums_.size(); ++unit) {
    if (!ends_chunk(unit)) continue;
    if (!summed_[unit]) throw StorageError("weights: the transfer is not complete yet");
    sums.push_back(sums_[unit].after);
  }
  return sums;
}

uint64_t Relay::arrived_bytes() const {
  const std::lock_guard lock(mutex_);
  return have_bytes_ - had_bytes_;
}

void Relay::close() {
  std::map<std::string, Advert> windows;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    successors_.clear();
    windows.swap(windows_);
  }
  endpoint_.route_notices(prefix_, nullptr);
  for (const auto& [key, advert] : windows) endpoint_.withdraw(advert);
}

// --- The progress thread -------------------------------------------------------------------------

void Relay::on_event(const Event& event) {
  if (event.kind == Event::Kind::kDone) return on_done(event);
  if (event.kind != Event::Kind::kNotice || event.text.size() <= kPrefixBytes) return;
  switch (static_cast<Kind>(event.text[kPrefixBytes])) {
    case Kind::kUnit:
      return on_unit(event.peer, event.text);
    case Kind::kAsk:
      return on_ask(event.peer, event.text);
  }
}

void Relay::on_unit(PeerId peer, std::string_view notice) {
  if (notice.size() != kUnitBytes) return;
  const auto window = link::get<uint64_t>(notice, kPrefixBytes + 1);
  const auto generation = link::get<uint64_t>(notice, kPrefixBytes + 9);
  const auto unit = link::get<uint32_t>(notice, kPrefixBytes + 17);
  const Sums sums{link::get<uint32_t>(notice, kPrefixBytes + 21),
                  link::get<uint32_t>(notice, kPrefixBytes + 25)};
  {
    const std::lock_guard lock(mutex_);
    const bool ours = std::ranges::any_of(windows_, [&](const auto& opened) {
      return opened.second.window == window && opened.second.generation == generation;
    });
    if (closed_ || !ours || unit >= have_.size() || have_[unit]) return;
  }
  // Outside of the lock: it takes a while, and only this thread marks units as here.
  const bool matches = sum(unit, sums.before) == sums.after;
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  if (matches) return accept(unit, sums);
  ++damaged_;
  if (++attempts_[unit] < options_.max_attempts) return ask(peer, unit);
  fail("unit " + std::to_string(unit) + " came damaged " + std::to_string(attempts_[unit]) +
       " times");
}

void Relay::ask(PeerId peer, uint64_t unit) {
  std::string notice = prefix_;
  link::put<uint8_t>(notice, static_cast<uint8_t>(Kind::kAsk));
  link::put<uint32_t>(notice, unit);
  try {
    note(endpoint_.notify(peer, notice, link::Clock::now() + options_.put_timeout, this), {});
  } catch (const LinkError& error) {
    fail(error.what());
  }
}

void Relay::accept(uint64_t unit, const Sums& sums) {
  sums_[unit] = sums;
  settle(unit);
  have_[unit] = true;
  ++num_have_;
  have_bytes_ += bytes_of(options_.units[unit]);
  changed_at_ = link::Clock::now();
  for (auto& [name, successor] : successors_) {
    if (unit < successor.first || unit >= successor.end) continue;
    enqueue(successor, unit);
    pump(name, successor);
  }
  if (num_have_ == have_.size()) wake();
}

// Notes that a unit's sums are known, and compares them with those of its neighbours in the chunk
// and with the chunk's.
void Relay::settle(uint64_t unit) {
  summed_[unit] = true;
  if (!within_chunks()) return;
  const Sums& sums = sums_[unit];
  const uint64_t chunk = chunk_of(unit);
  const bool follows = begins_chunk(unit)
                           ? sums.before == static_cast<uint32_t>(chunk)
                           : !summed_[unit - 1] || sums.before == sums_[unit - 1].after;
  const bool leads = ends_chunk(unit) || !summed_[unit + 1] || sums.after == sums_[unit + 1].before;
  const bool expected =
      !ends_chunk(unit) || options_.expected.empty() || sums.after == options_.expected[chunk];
  if (!follows || !leads || !expected) {
    fail("chunk " + std::to_string(chunk) + " is not what was sealed");
  }
}

void Relay::on_ask(PeerId peer, std::string_view notice) {
  if (notice.size() != kAskBytes) return;
  const auto unit = link::get<uint32_t>(notice, kPrefixBytes + 1);
  const std::lock_guard lock(mutex_);
  for (auto& [name, successor] : successors_) {
    if (successor.peer != peer || unit < successor.first || unit >= successor.end) continue;
    if (!have_[unit]) continue;
    ++successor.wanted;
    enqueue(successor, unit);
    pump(name, successor);
  }
}

void Relay::on_done(const Event& event) {
  std::shared_ptr<Relay> self;  // let go of after the lock
  const std::lock_guard lock(mutex_);
  const auto found = flights_.find(event.op);
  if (found == flights_.end()) return;
  const Flight flight = found->second;
  flights_.erase(found);
  if (flights_.empty()) self = std::move(self_);
  const auto to = successors_.find(flight.name);
  if (to == successors_.end() || to->second.number != flight.number) return;
  Successor& successor = to->second;
  --successor.in_flight;
  changed_at_ = link::Clock::now();
  if (event.status != Status::kOk) {
    if (successor.problem.empty()) successor.problem = event.text.empty() ? "lost" : event.text;
    successor.queue.clear();
    return wake();
  }
  if (++successor.arrived == successor.wanted) wake();
  pump(flight.name, successor);
}

// --- Sending -------------------------------------------------------------------------------------

void Relay::enqueue(Successor& successor, uint64_t unit) {
  successor.queue.push_back(unit);
  std::ranges::push_heap(successor.queue, std::greater());
}

void Relay::pump(const std::string& name, Successor& successor) {
  while (!closed_ && problem_.empty() && successor.problem.empty() && !successor.queue.empty() &&
         successor.in_flight < options_.max_in_flight) {
    std::ranges::pop_heap(successor.queue, std::greater());
    const uint64_t unit = successor.queue.back();
    successor.queue.pop_back();
    if (options_.valid && !options_.valid()) return fail("the version was taken back");
    put(name, successor, unit);
  }
}

void Relay::put(const std::string& name, Successor& successor, uint64_t unit) {
  uint64_t from = unit;  // whose sum the unit's begins with
  while (!summed_[unit] && within_chunks() && !begins_chunk(from) && !summed_[from - 1]) --from;
  for (uint64_t i = from; i <= unit && !summed_[i]; ++i) {
    const bool first = !within_chunks() || begins_chunk(i);
    const uint32_t seed = static_cast<uint32_t>(within_chunks() ? chunk_of(i) : i);
    sums_[i].before = first ? seed : sums_[i - 1].after;
    sums_[i].after = sum(i, sums_[i].before);
    settle(i);
    if (!problem_.empty()) return;
  }
  std::string notice = prefix_;
  link::put<uint8_t>(notice, static_cast<uint8_t>(Kind::kUnit));
  link::put<uint64_t>(notice, successor.into.window);
  link::put<uint64_t>(notice, successor.into.generation);
  link::put<uint32_t>(notice, unit);
  link::put<uint32_t>(notice, sums_[unit].before);
  link::put<uint32_t>(notice, sums_[unit].after);
  std::vector<link::Piece> pieces;
  for (const Range& range : options_.units[unit]) {
    pieces.push_back({offset_ + range.offset, range.offset, range.length});
  }
  try {
    const link::OpId op = endpoint_.put(successor.peer, successor.into, region_, pieces, notice,
                                        link::Clock::now() + options_.put_timeout, this);
    note(op, {name, successor.number});
    ++successor.in_flight;
  } catch (const LinkError& error) {
    successor.problem = error.what();
    successor.queue.clear();
    wake();
  }
}

void Relay::note(link::OpId op, Flight flight) {
  flights_[op] = std::move(flight);
  if (!self_) self_ = shared_from_this();
}

uint64_t Relay::chunk_of(uint64_t unit) const {
  return options_.units[unit][0].offset / options_.chunk_bytes;
}

bool Relay::begins_chunk(uint64_t unit) const {
  return options_.units[unit][0].offset % options_.chunk_bytes == 0;
}

bool Relay::ends_chunk(uint64_t unit) const {
  const Range& range = options_.units[unit][0];
  const uint64_t end = range.offset + range.length;
  return end == length_ || end % options_.chunk_bytes == 0;
}

uint32_t Relay::sum(uint64_t unit, uint32_t before) const {
  for (const Range& range : options_.units[unit]) {
    before = crc32c({region_->read(offset_ + range.offset, range.length), range.length}, before);
  }
  return before;
}

void Relay::fail(std::string problem) {
  if (!problem_.empty()) return;
  problem_ = std::move(problem);
  wake();
}

void seal_arrived(WeightStore& store, const Ticket& ticket, const Relay& relay,
                  uint64_t expected_bytes) {
  if (!relay.progress().complete) {
    throw StorageError("weights: a transfer that is not complete cannot be sealed");
  }
  store.arrived(ticket, relay.arrived_bytes(), relay.chunk_sums());
  store.seal(ticket, expected_bytes);
}

void Relay::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(changed_.get(), &one, sizeof(one));
}

}  // namespace psrl::weights
