// Weight slots for Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>

#include "base/errors.h"
#include "bindings/bindings.h"
#include "shm/segment.h"
#include "weights/store.h"

namespace psrl::bindings {
namespace {

using weights::Lease;
using weights::ManifestHash;
using weights::SlotInfo;
using weights::SlotState;
using weights::Ticket;
using weights::WeightStore;

using SegmentPtr = std::shared_ptr<Segment>;
using NoGil = py::call_guard<py::gil_scoped_release>;

ManifestHash hash_from(const std::string& bytes) {
  ManifestHash hash;
  if (bytes.size() != sizeof(hash)) {
    throw StorageError("weights: a manifest hash has 16 bytes, not " +
                       std::to_string(bytes.size()));
  }
  std::memcpy(hash.data(), bytes.data(), sizeof(hash));
  return hash;
}

py::bytes hash_to(const ManifestHash& hash) {
  return {reinterpret_cast<const char*>(hash.data()), sizeof(hash)};
}

Bytes bytes_of(const py::buffer_info& info) {
  if (!PyBuffer_IsContiguous(info.view(), 'C')) {
    throw StorageError("weights: the buffer is not contiguous");
  }
  return {static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

void put(WeightStore& store, const Ticket& ticket, uint64_t offset, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const ConstBytes bytes = bytes_of(info);
  const py::gil_scoped_release release;
  store.put(ticket, offset, bytes);
}

// `copies` is [N, 6], as psrl.weights.copies has them.
void put_copies(WeightStore& store, const Ticket& ticket, const py::buffer& buffer,
                const py::array_t<uint64_t, py::array::c_style | py::array::forcecast>& copies) {
  const py::buffer_info info = buffer.request();
  const ConstBytes bytes = bytes_of(info);
  if (copies.ndim() != 2 || copies.shape(1) != 6) {
    throw StorageError("weights: copies have six numbers each");
  }
  static_assert(sizeof(weights::CopyRuns) == 6 * sizeof(uint64_t));
  std::vector<weights::CopyRuns> runs(static_cast<size_t>(copies.shape(0)));
  if (!runs.empty()) std::memcpy(runs.data(), copies.data(), runs.size() * sizeof(runs[0]));
  const py::gil_scoped_release release;
  store.put(ticket, bytes, runs);
}

void copy_chunks(const WeightStore& store, const Lease& lease, uint64_t first, uint64_t count,
                 const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  const Bytes bytes = bytes_of(info);
  const py::gil_scoped_release release;
  store.copy_chunks(lease, first, count, bytes);
}

// uint8 view of the leased bytes; the array keeps the segment mapped.
py::array view(const WeightStore& store, const Lease& lease) {
  const ConstBytes bytes = store.view(lease);
  const py::capsule base(new WeightStore(store),
                         [](void* held) { delete static_cast<WeightStore*>(held); });
  return {py::dtype::of<uint8_t>(), {bytes.size()}, {1}, bytes.data(), base};
}

weights::Follows follows(bool gap) {
  return gap ? weights::Follows::kAny : weights::Follows::kNext;
}

const char* state_name(const SlotInfo& info) {
  switch (info.state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kWriting:
      return "writing";
    case SlotState::kSealed:
      return "sealed";
    case SlotState::kCommitted:
      return "committed";
  }
  return "damaged";
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const weights::StaleMessage& error) {
    const py::object type = py::module_::import("psrl.errors").attr("StaleMessage");
    PyErr_SetString(type.ptr(), error.what());
  }
}

void bind_values(py::module_& m) {
  py::class_<Ticket>(m, "WeightTicket")
      .def(py::init<uint32_t, uint64_t>(), py::arg("slot"), py::arg("generation"))
      .def_readonly("slot", &Ticket::slot)
      .def_readonly("generation", &Ticket::generation);
  py::class_<Lease>(m, "WeightLease")
      .def_readonly("slot", &Lease::slot)
      .def_readonly("generation", &Lease::generation)
      .def_readonly("epoch", &Lease::epoch)
      .def_readonly("version", &Lease::version)
      .def_property_readonly("manifest_hash",
                             [](const Lease& lease) { return hash_to(lease.manifest_hash); });
  py::class_<SlotInfo>(m, "WeightSlot")
      .def_property_readonly("state", &state_name)
      .def_readonly("generation", &SlotInfo::generation)
      .def_readonly("epoch", &SlotInfo::epoch)
      .def_readonly("version", &SlotInfo::version)
      .def_readonly("written", &SlotInfo::written)
      .def_readonly("leases", &SlotInfo::leases)
      .def_readonly("newest", &SlotInfo::newest);
  py::class_<weights::Committed>(m, "CommittedWeights")
      .def_readonly("epoch", &weights::Committed::epoch)
      .def_readonly("version", &weights::Committed::version)
      .def_readonly("slot", &weights::Committed::slot);
}

}  // namespace

void bind_weights(py::module_& m) {
  py::register_local_exception_translator(&translate);
  bind_values(m);
  m.attr("WEIGHT_CHUNK_BYTES") = weights::kChunkBytes;
  py::class_<WeightStore>(m, "WeightStore")
      .def_static("required_bytes", &WeightStore::required_bytes, py::arg("data_bytes"))
      .def_static(
          "format",
          [](const SegmentPtr& segment, uint64_t data_bytes) {
            return WeightStore::format(segment->bytes(), data_bytes, segment);
          },
          py::arg("segment"), py::arg("data_bytes"), NoGil())
      .def_static(
          "open",
          [](const SegmentPtr& segment) { return WeightStore::open(segment->bytes(), segment); },
          py::arg("segment"))
      .def_property_readonly("data_bytes", &WeightStore::data_bytes)
      .def_property_readonly("num_chunks", &WeightStore::num_chunks)
      .def("fence", &WeightStore::fence, py::arg("epoch"))
      .def(
          "begin",
          [](WeightStore& store, uint64_t epoch, uint64_t version, const std::string& hash,
             bool gap) { return store.begin(epoch, version, hash_from(hash), follows(gap)); },
          py::arg("epoch"), py::arg("version"), py::arg("manifest_hash"), py::kw_only(),
          py::arg("gap") = false)
      .def("put", &put, py::arg("ticket"), py::arg("offset"), py::arg("data"))
      .def("put_copies", &put_copies, py::arg("ticket"), py::arg("data"), py::arg("copies"))
      .def("memory_offset", &WeightStore::memory_offset, py::arg("slot"))
      .def("checksums", &WeightStore::checksums, py::arg("slot"))
      .def("checksum", &WeightStore::checksum, py::arg("ticket"), py::arg("first"),
           py::arg("count"), NoGil())
      .def("seal", &WeightStore::seal, py::arg("ticket"), py::arg("expected_bytes"), NoGil())
      .def("abandon", &WeightStore::abandon, py::arg("slot"))
      .def(
          "commit",
          [](WeightStore& store, uint64_t epoch, uint64_t version, uint32_t slot, bool gap) {
            store.commit(epoch, version, slot, follows(gap));
          },
          py::arg("epoch"), py::arg("version"), py::arg("slot"), py::kw_only(),
          py::arg("gap") = false)
      .def("newest", &WeightStore::newest)
      .def("acquire", &WeightStore::acquire, py::arg("client"), py::arg("min_version"),
           py::arg("min_epoch") = 0)
      .def("valid", &WeightStore::valid, py::arg("lease"))
      .def("release", &WeightStore::release, py::arg("lease"))
      .def("release_client", &WeightStore::release_client, py::arg("client"))
      .def("copy_chunks", &copy_chunks, py::arg("lease"), py::arg("first"), py::arg("count"),
           py::arg("into"))
      .def("verify", &WeightStore::verify, py::arg("lease"), NoGil())
      .def("view", &view, py::arg("lease"))
      .def("slots", &WeightStore::slots);
}

}  // namespace psrl::bindings
