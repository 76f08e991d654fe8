// The CUDA driver, found at run time: nothing of CUDA is needed to build, and a host without it
// loses nothing but the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace psrl::cuda {

using Result = int;
using DeviceNumber = int;
using DevicePointer = unsigned long long;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;

inline constexpr unsigned kHostRegisterPortable = 0x01;
inline constexpr unsigned kHostRegisterReadOnly = 0x08;
inline constexpr unsigned kStreamNonBlocking = 0x1;
inline constexpr unsigned kEventBlockingSync = 0x1;
inline constexpr unsigned kEventDisableTiming = 0x2;

// What we call, under the names that the library exports.
struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(DeviceNumber*, int ordinal);
  Result (*cuDevicePrimaryCtxRetain)(Context*, DeviceNumber);
  Result (*cuDevicePrimaryCtxRelease_v2)(DeviceNumber);
  Result (*cuCtxPushCurrent_v2)(Context);
  Result (*cuCtxPopCurrent_v2)(Context*);
  Result (*cuMemHostRegister_v2)(void*, size_t, unsigned flags);
  Result (*cuMemHostUnregister)(void*);
  Result (*cuMemcpyHtoDAsync_v2)(DevicePointer, const void*, size_t, Stream);
  Result (*cuStreamCreate)(Stream*, unsigned flags);
  Result (*cuStreamDestroy_v2)(Stream);
  Result (*cuEventCreate)(Event*, unsigned flags);
  Result (*cuEventRecord)(Event, Stream);
  Result (*cuEventSynchronize)(Event);
  Result (*cuEventDestroy_v2)(Event);

  // Raises StorageError "WHAT: CUDA_ERROR_NAME (text)" unless it went well.
  void check(Result result, const std::string& what) const;
  std::string describe(Result result) const;
};

// Loaded and initialised once. Raises StorageError that says what is missing.
const Driver& driver();

}  // namespace psrl::cuda
