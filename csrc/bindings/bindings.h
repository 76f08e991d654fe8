// One function per area; each stands in the file of the same name.
#pragma once

#include <pybind11/pybind11.h>

namespace psrl::bindings {

namespace py = pybind11;

void bind_shm(py::module_& m);
void bind_queue(py::module_& m);
void bind_weights(py::module_& m);
void bind_delta(py::module_& m);
void bind_link(py::module_& m);
void bind_cuda(py::module_& m);

}  // namespace psrl::bindings
