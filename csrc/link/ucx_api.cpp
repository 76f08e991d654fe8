#ifdef PSRL_WITH_UCX

#include "link/ucx_api.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "base/errors.h"

namespace psrl::link {
namespace {

constexpr const char* kSoname = "libucp.so.0";

void* open_library() {
  const char* choice = std::getenv("PSRL_UCX");
  std::string tried;
  if (choice != nullptr && std::string_view(choice).find('/') != std::string_view::npos) {
    // Either the folder of the libraries or the one above it.
    for (const char* below : {"/", "/lib/"}) {
      const std::string file = choice + (below + std::string(kSoname));
      if (void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
      tried += std::string(tried.empty() ? "" : "; ") + ::dlerror();
    }
    throw LinkError("PSRL_UCX=" + std::string(choice) + " has no usable libucp: " + tried);
  }
  if (void* library = ::dlopen(kSoname, RTLD_NOW | RTLD_LOCAL)) return library;
  throw LinkError(
      "UCX cannot be loaded (" + std::string(::dlerror()) +
      "): pip install libucx-cu12, or the system's package (Debian: libucx0), or set PSRL_UCX to a "
      "folder with libucp.so.0");
}

// UCX prints to the standard output unless told otherwise; that is the application's. What users
// asked to see (UCX_LOG_LEVEL, UCX_LOG_FILE) goes its own way.
int log_to_stderr(const char*, unsigned, const char*, int level, const void*, const char* format,
                  va_list arguments) {
  constexpr int kWarn = 2, kStop = 0, kContinue = 1;  // UCS_LOG_*
  if (level > kWarn) return kContinue;
  char text[512];
  std::vsnprintf(text, sizeof(text), format, arguments);
  std::fprintf(stderr, "UCX %s: %s\n", level == kWarn ? "warning" : "error", text);
  return kStop;
}

void keep_stdout_clean(void* library) {
  using Push = void (*)(decltype(&log_to_stderr));
  const auto push = reinterpret_cast<Push>(::dlsym(library, "ucs_log_push_handler"));
  if (push != nullptr && std::getenv("UCX_LOG_FILE") == nullptr) push(&log_to_stderr);
}

UcxApi load() {
  void* library = open_library();
  keep_stdout_clean(library);
  UcxApi api;
#define PSRL_UCX_FIND(name)                                                \
  api.name = reinterpret_cast<decltype(&::name)>(::dlsym(library, #name)); \
  if (api.name == nullptr) {                                               \
    throw LinkError("this UCX has no " #name "; 1.13 or newer is needed"); \
  }
  PSRL_UCX_FUNCTIONS(PSRL_UCX_FIND)
#undef PSRL_UCX_FIND
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(api.ucp_init_version), &info) != 0) {
    api.file = info.dli_fname;
  }
  api.version = api.ucp_get_version_string();
  unsigned major = 0, minor = 0, release = 0;
  api.ucp_get_version(&major, &minor, &release);
  if (major != 1 || minor < 13) {
    throw LinkError("UCX " + api.version + " (" + api.file + ") is not 1.13 or a later 1.x");
  }
  return api;
}

}  // namespace

const UcxApi& ucx_api() {
  static const UcxApi api = load();
  return api;
}

void fail(const UcxApi& ucx, const std::string& what, ucs_status_t status) {
  throw LinkError(what + ": " + ucx.ucs_status_string(status));
}

}  // namespace psrl::link

#endif  // PSRL_WITH_UCX
