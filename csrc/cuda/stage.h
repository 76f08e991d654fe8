// Copies the newest version of the weights to a buffer on a device, beside whatever else the
// process does: on a thread of its own, which knows nothing of Python, one chunk in flight.
//
//   start -> (progress, cancel, wait)* -> wait gives the version or raises -> start ...
//
// What was staged is whole: every chunk was compared with its checksum, and the lease looked at
// after its copy. A lease that was revoked on the way is replaced by one on the newest version. The
// buffer belongs to the caller and must stay as it is from `start` until `wait` gave an answer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "cuda/device.h"
#include "weights/store.h"

namespace psrl::cuda {

struct StageRequest {
  uint64_t min_version = 0;
  uint64_t min_epoch = 0;
  // How long to wait for such a version, and to begin anew after a lease was revoked.
  std::chrono::duration<double> timeout{0};
  // Compare the bytes where they are and keep the lease: nothing is copied.
  bool in_place = false;
};

struct Staged {
  weights::Lease lease;  // given back already, unless in place
  uint64_t num_revoked = 0;
  double seconds = 0;  // from this lease to the last byte
};

struct StageProgress {
  bool running = false;
  uint64_t num_bytes = 0;  // of the present attempt
  uint64_t num_revoked = 0;
};

class WeightStager {
 public:
  // `client` is the name under which leases are counted; `into` an address on the device with room
  // for `store.data_bytes()`.
  WeightStager(weights::WeightStore store, const weights::ManifestHash& manifest_hash,
               std::string client, std::shared_ptr<Device> device, uint64_t into);
  WeightStager(const WeightStager&) = delete;
  WeightStager& operator=(const WeightStager&) = delete;
  ~WeightStager();

  // Raises StorageError if one is running.
  void start(const StageRequest& request);
  // What was staged last; none if it still runs after `timeout`. Raises what it ended with:
  // StorageError when the time is over, the manifest is another or it was cancelled;
  // ChecksumMismatch for damaged bytes.
  std::optional<Staged> wait(std::chrono::duration<double> timeout);
  // Ends the one that runs, after the chunk in flight.
  void cancel();
  StageProgress progress() const;

 private:
  void run(const StageRequest& request);
  Staged stage(const StageRequest& request);
  void copy(const weights::Lease& lease, bool in_place);
  void require_manifest(const weights::Lease& lease) const;
  void require_wanted() const;
  [[noreturn]] void throw_too_late(const StageRequest& request) const;
  void join();

  weights::WeightStore store_;
  const weights::ManifestHash manifest_hash_;
  const std::string client_;
  const std::shared_ptr<Device> device_;
  const uint64_t into_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  std::optional<Staged> staged_;
  std::exception_ptr error_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<uint64_t> num_bytes_ = 0;
  std::atomic<uint64_t> num_revoked_ = 0;
  std::thread thread_;
};

}  // namespace psrl::cuda
