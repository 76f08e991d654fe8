// Two processes of a C++ program with PSRL's core between them: rows of a queue in shared memory,
// and a version of the weights over a link.
//
//   source                                        sink, which it starts
//   writes rows into a segment
//                                            <--  connects
//   says where the rows are                  -->  maps the segment, reads views of the rows
//                                            <--  says their sum; opens a window on a slot
//   puts the version that it has committed   -->  compares checksums, commits
//                                            <--  says what it has
//
// The queue is a node's: both processes map the same memory. The weights go as between two nodes:
// each process has slots of its own, and the bytes travel over TCP, straight from slot to slot.
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <functional>
#include <numeric>
#include <sstream>

#include "base/errors.h"
#include "link/link.h"
#include "queue/manager.h"
#include "queue/reader.h"
#include "queue/writer.h"
#include "shm/server.h"
#include "weights/store.h"

namespace {

using namespace std::chrono_literals;
using psrl::weights::Follows;
using psrl::weights::WeightStore;
namespace link = psrl::link;

constexpr auto kPatience = 30s;  // for the other process to do its part
constexpr uint64_t kExtent = 64 << 10;
constexpr uint64_t kNumRows = 5;
constexpr uint64_t kNumWeights = 3 << 20;  // float
constexpr uint64_t kWeightBytes = kNumWeights * sizeof(float);
constexpr psrl::weights::ManifestHash kModel{0x656d6265, 0x64};  // names the layout of the weights

link::Deadline soon() { return link::Clock::now() + kPatience; }

// This process's endpoint, and the one peer that it talks with.
class Line {
 public:
  Line(const std::string& name, const std::string& token)
      : endpoint_(link::make_tcp_endpoint({name, "127.0.0.1", 0, token})) {}

  link::Endpoint* operator->() { return endpoint_.get(); }

  link::PeerId connect(const std::string& address) {
    return peer_ = finish(endpoint_->connect(address, soon())).peer;
  }
  link::PeerId accept() {
    return peer_ = wait([](const link::Event& event) {
                     return event.kind == link::Event::Kind::kPeerConnected;
                   }).peer;
  }
  void say(const std::string& text) { finish(endpoint_->notify(peer_, text, soon())); }
  std::string hear() {
    return wait([](const link::Event& event) { return event.kind == link::Event::Kind::kNotice; })
        .text;
  }
  link::Event finish(link::OpId op) {
    const link::Event done = wait([op](const link::Event& event) {
      return event.kind == link::Event::Kind::kDone && event.op == op;
    });
    if (done.status != link::Status::kOk) throw psrl::LinkError(done.text);
    return done;
  }
  // A barrier: the peer has said goodbye too.
  void close() { endpoint_->close(soon()); }

 private:
  link::Event wait(const std::function<bool(const link::Event&)>& wanted) {
    const link::Deadline deadline = soon();
    while (true) {
      const auto found = std::find_if(events_.begin(), events_.end(), wanted);
      if (found != events_.end()) {
        const link::Event event = *found;
        events_.erase(found);
        return event;
      }
      for (const link::Event& event : events_) {
        if (event.kind == link::Event::Kind::kPeerLost) throw psrl::LinkError(event.text);
      }
      if (link::Clock::now() > deadline) throw psrl::LinkError("the other process says nothing");
      pollfd readable{endpoint_->fd(), POLLIN, 0};
      ::poll(&readable, 1, 100);
      std::ranges::move(endpoint_->poll(), std::back_inserter(events_));
    }
  }

  std::unique_ptr<link::Endpoint> endpoint_;
  link::PeerId peer_ = 0;
  std::deque<link::Event> events_;
};

// One row: `values` under the name "tokens".
psrl::RecordRef write_row(psrl::ArenaManager& manager, psrl::QueueWriter& writer,
                          psrl::ClientId client, const std::string& key,
                          const std::vector<int32_t>& values) {
  psrl::PlannedRecord row;
  row.description = {"train", key, "", {{"tokens", "<i4", {values.size()}}}};
  row.length = psrl::plan_record(row.description);
  row.payload = {std::as_bytes(std::span(values))};
  std::vector<psrl::PendingRecord> pending;
  writer.begin(std::span(&row, 1), pending);
  if (pending.empty()) {  // no room in the extents in hand
    writer.add(manager.grant(client, row.length, 4, writer.held()));
    writer.begin(std::span(&row, 1), pending);
  }
  if (pending.empty()) throw psrl::ArenaFull("the queue is full");
  return pending[0].commit();  // from here on every reader finds it, whole
}

// The slots of a process, known to its endpoint.
struct Slots {
  explicit Slots(Line& line)
      : segment(psrl::Segment::create("weights", WeightStore::required_bytes(kWeightBytes),
                                      "kNumWeights")),
        store(WeightStore::format(segment->bytes(), kWeightBytes, segment)),
        region(line->add_region(segment)) {}

