// Segments for Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/errors.h"
#include "base/maker.h"
#include "bindings/bindings.h"
#include "shm/memory.h"
#include "shm/segment.h"
#include "shm/server.h"

namespace psrl::bindings {
namespace {

// uint8 view of a part of the data; the array keeps the segment mapped.
py::array segment_view(const std::shared_ptr<Segment>& segment, uint64_t offset, uint64_t length,
                       bool writable) {
  const std::byte* data = writable ? segment->bytes(offset, length).data()
                                   : segment->const_bytes(offset, length).data();
  auto* owner = new std::shared_ptr<Segment>(segment);
  const py::capsule base(owner,
                         [](void* held) { delete static_cast<std::shared_ptr<Segment>*>(held); });
  py::array view(py::dtype::of<uint8_t>(), {length}, {1}, data, base);
  if (!writable) view.attr("setflags")(py::arg("write") = false);
  return view;
}

}  // namespace

void bind_shm(py::module_& m) {
  m.def(
      "memory_available", [] { return memory_available(); },
      py::call_guard<py::gil_scoped_release>());

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("create", &Segment::create, py::arg("name"), py::arg("size"),
                  py::arg("config_key") = "transfer_queue.arena_bytes",
                  py::call_guard<py::gil_scoped_release>())
      .def_static(
          "attach",
          [](int fd, bool read_only) {
            return Segment::attach(fd, read_only ? Access::kReadOnly : Access::kReadWrite);
          },
          py::arg("fd"), py::arg("read_only") = false, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("name", &Segment::name)
      .def_property_readonly("size", &Segment::size)
      .def_property_readonly("generation", &Segment::generation)
      .def_property_readonly("memory_kind", [](const Segment&) { return "host"; })
      .def_property_readonly("read_only",
                             [](const Segment& s) { return s.access() == Access::kReadOnly; })
      .def_property_readonly("fd", &Segment::fd)
      .def("view", &segment_view, py::arg("offset"), py::arg("length"),
           py::arg("writable") = false);

  py::class_<SegmentServer, Bound<SegmentServer>>(m, "SegmentServer")
      .def(py::init([](const std::string& path) { return make_bound<SegmentServer>(path); }),
           py::arg("path"))
      .def("add", &SegmentServer::add, py::arg("segment"))
      .def("close", &SegmentServer::close, py::call_guard<py::gil_scoped_release>())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](SegmentServer& server, const py::args&) {
        const py::gil_scoped_release release;
        server.close();
      });
  m.def(
      "fetch_segment",
      [](const std::string& path, const std::string& name, double timeout_s, bool read_only) {
        return fetch_segment(path, name, std::chrono::duration<double>(timeout_s),
                             read_only ? Access::kReadOnly : Access::kReadWrite);
      },
      py::arg("path"), py::arg("name"), py::arg("timeout_s"), py::arg("read_only") = false,
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace psrl::bindings
