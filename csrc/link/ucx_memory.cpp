#ifdef PSRL_WITH_UCX

#include "link/ucx_endpoint.h"

#include <random>
#include <set>

#include "base/errors.h"

namespace psrl::link::ucx {

using namespace std::chrono_literals;

constexpr auto kWithdrawGrace = 1s;

UcxRegionPtr UcxEndpoint::registered(UcxRegionPtr region) {
  const std::lock_guard lock(memory_mutex_);
  if (context_ == nullptr) throw LinkError("the endpoint is closed");
  if (region->const_bytes.size() > 0) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                        UCP_MEM_MAP_PARAM_FIELD_PROT;
    params.address = const_cast<std::byte*>(region->const_bytes.data());
    params.length = region->const_bytes.size();
    params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
    if (region->writable) {
      params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE;
    }
    auto status = ucx_.ucp_mem_map(context_, &params, &region->memory);
    if (status != UCS_OK) {
      throw LinkError("cannot register " + std::to_string(region->const_bytes.size()) +
                      " bytes with UCX: " + ucx_.ucs_status_string(status) + memlock_advice());
    }
    void* key = nullptr;
    size_t num_key = 0;
    status = ucx_.ucp_rkey_pack(context_, region->memory, &key, &num_key);
    if (status != UCS_OK) {
      ucx_.ucp_mem_unmap(context_, region->memory);
      fail(ucx_, "cannot make a remote key", status);
    }
    region->key.assign(static_cast<const char*>(key), num_key);
    ucx_.ucp_rkey_buffer_release(key);
  }
  regions_[region.get()] = region;
  return region;
}

RegionPtr UcxEndpoint::add_region(std::shared_ptr<Segment> segment) {
  return registered(std::make_shared<UcxRegion>(std::move(segment)));
}

RegionPtr UcxEndpoint::add_region(Bytes memory, std::shared_ptr<const void> owner) {
  return registered(std::make_shared<UcxRegion>(memory, std::move(owner)));
}

// Null when the endpoint is closed: nothing is a region of it any more.
UcxRegionPtr UcxEndpoint::known(const RegionPtr& region) const {
  const std::lock_guard lock(memory_mutex_);
  if (context_ == nullptr) return nullptr;
  const auto found = regions_.find(region.get());
  if (found == regions_.end()) throw LinkError("not a region of this endpoint");
  return found->second;
}

void UcxEndpoint::remove_region(const RegionPtr& region) {
  const auto ours = known(region);
  if (ours == nullptr) return;
  std::set<uint64_t> windows;
  {
    const std::lock_guard lock(memory_mutex_);
    for (auto at = windows_.begin(); at != windows_.end();) {
      if (at->second.region != ours) {
        ++at;
        continue;
      }
      windows.insert(at->first);
      at = windows_.erase(at);
    }
  }
  quiesce(windows);
  const std::lock_guard lock(memory_mutex_);
  if (regions_.erase(ours.get()) == 0) return;
  if (ours->memory != nullptr) ucx_.ucp_mem_unmap(context_, ours->memory);
  ours->memory = nullptr;
}

Advert UcxEndpoint::advertise(const RegionPtr& region, uint64_t offset, uint64_t length,
                              WindowAccess access) {
  const auto ours = known(region);
  if (ours == nullptr) throw LinkError("the endpoint is closed");
  const auto* base =
      access == WindowAccess::kPut ? ours->write(offset, length) : ours->read(offset, length);
  const auto address = reinterpret_cast<uint64_t>(base);
  Advert advert{.length = length,
                .access = access,
                .memory_kind = ours->memory_kind,
                .numa_node = ours->numa_node,
                .key = {}};
  advert.key.assign(reinterpret_cast<const char*>(&address), sizeof(address));
  advert.key += ours->key;
  const std::lock_guard lock(memory_mutex_);
  advert.window = next_window_++;
  advert.generation = ++next_generation_;
  windows_[advert.window] = {advert.generation, ours, offset, length, access};
  return advert;
}

void UcxEndpoint::withdraw(const Advert& advert) {
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = windows_.find(advert.window);
    if (found == windows_.end() || found->second.generation != advert.generation) return;
    windows_.erase(found);
  }
  quiesce({advert.window});
}

// Returns when no peer touches these windows, which are not found any more.
void UcxEndpoint::quiesce(const std::set<uint64_t>& windows) {
  if (windows.empty()) return;
  call([this, &windows] {
    const auto busy = [&windows](const Peer& peer) {
      for (const auto& [_, window] : peer.grants) {
        if (windows.contains(window)) return true;
      }
      for (const auto& [transfer, _] : peer.transfers) {
        if (transfer->served && windows.contains(transfer->window)) return true;
      }
      return false;
    };
    const auto none_busy = [this, &busy] {
      for (const auto& [_, peer] : peers_) {
        if (busy(*peer)) return false;
      }
      return true;
    };
    for (auto& [_, peer] : peers_) {
      if (peer->cut || !busy(*peer)) continue;
      for (const auto& [op, window] : peer->grants) {
        if (windows.contains(window)) send(*peer, {.kind = Kind::kCut, .op = op});
      }
      for (auto& [transfer, _] : peer->transfers) {
        if (transfer->served && windows.contains(transfer->window)) {
          stop_transfer(*transfer, Status::kStale, "the window was withdrawn");
        }
      }
    }
    wait_until(none_busy, Clock::now() + kWithdrawGrace);
    for (auto& [_, peer] : peers_) {
      if (busy(*peer)) {
        cut(*peer, Status::kPeerLost, Status::kPeerLost,
            "it went on with a withdrawn window and was cut off");
      }
    }
    wait_until(none_busy, Clock::now() + kReapGrace);
  });
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
