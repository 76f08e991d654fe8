#include "cuda/driver.h"

#include <dlfcn.h>

#include "base/errors.h"

namespace psrl::cuda {
namespace {

constexpr const char* kSoname = "libcuda.so.1";

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) {
    throw StorageError(std::string(kSoname) + " has no " + name + ": this driver is too old");
  }
}

Driver load() {
  void* library = ::dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw StorageError("no CUDA driver here: " + std::string(::dlerror()));
  }
  Driver driver{};
#define PSRL_CUDA_FIND(name) find(library, #name, driver.name)
  PSRL_CUDA_FIND(cuInit);
  PSRL_CUDA_FIND(cuGetErrorName);
  PSRL_CUDA_FIND(cuGetErrorString);
  PSRL_CUDA_FIND(cuDeviceGetCount);
  PSRL_CUDA_FIND(cuDeviceGet);
  PSRL_CUDA_FIND(cuDevicePrimaryCtxRetain);
  PSRL_CUDA_FIND(cuDevicePrimaryCtxRelease_v2);
  PSRL_CUDA_FIND(cuCtxPushCurrent_v2);
  PSRL_CUDA_FIND(cuCtxPopCurrent_v2);
  PSRL_CUDA_FIND(cuMemHostRegister_v2);
  PSRL_CUDA_FIND(cuMemHostUnregister);
  PSRL_CUDA_FIND(cuMemcpyHtoDAsync_v2);
  PSRL_CUDA_FIND(cuStreamCreate);
  PSRL_CUDA_FIND(cuStreamDestroy_v2);
  PSRL_CUDA_FIND(cuEventCreate);
  PSRL_CUDA_FIND(cuEventRecord);
  PSRL_CUDA_FIND(cuEventSynchronize);
  PSRL_CUDA_FIND(cuEventDestroy_v2);
#undef PSRL_CUDA_FIND
  driver.check(driver.cuInit(0), "cuInit");
  return driver;
}

}  // namespace

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != 0 || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  if (cuGetErrorString(result, &text) != 0 || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

void Driver::check(Result result, const std::string& what) const {
  if (result != 0) throw StorageError(what + ": " + describe(result));
}

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

}  // namespace psrl::cuda
