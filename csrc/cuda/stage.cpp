#include "cuda/stage.h"

#include <algorithm>
#include <array>

#include "base/errors.h"

namespace psrl::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{5};

std::string hex(const weights::ManifestHash& hash) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : std::as_bytes(std::span(hash))) {
    text += kDigits[static_cast<size_t>(byte) >> 4];
    text += kDigits[static_cast<size_t>(byte) & 15];
  }
  return text;
}

}  // namespace

WeightStager::WeightStager(weights::WeightStore store, const weights::ManifestHash& manifest_hash,
                           std::string client, std::shared_ptr<Device> device, uint64_t into)
    : store_(std::move(store)),
      manifest_hash_(manifest_hash),
      client_(std::move(client)),
      device_(std::move(device)),
      into_(into) {}

WeightStager::~WeightStager() {
  cancel();
  join();
}

void WeightStager::join() {
  if (thread_.joinable()) thread_.join();
}

void WeightStager::start(const StageRequest& request) {
  const std::scoped_lock lock(mutex_);
  if (running_) throw StorageError("weights: " + client_ + " is staging a version already");
  join();
  cancelled_ = false;
  num_bytes_ = num_revoked_ = 0;
  staged_.reset();
  error_ = nullptr;
  running_ = true;
  try {
    thread_ = std::thread([this, request] { run(request); });
  } catch (...) {
    running_ = false;
    throw;
  }
}

std::optional<Staged> WeightStager::wait(std::chrono::duration<double> timeout) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, timeout, [this] { return !running_; })) return std::nullopt;
  if (error_) std::rethrow_exception(error_);
  if (!staged_) throw StorageError("weights: " + client_ + " has not started to stage anything");
  return staged_;
}

void WeightStager::cancel() {
  {
    const std::scoped_lock lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

StageProgress WeightStager::progress() const {
  const std::scoped_lock lock(mutex_);
  return {.running = running_, .num_bytes = num_bytes_, .num_revoked = num_revoked_};
}

// --- The thread ----------------------------------------------------------------------------------

void WeightStager::run(const StageRequest& request) {
  std::optional<Staged> staged;
  std::exception_ptr error;
  try {
    staged = stage(request);
  } catch (...) {
    error = std::current_exception();
  }
  const std::scoped_lock lock(mutex_);
  staged_ = staged;
  error_ = error;
  running_ = false;
  changed_.notify_all();
}

Staged WeightStager::stage(const StageRequest& request) {
  const auto deadline = Clock::now() + request.timeout;
  for (;;) {
    require_wanted();
    const auto lease = store_.acquire(client_, request.min_version, request.min_epoch);
    if (lease) {
      const auto started = Clock::now();
      try {
        require_manifest(*lease);
        copy(*lease, request.in_place);
        if (!request.in_place) store_.release(*lease);
        return {*lease, num_revoked_,
                std::chrono::duration<double>(Clock::now() - started).count()};
      } catch (const Revoked&) {
        store_.release(*lease);
        ++num_revoked_;
      } catch (...) {
        store_.release(*lease);
        throw;
      }
    }
    if (Clock::now() >= deadline) throw_too_late(request);
    if (!lease) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kPoll, [this] { return cancelled_.load(); });
    }
  }
}

void WeightStager::copy(const weights::Lease& lease, bool in_place) {
  const ConstBytes data = store_.view(lease);
  num_bytes_ = 0;
  for (uint64_t chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    require_wanted();
    const uint64_t start = chunk * weights::kChunkBytes;
    const ConstBytes bytes =
        data.subspan(start, std::min(weights::kChunkBytes, data.size() - start));
    if (!in_place) device_->copy(into_ + start, bytes);
    try {
      store_.verify_chunk(lease, chunk);  // while the copy is under way
    } catch (...) {
      device_->wait();  // before anyone else may use memory and buffer
      throw;
    }
    device_->wait();
    num_bytes_ += bytes.size();
    store_.view(lease);  // raises Revoked: the copy may have gone on after the comparison
  }
}

void WeightStager::require_manifest(const weights::Lease& lease) const {
  if (lease.manifest_hash != manifest_hash_) {
    throw StorageError("weights: version " + std::to_string(lease.version) + " has manifest " +
                       hex(lease.manifest_hash) + ", " + client_ + " expects " +
                       hex(manifest_hash_) + ": trainer and replica have different models");
  }
}

void WeightStager::require_wanted() const {
  if (cancelled_) throw StorageError("weights: staging for " + client_ + " was cancelled");
}

void WeightStager::throw_too_late(const StageRequest& request) const {
  const auto newest = store_.newest();
  const std::string have = newest ? "version " + std::to_string(newest->version) + " of epoch " +
                                        std::to_string(newest->epoch)
                                  : "none";
  throw StorageError(
      "weights: " + client_ + " got no version >= " + std::to_string(request.min_version) +
      " of epoch >= " + std::to_string(request.min_epoch) + " in time; the newest is " + have +
      ", " + std::to_string(num_revoked_) + " leases were revoked");
}

}  // namespace psrl::cuda
