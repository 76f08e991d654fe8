// The sample queue for Python: arrays in, read-only arrays out, refs as plain tuples.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bindings/bindings.h"
#include "queue/manager.h"
#include "queue/packing.h"
#include "queue/reader.h"
#include "queue/writer.h"
#include "shm/segment.h"

PYBIND11_MAKE_OPAQUE(std::vector<psrl::PendingRecord>)

namespace psrl::bindings {
namespace {

using RefTuple = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>;
using GrantTuple = std::tuple<uint32_t, uint64_t, uint32_t>;
using ClientTuple = std::pair<uint32_t, uint32_t>;

RefTuple to_tuple(const RecordRef& ref) {
  return {ref.extent, ref.generation, ref.offset, ref.length};
}
RecordRef to_ref(const RefTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
}
ClientId to_client(const ClientTuple& client) { return {client.first, client.second}; }

// Rows on their way into records. `arrays` keep the payloads alive while they are copied.
struct Rows {
  std::vector<PlannedRecord> planned;
  std::vector<py::object> arrays;
};

bool is_scalar(const py::handle& value) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> generic;
  generic.call_once_and_store_result(
      [] { return py::object(py::module_::import("numpy").attr("generic")); });
  return py::isinstance(value, generic.get_stored());
}

// NumPy's `dtype.str`, of the types that may be shared; others come out as something that is
// refused.
std::string typestring(const py::dtype& type) {
  const char kind = type.kind();
  const py::ssize_t size = kind == 'U' ? type.itemsize() / 4 : type.itemsize();
  const bool has_order = type.itemsize() > 1 && kind != 'S' && kind != 'O' && kind != 'V';
  const char order = type.byteorder() == '=' ? '<' : type.byteorder();
  return std::string(1, has_order ? order : '|') + kind + std::to_string(size);
}

void add_field(Rows& rows, const std::string& name, const py::handle& value) {
  PlannedRecord& row = rows.planned.back();
  Field field;
  field.name = name;
  if (py::isinstance<py::bytes>(value)) {
    const auto text = std::string_view(py::reinterpret_borrow<py::bytes>(value));
    field.dtype = "|u1";
    field.shape = {text.size()};
    rows.arrays.push_back(py::reinterpret_borrow<py::object>(value));
    row.payload.push_back(std::as_bytes(std::span(text)));
  } else if (py::isinstance<py::array>(value) || is_scalar(value)) {
    auto array = py::array::ensure(value, py::array::c_style);
    if (!array) throw py::error_already_set();
    field.dtype = typestring(array.dtype());
    field.shape.assign(array.shape(), array.shape() + array.ndim());
    row.payload.emplace_back(static_cast<const std::byte*>(array.data()),
                             static_cast<size_t>(array.nbytes()));
    rows.arrays.push_back(std::move(array));
  } else {
    throw py::type_error("field " + name + " is not a numpy array or scalar, nor bytes");
  }
  row.description.fields.push_back(std::move(field));
}

void add_row(Rows& rows, const std::string& partition, const py::str& key, const py::bytes& tag,
             const py::dict& fields) {
  PlannedRecord& row = rows.planned.emplace_back();
  row.description.partition = partition;
  row.description.key = std::string(key);
  row.description.tag = std::string(tag);
  row.description.fields.reserve(fields.size());
  for (const auto& [name, value] : fields) add_field(rows, name.cast<std::string>(), value);
  row.length = plan_record(row.description);
}

using RowTuple = std::tuple<py::str, py::bytes, py::dict>;

std::unique_ptr<Rows> make_rows(const std::string& partition, const std::vector<RowTuple>& tuples) {
  auto rows = std::make_unique<Rows>();
  rows->planned.reserve(tuples.size());
  for (const auto& [key, tag, fields] : tuples) add_row(*rows, partition, key, tag, fields);
  return rows;
}

using Pending = std::vector<PendingRecord>;

py::array make_view(const RecordView& view, const Field& field, const py::capsule& owner) {
  const std::vector<py::ssize_t> shape(field.shape.begin(), field.shape.end());
  py::array array(py::dtype(field.dtype), shape, {}, view.bytes.data() + field.offset, owner);
  // Written once: a reader cannot change what another one sees.
  py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

py::dict make_views(const RecordView& view, const std::optional<std::vector<std::string>>& names) {
  auto* held = new std::shared_ptr<Lease>(view.lease);
  const py::capsule owner(held,
                          [](void* lease) { delete static_cast<std::shared_ptr<Lease>*>(lease); });
  py::dict views;
  for (const Field& field : view.description.fields) {
    if (names && std::find(names->begin(), names->end(), field.name) == names->end()) continue;
    views[py::str(field.name)] = make_view(view, field, owner);
  }
  if (names && views.size() != names->size()) {
    throw UnknownKey("key " + view.description.key + " of partition " + view.description.partition +
                     ": the record lacks a field that was asked for");
  }
  return views;
}

std::vector<GrantTuple> to_tuples(const std::vector<Grant>& grants) {
  std::vector<GrantTuple> tuples;
  for (const Grant& grant : grants) tuples.emplace_back(grant.extent, grant.generation, grant.run);
  return tuples;
}

void bind_manager(py::module_& m) {
  py::class_<RecordInfo>(m, "RecordInfo")
      .def_property_readonly("ref", [](const RecordInfo& info) { return to_tuple(info.ref); })
      .def_property_readonly("partition",
                             [](const RecordInfo& info) { return info.description.partition; })
      .def_property_readonly("key", [](const RecordInfo& info) { return info.description.key; })
      .def_property_readonly("tag",
                             [](const RecordInfo& info) { return py::bytes(info.description.tag); })
      .def_property_readonly("fields",
                             [](const RecordInfo& info) {
                               std::vector<std::string> names;
                               for (const Field& f : info.description.fields)
                                 names.push_back(f.name);
                               return names;
                             })
      .def_readonly("written_ns", &RecordInfo::written_ns);

  py::class_<Released>(m, "Released")
      .def_readonly("known", &Released::known)
      .def_property_readonly("client",
                             [](const Released& released) {
                               return ClientTuple{released.client.number,
                                                  released.client.incarnation};
                             })
      .def_readonly("num_extents", &Released::num_extents)
      .def_readonly("num_leases", &Released::num_leases)
      .def_readonly("num_records", &Released::num_records);

  py::class_<ArenaUsage>(m, "ArenaUsage")
      .def_readonly("free", &ArenaUsage::free)
      .def_readonly("open", &ArenaUsage::open)
      .def_readonly("rows", &ArenaUsage::rows)
      .def_readonly("leased", &ArenaUsage::leased);

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<ArenaManager>(m, "ArenaManager")
      .def(py::init<std::shared_ptr<Arena>>(), py::arg("arena"), Release())
      .def(
          "register_client",
          [](ArenaManager& manager, const std::string& name) {
            const ClientId client = manager.register_client(name);
            return ClientTuple{client.number, client.incarnation};
          },
          py::arg("name"))
      .def(
          "grant",
          [](ArenaManager& manager, const ClientTuple& client, uint64_t num_bytes, uint32_t count,
             const std::vector<uint32_t>& held, uint32_t keep) {
            return to_tuples(manager.grant(to_client(client), num_bytes, count, held, keep));
          },
          py::arg("client"), py::arg("num_bytes"), py::arg("count"), py::arg("held"),
          py::arg("keep") = 0)
      .def(
          "free",
          [](ArenaManager& manager, const RefTuple& ref) { return manager.free(to_ref(ref)); },
          py::arg("ref"))
      .def(
          "holds",
          [](const ArenaManager& manager, const RefTuple& ref) {
            return manager.holds(to_ref(ref));
          },
          py::arg("ref"))
      .def("release_client", &ArenaManager::release_client, py::arg("name"), Release())
      .def(
          "scan",
          [](const ArenaManager& manager, uint32_t first, size_t max_records,
             const std::optional<ClientTuple>& owner) {
            std::optional<ClientId> client;
            if (owner) client = to_client(*owner);
            ScanPage page = manager.scan(first, max_records, client);
            return std::pair(std::move(page.records), page.next);
          },
          py::arg("first"), py::arg("max_records"), py::arg("owner") = py::none(), Release())
      .def("incarnations", &ArenaManager::incarnations)
      .def("usage", &ArenaManager::usage, Release())
      .def("free_bytes", &ArenaManager::free_bytes, Release());
}

void bind_writer(py::module_& m) {
  py::class_<Rows>(m, "QueueRows")
      .def(py::init(&make_rows), py::arg("partition"), py::arg("rows"))
      .def("__len__", [](const Rows& rows) { return rows.planned.size(); })
      .def("num_bytes", [](const Rows& rows) {
        std::vector<uint64_t> lengths;
        for (const PlannedRecord& row : rows.planned) lengths.push_back(row.length);
        return lengths;
      });

  py::class_<Pending>(m, "PendingRecords")
      .def(py::init<>())
      .def("__len__", &Pending::size)
      .def("commit", [](Pending& pending) {
        std::vector<RefTuple> refs;
        for (PendingRecord& record : pending) refs.push_back(to_tuple(record.commit()));
        return refs;
      });

  py::class_<QueueWriter>(m, "QueueWriter")
      .def(py::init([](std::shared_ptr<Arena> arena, const ClientTuple& client) {
             return std::make_unique<QueueWriter>(std::move(arena), to_client(client));
           }),
           py::arg("arena"), py::arg("client"))
      .def(
          "add",
          [](QueueWriter& writer, const std::vector<GrantTuple>& tuples) {
            std::vector<Grant> grants;
            for (const auto& [extent, generation, run] : tuples) {
              grants.push_back({extent, generation, run});
            }
            writer.add(grants);
          },
          py::arg("grants"))
      .def("held", &QueueWriter::held)
      .def(
          "begin",
          [](QueueWriter& writer, const Rows& rows, Pending& pending) {
            writer.begin(std::span(rows.planned).subspan(pending.size()), pending);
          },
          py::arg("rows"), py::arg("pending"), py::call_guard<py::gil_scoped_release>())
      .def("seal", [](QueueWriter& writer) { writer.seal(); });
}

// A record as a reader has it, or only its description, of one that is on another node.
struct Opened {
  std::shared_ptr<Lease> lease;  // null: elsewhere
  PackSource source;
  uint64_t length = 0;
};

Opened open_record(const QueueReader& reader, const RefTuple& ref) {
  RecordView view = reader.read(to_ref(ref));
  return {std::move(view.lease), {std::move(view.description), view.bytes}, view.bytes.size()};
}

Opened open_elsewhere(const py::bytes& encoded, uint64_t length) {
  const auto text = std::string_view(encoded);
  return {nullptr, {decode_description(std::as_bytes(std::span(text)), length), {}}, length};
}

// Keeps the leases of what it was made of.
struct Pack {
  std::vector<std::shared_ptr<Lease>> leases;
  Packing packing;
};

using PieceTuple = std::pair<uint32_t, std::vector<std::string>>;

std::unique_ptr<Pack> make_pack(const std::vector<std::shared_ptr<Opened>>& records,
                                const std::vector<std::vector<PieceTuple>>& rows,
                                const std::optional<std::vector<std::string>>& names) {
  const py::gil_scoped_release release;
  std::vector<std::shared_ptr<Lease>> leases;
  std::vector<PackSource> sources;
  for (const auto& record : records) {
    leases.push_back(record->lease);
    sources.push_back(record->source);
  }
  std::vector<std::vector<RowPiece>> pieces(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    for (const auto& [record, fields] : rows[r]) pieces[r].push_back({record, fields});
  }
  return std::make_unique<Pack>(std::move(leases), Packing(std::move(sources), pieces, names));
}

// name, dtype, shape of a value, rows are scalars, offsets, place, bytes
py::tuple column_tuple(const PackedColumn& column) {
  py::tuple item(column.item.size());
  for (size_t i = 0; i < column.item.size(); ++i) item[i] = py::int_(column.item[i]);
  const py::array_t<int64_t> offsets(static_cast<py::ssize_t>(column.offsets.size()),
                                     column.offsets.data());
  return py::make_tuple(column.name, py::dtype(column.dtype), item, column.scalar, offsets,
                        column.place, column.nbytes);
}

void copy_pack(const Pack& pack, const py::array& buffer) {
  if (!buffer.writeable() || !(buffer.flags() & py::array::c_style)) {
    throw py::value_error("the buffer must be writable and contiguous");
  }
  const Bytes bytes(static_cast<std::byte*>(const_cast<void*>(buffer.data())),
                    static_cast<size_t>(buffer.nbytes()));
  const py::gil_scoped_release release;
  pack.packing.copy(bytes);
}

// int64 [N, 4]: record, offset in it, length, place.
py::array_t<int64_t> parts_array(const Pack& pack, uint64_t first, uint64_t end) {
  const auto parts = pack.packing.parts(first, end);
  py::array_t<int64_t> array({static_cast<py::ssize_t>(parts.size()), py::ssize_t{4}});
  static_assert(sizeof(PackPart) == 4 * sizeof(int64_t));
  std::memcpy(array.mutable_data(), parts.data(), parts.size() * sizeof(PackPart));
  return array;
}

void bind_packing(py::module_& m) {
  py::class_<Opened, std::shared_ptr<Opened>>(m, "QueueRecord")
      .def_static("elsewhere", &open_elsewhere, py::arg("description"), py::arg("length"))
      .def("description",
           [](const Opened& record) { return py::bytes(encode(record.source.description)); })
      .def("fields",
           [](const Opened& record) {
             py::list fields;
             for (const Field& field : record.source.description.fields) {
               const py::tuple shape = py::cast(field.shape);
               fields.append(py::make_tuple(field.name, py::dtype(field.dtype), shape, field.offset,
                                            field.nbytes));
             }
             return fields;
           })
      .def_readonly("length", &Opened::length)
      .def("place_in", [](const Opened& record, const Segment& segment) {
        return static_cast<uint64_t>(record.source.bytes.data() - segment.const_bytes().data());
      });
  py::class_<Pack>(m, "Packing")
      .def(py::init(&make_pack), py::arg("records"), py::arg("rows"), py::arg("names"))
      .def_property_readonly("num_bytes", [](const Pack& pack) { return pack.packing.num_bytes(); })
      .def("columns",
           [](const Pack& pack) {
             py::list columns;
             for (const PackedColumn& column : pack.packing.columns()) {
               columns.append(column_tuple(column));
             }
             return columns;
           })
      .def("copy", &copy_pack, py::arg("buffer"))
      .def("parts", &parts_array, py::arg("first"), py::arg("end"));
}

}  // namespace

void bind_queue(py::module_& m) {
  py::class_<Arena, std::shared_ptr<Arena>>(m, "QueueArena")
      .def_static("format", &Arena::format, py::arg("segment"), py::arg("extent_bytes"),
                  py::arg("max_clients"))
      .def_static("open", &Arena::open, py::arg("segment"))
      .def_static("segment_bytes", &Arena::segment_bytes, py::arg("num_extents"),
                  py::arg("extent_bytes"), py::arg("max_clients"))
      .def_property_readonly("extent_bytes", &Arena::extent_bytes)
      .def_property_readonly("num_extents", &Arena::num_extents)
      .def_property_readonly("max_clients", &Arena::max_clients)
      .def_property_readonly("capacity", &Arena::capacity);
  bind_manager(m);
  bind_writer(m);
  bind_packing(m);
  py::class_<QueueReader>(m, "QueueReader")
      .def(py::init([](std::shared_ptr<Arena> arena, const ClientTuple& client) {
             return std::make_unique<QueueReader>(std::move(arena), to_client(client));
           }),
           py::arg("arena"), py::arg("client"))
      .def(
          "read",
          [](const QueueReader& reader, const RefTuple& ref,
             const std::optional<std::vector<std::string>>& fields) {
            return make_views(reader.read(to_ref(ref)), fields);
          },
          py::arg("ref"), py::arg("fields") = py::none())
      .def("open", &open_record, py::arg("ref"));
}

}  // namespace psrl::bindings
