// Transfers of versions between nodes for Python.
#include "weights/relay.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/errors.h"
#include "base/maker.h"
#include "bindings/bindings.h"
#include "link/region.h"

namespace psrl::bindings {
namespace {

using link::Advert;
using weights::Lease;
using weights::Relay;
using weights::RelayOptions;
using weights::RelayProgress;
using weights::SuccessorProgress;
using weights::Ticket;
using weights::Unit;
using weights::WeightStore;

using NoGil = py::call_guard<py::gil_scoped_release>;
using Table = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

// Closes it at the latest when Python lets go of it.
struct WeightRelay {
  std::shared_ptr<Relay> relay;

  explicit WeightRelay(std::shared_ptr<Relay> opened) : relay(std::move(opened)) {}
  ~WeightRelay() {
    const py::gil_scoped_release release;
    relay->close();
  }
};

// Rows of (unit, offset, length), units ascending from 0.
std::vector<Unit> units_of(const Table& table) {
  std::vector<Unit> units;
  if (table.size() == 0) return units;
  if (table.ndim() != 2 || table.shape(1) != 3) {
    throw StorageError("weights: units are rows of (unit, offset, length)");
  }
  const auto rows = table.unchecked<2>();
  for (py::ssize_t row = 0; row < rows.shape(0); ++row) {
    if (rows(row, 0) == units.size()) units.emplace_back();
    if (rows(row, 0) + 1 != units.size()) throw StorageError("weights: units are not in order");
    units.back().push_back({rows(row, 1), rows(row, 2)});
  }
  return units;
}

// One byte for each unit: 1, it is there.
std::vector<bool> flags_of(const std::string& bytes) { return {bytes.begin(), bytes.end()}; }

py::bytes bytes_of(const std::vector<bool>& flags) {
  return std::string(flags.begin(), flags.end());
}

Bound<WeightRelay> open(const py::object& endpoint, const link::RegionPtr& region, uint64_t offset,
                        uint64_t length, uint64_t transfer, const Table& units,
                        uint64_t chunk_bytes, std::vector<uint32_t> expected, const py::bytes& have,
                        uint32_t max_in_flight, double put_timeout_s,
                        const std::optional<std::pair<WeightStore, Lease>>& lease) {
  RelayOptions options{.transfer = transfer,
                       .units = units_of(units),
                       .chunk_bytes = chunk_bytes,
                       .expected = std::move(expected),
                       .max_in_flight = max_in_flight,
                       .put_timeout = std::chrono::milliseconds(
                           static_cast<int64_t>(std::min(put_timeout_s, 1e6) * 1e3))};
  if (lease) {
    options.valid = [held = *lease] { return held.first.valid(held.second); };
  }
  const std::vector<bool> flags = flags_of(have);
  link::Endpoint& link = endpoint_of(endpoint);
  const py::gil_scoped_release release;
  return make_bound<WeightRelay>(
      Relay::open(link, region, offset, length, std::move(options), flags));
}

void bind_progress(py::module_& m) {
  py::class_<SuccessorProgress>(m, "RelaySuccessor")
      .def_readonly("name", &SuccessorProgress::name)
      .def_readonly("wanted", &SuccessorProgress::wanted)
      .def_readonly("arrived", &SuccessorProgress::arrived)
      .def_readonly("in_flight", &SuccessorProgress::in_flight)
      .def_readonly("problem", &SuccessorProgress::problem);
  py::class_<RelayProgress>(m, "RelayProgress")
      .def_readonly("num_units", &RelayProgress::num_units)
      .def_readonly("have", &RelayProgress::have)
      .def_readonly("have_bytes", &RelayProgress::have_bytes)
      .def_readonly("damaged", &RelayProgress::damaged)
      .def_readonly("in_flight", &RelayProgress::in_flight)
      .def_readonly("idle_s", &RelayProgress::idle_s)
      .def_readonly("problem", &RelayProgress::problem)
      .def_readonly("complete", &RelayProgress::complete)
      .def_readonly("successors", &RelayProgress::successors);
}

}  // namespace

void bind_relay(py::module_& m) {
  bind_progress(m);
  py::class_<WeightRelay, Bound<WeightRelay>>(m, "WeightRelay")
      .def(py::init(&open), py::arg("endpoint"), py::arg("region"), py::arg("offset"),
           py::arg("length"), py::kw_only(), py::arg("transfer"), py::arg("units"),
           py::arg("chunk_bytes"), py::arg("expected"), py::arg("have"), py::arg("max_in_flight"),
           py::arg("put_timeout_s"), py::arg("lease") = py::none(), py::keep_alive<1, 2>())
      .def(
          "open_window",
          [](WeightRelay& self, const std::string& key) {
            Advert advert;
            {
              const py::gil_scoped_release release;
              advert = self.relay->open_window(key);
            }
            return py::bytes(advert.encode());
          },
          py::arg("key"))
      .def(
          "close_window",
          [](WeightRelay& self, const std::string& key) { self.relay->close_window(key); },
          py::arg("key"), NoGil())
      .def(
          "send_to",
          [](WeightRelay& self, const std::string& name, link::PeerId peer, const py::bytes& into,
             uint64_t first, uint64_t end, const py::bytes& has) {
            const Advert advert = Advert::decode(std::string(into));
            const std::vector<bool> flags = flags_of(has);
            const py::gil_scoped_release release;
            self.relay->send_to(name, peer, advert, first, end, flags);
          },
          py::arg("name"), py::arg("peer"), py::arg("into"), py::arg("first"), py::arg("end"),
          py::arg("has"))
      .def(
          "stop_sending",
          [](WeightRelay& self, const std::string& name) { self.relay->stop_sending(name); },
          py::arg("name"), NoGil())
      .def("have", [](const WeightRelay& self) { return bytes_of(self.relay->have()); })
      .def(
          "progress", [](const WeightRelay& self) { return self.relay->progress(); }, NoGil())
      .def_property_readonly("fd", [](const WeightRelay& self) { return self.relay->fd(); })
      .def(
          "seal",
          [](const WeightRelay& self, WeightStore& store, const Ticket& ticket,
             uint64_t expected_bytes) {
            weights::seal_arrived(store, ticket, *self.relay, expected_bytes);
          },
          py::arg("store"), py::arg("ticket"), py::arg("expected_bytes"), NoGil())
      .def("close", [](WeightRelay& self) { self.relay->close(); }, NoGil());
}

}  // namespace psrl::bindings
