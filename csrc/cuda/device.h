// Where staged bytes go: a GPU, or the host itself, whose copies are memcpy. All that uses a Device
// runs alike on both, so it is tested where there is no GPU.
//
// Life cycle: open -> register segments (optional, faster) -> copy, wait -> registrations end ->
// device ends. Thread-safe, but `wait` waits for the copies of all threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/bytes.h"
#include "shm/segment.h"

namespace psrl::cuda {

class Device {
 public:
  // "cpu", "cuda" (the first) or "cuda:N", as in torch. Raises StorageError if there is none.
  static std::shared_ptr<Device> open(const std::string& name);

  explicit Device(std::string name) : name_(std::move(name)) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }

  // Starts to copy `from` to the address `into` of the device. Both must stay until `wait`
  // returned.
  void copy(uint64_t into, ConstBytes from);
  // Until all copies have happened.
  virtual void wait() = 0;

 protected:
  // One copy that lies within a registered piece, or touches none.
  virtual void start(uint64_t into, ConstBytes from) = 0;
  // Whether registered memory is copied faster.
  virtual bool wants_registration() const = 0;
  virtual void pin(ConstBytes piece, bool read_only) = 0;
  virtual void unpin(ConstBytes piece) noexcept = 0;

 private:
  friend class HostRegistration;

  void add_piece(ConstBytes piece);
  void remove_piece(ConstBytes piece);
  uint64_t within_piece(ConstBytes from) const;

  std::string name_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, uint64_t> pieces_;  // registered: start, length
};

// A segment's memory locked for copies to a device at full speed, until `close`.
//
// In pieces, with pauses between: the driver stops all other work of the process while it registers
// (0.1 s for each GB), so that one large call would stall an engine that is generating. On the host
// there is nothing to do.
class HostRegistration {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

  // Raises StorageError, which names segment and bytes; nothing stays registered then.
  HostRegistration(std::shared_ptr<Device> device, std::shared_ptr<const Segment> segment,
                   std::chrono::duration<double> pause);
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  ~HostRegistration() { close(); }

  // Gives the memory back; nothing may be copied from it at that moment. Idempotent.
  void close() noexcept;

  uint64_t num_pieces() const { return num_pieces_; }

 private:
  ConstBytes piece(uint64_t index) const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<const Segment> segment_;
  uint64_t num_pieces_ = 0;  // registered so far
};

}  // namespace psrl::cuda
