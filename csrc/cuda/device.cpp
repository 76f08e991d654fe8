#include "cuda/device.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <thread>

#include "base/errors.h"
#include "base/maker.h"
#include "cuda/driver.h"

namespace psrl::cuda {
namespace {

constexpr uint64_t kPage = 4096;

class HostDevice final : public Device {
 public:
  HostDevice() : Device("cpu") {}
  void wait() override {}

 protected:
  void start(uint64_t into, ConstBytes from) override {
    std::memcpy(reinterpret_cast<std::byte*>(into), from.data(), from.size());
  }
  bool wants_registration() const override { return false; }
  void pin(ConstBytes, bool) override {}
  void unpin(ConstBytes) noexcept override {}
};

// The device's primary context, which torch uses too, current on this thread for a while.
class Current {
 public:
  Current(const Driver& driver, Context context) : driver_(driver) {
    driver_.check(driver_.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    Context popped = nullptr;
    driver_.cuCtxPopCurrent_v2(&popped);
  }

 private:
  const Driver& driver_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal) : Device("cuda:" + std::to_string(ordinal)), driver_(driver()) {
    int count = 0;
    driver_.check(driver_.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (ordinal >= count) {
      throw StorageError(name() + ": this process sees " + std::to_string(count) + " GPUs");
    }
    driver_.check(driver_.cuDeviceGet(&number_, ordinal), name() + ": cuDeviceGet");
    driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, number_),
                  name() + ": cuDevicePrimaryCtxRetain");
    try {
      const Current current(driver_, context_);
      driver_.check(driver_.cuStreamCreate(&stream_, kStreamNonBlocking),
                    name() + ": cuStreamCreate");
      // Whoever waits sleeps: the cores are for those who make tokens.
      driver_.check(driver_.cuEventCreate(&done_, kEventBlockingSync | kEventDisableTiming),
                    name() + ": cuEventCreate");
    } catch (...) {
      end();
      throw;
    }
  }

  ~CudaDevice() override { end(); }

  void wait() override {
    const Current current(driver_, context_);
    driver_.check(driver_.cuEventSynchronize(done_), name() + ": waiting for a copy");
  }

 protected:
  void start(uint64_t into, ConstBytes from) override {
    const Current current(driver_, context_);
    driver_.check(driver_.cuMemcpyHtoDAsync_v2(into, from.data(), from.size(), stream_),
                  name() + ": cuMemcpyHtoDAsync of " + std::to_string(from.size()) + " bytes");
    driver_.check(driver_.cuEventRecord(done_, stream_), name() + ": cuEventRecord");
  }

  bool wants_registration() const override { return true; }

  void pin(ConstBytes piece, bool read_only) override {
    const Current current(driver_, context_);
    const unsigned flags = kHostRegisterPortable | (read_only ? kHostRegisterReadOnly : 0);
    void* start = const_cast<std::byte*>(piece.data());
    const Result result = driver_.cuMemHostRegister_v2(start, piece.size(), flags);
    if (result != 0) {
      throw StorageError("cuMemHostRegister: " + driver_.describe(result) + memlock_advice());
    }
  }

  void unpin(ConstBytes piece) noexcept override {
    // Fails only when the process is ending and the driver has gone before us.
    if (driver_.cuCtxPushCurrent_v2(context_) != 0) return;
    driver_.cuMemHostUnregister(const_cast<std::byte*>(piece.data()));
    Context popped = nullptr;
    driver_.cuCtxPopCurrent_v2(&popped);
  }

 private:
  void end() noexcept {
    if (driver_.cuCtxPushCurrent_v2(context_) == 0) {
      if (done_ != nullptr) driver_.cuEventDestroy_v2(done_);
      if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
      Context popped = nullptr;
      driver_.cuCtxPopCurrent_v2(&popped);
    }
    driver_.cuDevicePrimaryCtxRelease_v2(number_);
  }

  const Driver& driver_;
  DeviceNumber number_ = 0;
  Context context_ = nullptr;
  Stream stream_ = nullptr;
  Event done_ = nullptr;
};

}  // namespace

std::shared_ptr<Device> Device::open(const std::string& name) {
  if (name == "cpu") return std::make_shared<HostDevice>();
  constexpr std::string_view kPrefix = "cuda";
  if (name == kPrefix) return std::shared_ptr<Device>(make_bound<CudaDevice>(0));
  if (name.starts_with("cuda:")) {
    const char* first = name.data() + kPrefix.size() + 1;
    const char* last = name.data() + name.size();
    int ordinal = -1;
    const auto [end, error] = std::from_chars(first, last, ordinal);
    if (error == std::errc() && end == last && ordinal >= 0) {
      return std::shared_ptr<Device>(make_bound<CudaDevice>(ordinal));
    }
  }
  throw StorageError("no device is called " + name + "; known are cpu, cuda and cuda:N");
}

void Device::copy(uint64_t into, ConstBytes from) {
  while (!from.empty()) {
    const uint64_t length = within_piece(from);
    start(into, from.first(length));
    into += length;
    from = from.subspan(length);
  }
}

uint64_t Device::within_piece(ConstBytes from) const {
  const std::scoped_lock lock(mutex_);
  const auto next = pieces_.upper_bound(from.data());
  const std::byte* end = from.data() + from.size();
  if (next != pieces_.end()) end = std::min(end, next->first);
  if (next != pieces_.begin()) {
    const auto& [start, length] = *std::prev(next);
    if (from.data() < start + length) end = std::min(end, start + length);
  }
  return static_cast<uint64_t>(end - from.data());
}

void Device::add_piece(ConstBytes piece) {
  const std::scoped_lock lock(mutex_);
  pieces_[piece.data()] = piece.size();
}

void Device::remove_piece(ConstBytes piece) {
  const std::scoped_lock lock(mutex_);
  pieces_.erase(piece.data());
}

HostRegistration::HostRegistration(std::shared_ptr<Device> device,
                                   std::shared_ptr<const Segment> segment,
                                   std::chrono::duration<double> pause)
    : device_(std::move(device)), segment_(std::move(segment)) {
  if (!device_->wants_registration()) return;
  const bool read_only = segment_->access() == Access::kReadOnly;
  const uint64_t count = (segment_->size() + kPieceBytes - 1) / kPieceBytes;
  for (uint64_t i = 0; i < count; ++i) {
    if (i > 0 && pause.count() > 0) std::this_thread::sleep_for(pause);
    try {
      device_->pin(piece(i), read_only);
    } catch (const StorageError& error) {
      close();
      throw StorageError("segment " + segment_->name() + ": bytes " +
                         std::to_string(i * kPieceBytes) + " and on of " +
                         std::to_string(segment_->size()) + " cannot be registered with " +
                         device_->name() + ": " + error.what());
    }
    device_->add_piece(piece(i));
    num_pieces_ = i + 1;
  }
}

void HostRegistration::close() noexcept {
  for (; num_pieces_ > 0; --num_pieces_) {
    const ConstBytes last = piece(num_pieces_ - 1);
    device_->remove_piece(last);
    device_->unpin(last);
  }
}

ConstBytes HostRegistration::piece(uint64_t index) const {
  // The data starts at a page and the mapping ends at one.
  const ConstBytes data = segment_->const_bytes();
  const uint64_t offset = index * kPieceBytes;
  return {data.data() + offset, std::min(kPieceBytes, align_up(data.size() - offset, kPage))};
}

}  // namespace psrl::cuda
