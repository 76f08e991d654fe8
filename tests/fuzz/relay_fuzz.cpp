// Notices of a transfer, as a relay gets them from peers: counts and asks stay within the units.
#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/errors.h"
#include "fuzz.h"
#include "link/region.h"
#include "link/wire.h"
#include "weights/relay.h"

namespace psrl::fuzz {
namespace {

using namespace link;

constexpr uint64_t kChunk = 256, kUnit = 64, kMemory = 3 * kChunk, kNumUnits = kMemory / kUnit;
constexpr uint64_t kTransfer = 77;
constexpr PeerId kSuccessor = 5;

// An endpoint that only counts: what is put or said ends when the relay is told so, or never.
class Nowhere final : public Endpoint {
 public:
  std::string address() const override { return {}; }
  std::string describe() const override { return {}; }
  RegionPtr add_region(std::shared_ptr<Segment> segment) override {
    return std::make_shared<Region>(segment);
  }
  RegionPtr add_region(Bytes memory, std::shared_ptr<const void> owner) override {
    return std::make_shared<Region>(memory, std::move(owner));
  }
  void remove_region(const RegionPtr&) override {}
  Advert advertise(const RegionPtr&, uint64_t, uint64_t length, WindowAccess) override {
    return {.window = 3, .generation = 4, .length = length, .key = {}};
  }
  void withdraw(const Advert&) override {}
  OpId connect(const std::string&, Deadline, EventSink*) override { return ++last_; }
  OpId put(PeerId, const Advert&, const RegionPtr& from, std::span<const Piece> pieces,
           std::string_view notice, Deadline, EventSink*) override {
    for (const Piece& piece : pieces) from->read(piece.local_offset, piece.length);
    require(notice.size() <= kMaxNoticeBytes);
    return ++last_;
  }
  OpId pull(PeerId, const Advert&, const RegionPtr&, std::span<const Piece>, Deadline,
            EventSink*) override {
    return ++last_;
  }
  OpId notify(PeerId, std::string_view, Deadline, EventSink*) override { return ++last_; }
  OpId flush(PeerId, Deadline, EventSink*) override { return ++last_; }
  void route_notices(std::string_view, EventSink*) override {}
  std::vector<Event> poll() override { return {}; }
  int fd() const override { return -1; }
  std::vector<PeerCounters> counters() const override { return {}; }
  void disconnect(PeerId, Deadline) override {}
  bool close(Deadline) override { return true; }

  OpId last() const { return last_; }

 private:
  OpId last_ = 0;
};

std::vector<std::byte>& memory() {
  static std::vector<std::byte> memory(kMemory, std::byte{9});
  return memory;
}

// The sums of a unit, before and after.
std::pair<uint32_t, uint32_t> sums_of(uint32_t unit) {
  const uint64_t chunk = unit * kUnit / kChunk * kChunk;
  const ConstBytes bytes = memory();
  const auto seed = static_cast<uint32_t>(chunk / kChunk);
  const uint32_t before =
      unit * kUnit == chunk ? seed : crc32c(bytes.subspan(chunk, unit * kUnit - chunk), seed);
  return {before, crc32c(bytes.subspan(unit * kUnit, kUnit), before)};
}

std::string notice_of(uint32_t unit) {
  std::string notice = "psrl.w";
  put<uint64_t>(notice, kTransfer);
  put<uint8_t>(notice, 1);
  put<uint64_t>(notice, 3);
  put<uint64_t>(notice, 4);
  put<uint32_t>(notice, unit);
  const auto [before, after] = sums_of(unit);
  put<uint32_t>(notice, before);
  put<uint32_t>(notice, after);
  return notice;
}

std::string ask_of(uint32_t unit) {
  std::string notice = "psrl.w";
  put<uint64_t>(notice, kTransfer);
  put<uint8_t>(notice, 2);
  put<uint32_t>(notice, unit);
  return notice;
}

// Notices with their lengths in front.
std::string said(const std::vector<std::string>& notices) {
  std::string all;
  for (const std::string& notice : notices) {
    put<uint8_t>(all, static_cast<uint8_t>(notice.size()));
    all += notice;
  }
  return all;
}

}  // namespace

std::vector<std::string> seeds() {
  std::vector<std::string> whole;
  for (uint32_t unit = 0; unit < kNumUnits; ++unit) whole.push_back(notice_of(unit));
  return {said({notice_of(0), notice_of(2), notice_of(11)}), said(whole),
          said({ask_of(1), notice_of(1), ask_of(1), ask_of(0)}),
          said({notice_of(4), ask_of(4), notice_of(4), notice_of(5)})};
}

void feed(std::string_view input) {
  static Nowhere endpoint;
  static const RegionPtr region = endpoint.add_region(Bytes(memory()), nullptr);
  weights::RelayOptions options{.transfer = kTransfer, .chunk_bytes = kChunk};
  for (uint64_t at = 0; at < kMemory; at += kUnit) options.units.push_back({{at, kUnit}});
  const OpId first = endpoint.last() + 1;
  std::vector<bool> have(kNumUnits);
  have[kNumUnits - 2] = true;
  const auto relay = weights::Relay::open(endpoint, region, 0, kMemory, options, have);
  relay->open_window("before");
  relay->send_to("behind", kSuccessor, {.window = 1, .length = kMemory, .key = {}}, 0, kNumUnits,
                 std::vector<bool>(kNumUnits));
  while (!input.empty()) {
    const auto length = static_cast<unsigned char>(input[0]);
    const std::string_view notice = input.substr(1, length);
    input.remove_prefix(1 + notice.size());
    relay->on_event(
        {.kind = Event::Kind::kNotice, .peer = kSuccessor, .text = std::string(notice)});
    // The put that it may have caused arrives.
    relay->on_event({.kind = Event::Kind::kDone, .op = endpoint.last(), .text = {}});
  }
  const weights::RelayProgress progress = relay->progress();
  const std::vector<bool> now = relay->have();
  const auto num_have = static_cast<uint64_t>(std::count(now.begin(), now.end(), true));
  require(progress.have == num_have && progress.have_bytes == num_have * kUnit);
  require(progress.complete == (num_have == kNumUnits));
  require(relay->arrived_bytes() == progress.have_bytes - kUnit);
  relay->close();
  // A relay lives until what it began has ended.
  for (OpId op = first; op <= endpoint.last(); ++op) {
    relay->on_event({.kind = Event::Kind::kDone, .op = op, .text = {}});
  }
  require(relay->progress().in_flight == 0);
}

}  // namespace psrl::fuzz