  std::shared_ptr<psrl::Segment> segment;
  WeightStore store;
  link::RegionPtr region;
};

void be_sink(const std::string& segments, const std::string& address, const std::string& token) {
  Line source("sink", token);
  source.connect(address);

  std::istringstream rows(source.hear());
  psrl::ClientId me;
  rows >> me.number >> me.incarnation;
  const psrl::QueueReader reader(psrl::Arena::open(psrl::fetch_segment(segments, "queue", 10s)),
                                 me);
  int64_t sum = 0;
  for (psrl::RecordRef ref; rows >> ref.extent >> ref.generation >> ref.offset >> ref.length;) {
    const psrl::RecordView view = reader.read(ref);  // holds a lease; nothing is copied
    const psrl::Field& tokens = view.description.fields.at(0);
    const auto* values = reinterpret_cast<const int32_t*>(view.bytes.data() + tokens.offset);
    sum = std::accumulate(values, values + tokens.shape.at(0), sum);
  }

  Slots mine(source);
  const psrl::weights::Ticket ticket = mine.store.begin(0, 1, kModel, Follows::kAny);
  const link::Advert window = source->advertise(mine.region, mine.store.memory_offset(ticket.slot),
                                                kWeightBytes, link::WindowAccess::kPut);
  source.say(std::to_string(sum));
  source.say(window.encode());

  std::istringstream arrived(source.hear());  // after the bytes
  source->withdraw(window);
  mine.store.arrived(ticket, kWeightBytes);
  mine.store.seal(ticket, kWeightBytes);
  for (const uint32_t own : mine.store.checksums(ticket.slot)) {
    if (uint32_t theirs = 0; !(arrived >> theirs) || theirs != own) {
      throw psrl::ChecksumMismatch("the version was damaged on the way");
    }
  }
  mine.store.commit(0, 1, ticket.slot, Follows::kAny);

  const auto lease = mine.store.acquire("sink", 1);
  const psrl::ConstBytes bytes = mine.store.view(lease.value());
  const auto* weights = reinterpret_cast<const float*>(bytes.data());
  std::ostringstream have;
  have << "version " << lease->version << ", its last weight is " << weights[kNumWeights - 1];
  mine.store.release(*lease);
  source.say(have.str());
  source.close();
}

pid_t start_sink(const std::string& segments, const std::string& address,
                 const std::string& token) {
  std::vector<std::string> words{"embed", segments, address, token};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ) != 0) {
    throw std::runtime_error("cannot start a second process");
  }
  return child;
}

void be_source(const std::filesystem::path& folder) {
  const std::string token = "for one machine and one run alone";  // make yours from /dev/urandom
  const std::string segments = folder / "segments";

  const auto queue =
      psrl::Segment::create("queue", psrl::Arena::segment_bytes(64, kExtent, 8), "kExtent");
  const auto arena = psrl::Arena::format(queue, kExtent, 8);
  psrl::ArenaManager manager(arena);
  psrl::SegmentServer server(segments);
  server.add(queue);

  // Rows of different lengths, written once where they stay.
  const psrl::ClientId me = manager.register_client("source");
  psrl::QueueWriter writer(arena, me);
  const psrl::ClientId sink = manager.register_client("sink");
  std::ostringstream message;
  message << sink.number << ' ' << sink.incarnation;
  int64_t sum = 0;
  std::vector<psrl::RecordRef> rows;
  for (uint64_t i = 0; i < kNumRows; ++i) {
    std::vector<int32_t> values(1 + i * 1000);
    std::iota(values.begin(), values.end(), static_cast<int32_t>(i));
    sum = std::accumulate(values.begin(), values.end(), sum);
    rows.push_back(write_row(manager, writer, me, "row-" + std::to_string(i), values));
    const psrl::RecordRef& ref = rows.back();
    message << ' ' << ref.extent << ' ' << ref.generation << ' ' << ref.offset << ' ' << ref.length;
  }
  std::printf("source: %zu rows, their sum is %lld\n", rows.size(), static_cast<long long>(sum));

  // A version of the weights, whole and committed in a slot.
  Line line("source", token);
  Slots mine(line);
  std::vector<float> weights(kNumWeights, 0.5F);
  const psrl::weights::Ticket ticket = mine.store.begin(0, 1, kModel);
  mine.store.put(ticket, 0, std::as_bytes(std::span(weights)));
  mine.store.seal(ticket, kWeightBytes);
  mine.store.commit(0, 1, ticket.slot);

  const pid_t child = start_sink(segments, line->address(), token);
  const link::PeerId peer = line.accept();
  line.say(message.str());
  std::printf("sink: the sum of the rows is %s\n", line.hear().c_str());

  const link::Advert window = link::Advert::decode(line.hear());
  std::ostringstream sums;
  for (const uint32_t checksum : mine.store.checksums(ticket.slot)) sums << checksum << ' ';
  const link::Piece all{mine.store.memory_offset(ticket.slot), 0, kWeightBytes};
  line.finish(line->put(peer, window, mine.region, std::span(&all, 1), sums.str(), soon()));
  std::printf("sink: has %s\n", line.hear().c_str());
  line.close();

  int status = 0;
  waitpid(child, &status, 0);
  manager.release_client("sink");  // what a process held that has ended, however it did
  for (const psrl::RecordRef& ref : rows) manager.free(ref);
  writer.seal();
  const psrl::ArenaUsage usage = manager.usage();
  std::printf("source: %llu of %llu bytes are free again; the sink ended with %d\n",
              static_cast<unsigned long long>(usage.free),
              static_cast<unsigned long long>(arena->capacity()), WEXITSTATUS(status));
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + num_arguments);
  try {
    if (words.size() == 3) {
      be_sink(words[0], words[1], words[2]);
      return 0;
    }
    std::string folder = std::filesystem::temp_directory_path() / "embed-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("cannot make " + folder);
    const std::shared_ptr<void> removed(nullptr,
                                        [&](void*) { std::filesystem::remove_all(folder); });
    be_source(folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", words.empty() ? "source" : "sink", error.what());
    return 1;
  }
  return 0;
}
