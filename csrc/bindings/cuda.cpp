// Devices, registered segments and staging for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>

#include "base/errors.h"
#include "base/maker.h"
#include "bindings/bindings.h"
#include "cuda/device.h"
#include "cuda/stage.h"

namespace psrl::bindings {
namespace {

using cuda::Device;
using cuda::HostRegistration;
using cuda::Staged;
using cuda::StageProgress;
using cuda::StageRequest;
using cuda::WeightStager;
using weights::WeightStore;

using NoGil = py::call_guard<py::gil_scoped_release>;
using Seconds = std::chrono::duration<double>;

Bound<WeightStager> make_stager(const WeightStore& store, const std::string& hash,
                                const std::string& client, const std::shared_ptr<Device>& device,
                                uint64_t into) {
  weights::ManifestHash manifest_hash;
  if (hash.size() != sizeof(manifest_hash)) {
    throw StorageError("weights: a manifest hash has 16 bytes");
  }
  std::memcpy(manifest_hash.data(), hash.data(), sizeof(manifest_hash));
  return make_bound<WeightStager>(store, manifest_hash, client, device, into);
}

void start(WeightStager& stager, uint64_t min_version, uint64_t min_epoch, double timeout_s,
           bool in_place) {
  stager.start({min_version, min_epoch, Seconds(timeout_s), in_place});
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def(py::init(&Device::open), py::arg("name"), NoGil())
      .def_property_readonly("name", &Device::name);

  py::class_<HostRegistration, Bound<HostRegistration>>(m, "HostRegistration")
      .def(py::init([](std::shared_ptr<Device> device, std::shared_ptr<Segment> segment,
                       double pause_s) {
             return make_bound<HostRegistration>(std::move(device), std::move(segment),
                                                 Seconds(pause_s));
           }),
           py::arg("device"), py::arg("segment"), py::arg("pause_s") = 0.005, NoGil())
      .def_property_readonly("num_pieces", &HostRegistration::num_pieces)
      .def("close", &HostRegistration::close, NoGil());

  py::class_<Staged>(m, "StagedWeights")
      .def_readonly("lease", &Staged::lease)
      .def_readonly("num_revoked", &Staged::num_revoked)
      .def_readonly("seconds", &Staged::seconds);
  py::class_<StageProgress>(m, "StageProgress")
      .def_readonly("running", &StageProgress::running)
      .def_readonly("num_bytes", &StageProgress::num_bytes)
      .def_readonly("num_revoked", &StageProgress::num_revoked);
  py::class_<WeightStager, Bound<WeightStager>>(m, "WeightStager")
      .def(py::init([](const WeightStore& store, const std::string& hash, const std::string& client,
                       const std::shared_ptr<Device>& device, uint64_t into, const py::object&) {
             return make_stager(store, hash, client, device, into);
           }),
           py::arg("store"), py::arg("manifest_hash"), py::arg("client"), py::arg("device"),
           py::arg("into"), py::arg("owner"), py::keep_alive<1, 7>())
      .def("start", &start, py::arg("min_version"), py::arg("min_epoch"), py::arg("timeout_s"),
           py::arg("in_place"), NoGil())
      .def(
          "wait",
          [](WeightStager& stager, double timeout_s) { return stager.wait(Seconds(timeout_s)); },
          py::arg("timeout_s"), NoGil())
      .def("cancel", &WeightStager::cancel)
      .def("progress", &WeightStager::progress);
}

}  // namespace psrl::bindings
