// Patches between versions for Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>

#include "base/errors.h"
#include "bindings/bindings.h"
#include "weights/delta.h"

namespace psrl::bindings {
namespace {

using weights::Block;
using weights::BlockEncoder;
using weights::DeltaLayout;
using weights::Item;
using weights::PatchHeader;

using Hash = std::array<uint64_t, 2>;
using Checksums = std::vector<uint32_t>;
template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

Hash hash_from(const std::string& bytes) {
  Hash hash;
  if (bytes.size() != sizeof(hash)) {
    throw StorageError("delta: a hash has 16 bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(hash.data(), bytes.data(), sizeof(hash));
  return hash;
}

py::bytes hash_to(const Hash& hash) {
  return {reinterpret_cast<const char*>(hash.data()), sizeof(hash)};
}

// A contiguous buffer for as long as the object lives.
class Buffer {
 public:
  explicit Buffer(const py::buffer& buffer, bool writable = false)
      : info_(buffer.request(writable)) {
    if (!PyBuffer_IsContiguous(info_.view(), 'C')) {
      throw StorageError("delta: the buffer is not contiguous");
    }
  }
  Bytes bytes() const {
    return {static_cast<std::byte*>(info_.ptr), static_cast<size_t>(info_.size * info_.itemsize)};
  }

 private:
  py::buffer_info info_;
};

// Runs `work`, which appends to the bytes that come back, without the GIL.
template <class Work>
py::bytes made_by(Work work) {
  std::vector<std::byte> out;
  {
    const py::gil_scoped_release release;
    work(out);
  }
  return {reinterpret_cast<const char*>(out.data()), out.size()};
}

DeltaLayout make_layout(const std::vector<std::pair<uint64_t, uint32_t>>& runs) {
  std::vector<weights::Run> made;
  for (const auto& [end, item_bytes] : runs) {
    if (item_bytes != 1 && item_bytes != 2 && item_bytes != 4) {
      throw StorageError("delta: items of " + std::to_string(item_bytes) + " bytes");
    }
    made.push_back({end, static_cast<Item>(item_bytes)});
  }
  return DeltaLayout(made);
}

py::bytes encode(const DeltaLayout& layout, uint64_t epoch, uint64_t base_version, uint64_t version,
                 const std::string& manifest_hash, const py::buffer& base,
                 const Checksums& base_checksums, const py::buffer& next,
                 const Checksums& next_checksums, unsigned num_threads) {
  const Buffer from(base);
  const Buffer to(next);
  const weights::PatchName name{epoch, base_version, version, hash_from(manifest_hash)};
  return made_by([&](std::vector<std::byte>& out) {
    out = encode_patch(layout, name, {from.bytes(), base_checksums}, {to.bytes(), next_checksums},
                       num_threads);
  });
}

Checksums apply(const DeltaLayout& layout, const py::buffer& patch,
                const std::string& manifest_hash, const py::buffer& base,
                const Checksums& base_checksums, const py::buffer& out, unsigned num_threads) {
  const Buffer coded(patch);
  const Buffer from(base);
  const Buffer to(out, true);
  const Hash hash = hash_from(manifest_hash);
  const py::gil_scoped_release release;
  return apply_patch(layout, coded.bytes(), hash, {from.bytes(), base_checksums}, to.bytes(),
                     num_threads);
}

py::bytes encode_block(const DeltaLayout& layout, uint32_t block, const py::buffer& base,
                       uint32_t base_checksum, const py::buffer& next, uint32_t next_checksum) {
  const Buffer from(base);
  const Buffer to(next);
  return made_by([&](std::vector<std::byte>& out) {
    BlockEncoder(layout).encode(block, from.bytes(), to.bytes(), base_checksum, next_checksum, out);
  });
}

py::bytes encode_changes(const DeltaLayout& layout, uint32_t block, const Array<uint32_t>& offsets,
                         const Array<int32_t>& steps, const py::buffer& base,
                         uint32_t base_checksum, const py::buffer& out) {
  const Buffer from(base);
  const Buffer to(out, true);
  const weights::Changes changes{{offsets.data(), static_cast<size_t>(offsets.size())},
                                 {steps.data(), static_cast<size_t>(steps.size())}};
  return made_by([&](std::vector<std::byte>& coded) {
    BlockEncoder(layout).encode(block, changes, from.bytes(), base_checksum, to.bytes(), coded);
  });
}

uint32_t apply_one(const DeltaLayout& layout, const py::buffer& block, const py::buffer& base,
                   uint32_t base_checksum, const py::buffer& out) {
  const Buffer coded(block);
  const Buffer from(base);
  const Buffer to(out, true);
  const py::gil_scoped_release release;
  ConstBytes in = coded.bytes();
  const Block taken = Block::take(in);
  if (!in.empty()) throw StorageError("delta: bytes follow the block");
  return apply_block(layout, taken, from.bytes(), base_checksum, to.bytes());
}

PatchHeader read_header(const py::buffer& patch) {
  const Buffer buffer(patch);
  ConstBytes in = buffer.bytes();
  return PatchHeader::take(in);
}

}  // namespace

void bind_delta(py::module_& m) {
  py::class_<DeltaLayout>(m, "DeltaLayout")
      .def(py::init(&make_layout), py::arg("runs"))
      .def_property_readonly("data_bytes", &DeltaLayout::data_bytes)
      .def_property_readonly("num_blocks", &DeltaLayout::num_blocks);
  py::class_<PatchHeader>(m, "PatchHeader")
      .def_static("read", &read_header, py::arg("patch"))
      .def_readonly("epoch", &PatchHeader::epoch)
      .def_readonly("base_version", &PatchHeader::base_version)
      .def_readonly("version", &PatchHeader::version)
      .def_readonly("data_bytes", &PatchHeader::data_bytes)
      .def_readonly("num_blocks", &PatchHeader::num_blocks)
      .def_property_readonly(
          "manifest_hash", [](const PatchHeader& header) { return hash_to(header.manifest_hash); })
      .def_property_readonly("base_hash",
                             [](const PatchHeader& header) { return hash_to(header.base_hash); })
      .def_property_readonly("result_hash",
                             [](const PatchHeader& header) { return hash_to(header.result_hash); });
  m.attr("PATCH_HEADER_BYTES") = PatchHeader::kBytes;
  m.attr("PATCH_BLOCK_HEADER_BYTES") = sizeof(weights::BlockHeader);
  m.def(
      "version_hash",
      [](const std::string& manifest_hash, const Checksums& checksums) {
        return hash_to(weights::version_hash(hash_from(manifest_hash), checksums));
      },
      py::arg("manifest_hash"), py::arg("checksums"));
  m.def(
      "chunk_checksums",
      [](const py::buffer& data, unsigned num_threads) {
        const Buffer buffer(data);
        const py::gil_scoped_release release;
        return weights::chunk_checksums(buffer.bytes(), num_threads);
      },
      py::arg("data"), py::arg("num_threads") = 1);
  m.def("delta_encode", &encode, py::arg("layout"), py::arg("epoch"), py::arg("base_version"),
        py::arg("version"), py::arg("manifest_hash"), py::arg("base"), py::arg("base_checksums"),
        py::arg("next"), py::arg("next_checksums"), py::arg("num_threads") = 1);
  m.def("delta_apply", &apply, py::arg("layout"), py::arg("patch"), py::arg("manifest_hash"),
        py::arg("base"), py::arg("base_checksums"), py::arg("out"), py::arg("num_threads") = 1);
  m.def("delta_encode_block", &encode_block, py::arg("layout"), py::arg("block"), py::arg("base"),
        py::arg("base_checksum"), py::arg("next"), py::arg("next_checksum"));
  m.def("delta_encode_changes", &encode_changes, py::arg("layout"), py::arg("block"),
        py::arg("offsets"), py::arg("steps"), py::arg("base"), py::arg("base_checksum"),
        py::arg("out"));
  m.def("delta_apply_block", &apply_one, py::arg("layout"), py::arg("block"), py::arg("base"),
        py::arg("base_checksum"), py::arg("out"));
  m.def(
      "read_through",
      [](const py::buffer& data) {
        const Buffer buffer(data);
        const py::gil_scoped_release release;
        return weights::read_through(buffer.bytes());
      },
      py::arg("data"));
}

}  // namespace psrl::bindings
