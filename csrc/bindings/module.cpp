// psrl._core: areas in their own files, errors mapped here once.
#include <exception>

#include "base/errors.h"
#include "bindings/bindings.h"

namespace psrl::bindings {
namespace {

// psrl.errors is imported when the first error is thrown, so importing the extension does nothing.
void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("psrl.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ArenaFull& error) {
    raise("ArenaFull", error);
  } catch (const UnknownKey& error) {
    raise("UnknownKey", error);
  } catch (const Revoked& error) {
    raise("Revoked", error);
  } catch (const ChecksumMismatch& error) {
    raise("ChecksumMismatch", error);
  } catch (const StorageError& error) {
    raise("StorageError", error);
  } catch (const LinkError& error) {
    raise("LinkError", error);
  }
}

}  // namespace
}  // namespace psrl::bindings

PYBIND11_MODULE(_core, m) {
  using namespace psrl::bindings;
  m.doc() = "The C++ core of PSRL: shared-memory segments, the sample queue, weight slots, links.";
  py::register_local_exception_translator(&translate);
  bind_shm(m);
  bind_queue(m);
  bind_weights(m);
  bind_delta(m);
  bind_link(m);
  bind_cuda(m);
}
