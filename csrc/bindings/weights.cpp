// Weight slots for Python.
#include "bindings/bindings.h"

namespace psrl::bindings {

void bind_weights(py::module_&) {}

}  // namespace psrl::bindings
