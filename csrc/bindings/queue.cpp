// The sample queue for Python.
#include "bindings/bindings.h"

namespace psrl::bindings {

void bind_queue(py::module_&) {}

}  // namespace psrl::bindings
