// The headers of a weight store, whatever was written there: opened, read, written to and sealed
// within its memory.
#include <cstring>
#include <memory>

#include "base/errors.h"
#include "fuzz.h"
#include "weights/store.h"

namespace psrl::fuzz {
namespace {

using namespace weights;

constexpr uint64_t kData = 256;
constexpr ManifestHash kHash{1, 2};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// A store with two versions and a third begun.
struct Store {
  Store() : memory(static_cast<std::byte*>(std::aligned_alloc(kPage, size))) {
    WeightStore store = WeightStore::format({memory.get(), size}, kData, nullptr);
    for (uint64_t version = 1; version <= 3; ++version) {
      const Ticket ticket = store.begin(1, version, kHash);
      store.put(ticket, 0, std::vector<std::byte>(kData, static_cast<std::byte>(version)));
      if (version == 3) break;
      store.seal(ticket, kData);
      store.commit(1, version, ticket.slot);
    }
    store.acquire("replica", 1);
  }

  const uint64_t size = WeightStore::required_bytes(kData);
  std::unique_ptr<std::byte, Free> memory;
};

// The words that decide anything: the beginnings of the store's header and of each slot's.
constexpr size_t kWords = 64;
constexpr size_t kParts = 1 + kSlots;

uint64_t place_of(size_t part) { return part == 0 ? 0 : Plan(kData).slot(part - 1); }

template <class Work>
void attempt(Work work) {
  try {
    work();
  } catch (const StorageError&) {
  } catch (const StaleMessage&) {
  }
}

}  // namespace

std::vector<std::string> seeds() {
  const Store store;
  std::string words;
  for (size_t part = 0; part < kParts; ++part) {
    words += text_of({store.memory.get() + place_of(part), kWords});
  }
  return {words};
}

void feed(std::string_view input) {
  static const Store good;
  static const Store store;
  std::memcpy(store.memory.get(), good.memory.get(), store.size);
  for (size_t part = 0; part < kParts && part * kWords < input.size(); ++part) {
    const std::string_view words = input.substr(part * kWords, kWords);
    std::memcpy(store.memory.get() + place_of(part), words.data(), words.size());
  }
  std::optional<WeightStore> opened;
  attempt([&] { opened.emplace(WeightStore::open({store.memory.get(), store.size}, nullptr)); });
  if (!opened) return;
  require(WeightStore::required_bytes(opened->data_bytes()) <= store.size);
  std::vector<std::byte> out(opened->data_bytes());
  attempt([&] { opened->slots(); });
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    attempt([&] { require(opened->checksums(slot).size() == opened->num_chunks()); });
  }
  attempt([&] {
    const auto lease = opened->acquire("replica", 0);
    if (!lease) return;
    require(opened->view(*lease).size() == out.size());
    attempt([&] { opened->copy_chunks(*lease, 0, opened->num_chunks(), out); });
    attempt([&] { opened->verify(*lease); });
    opened->release(*lease);
  });
  attempt([&] { opened->release_client("replica"); });
  attempt([&] { opened->abandon(0); });
  attempt([&] {
    const auto newest = opened->newest();
    const uint64_t epoch = newest ? newest->epoch + 1 : 2;
    const Ticket ticket = opened->begin(epoch, 1, kHash);
    opened->put(ticket, 0, out);
    opened->seal(ticket, out.size());
    opened->commit(epoch, 1, ticket.slot);
  });
}

}  // namespace psrl::fuzz
