// Links for Python. Completions are polled; nothing here is called from the progress thread.
#include "link/link.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <mutex>

#include "base/errors.h"
#include "base/maker.h"
#include "bindings/bindings.h"
#include "link/region.h"

namespace psrl::bindings {
namespace {

using namespace psrl::link;

void release_buffer(Py_buffer* buffer) {
  PyBuffer_Release(buffer);
  delete buffer;
}

// Buffers whose last user was the progress thread, which must not take the GIL: let go by the next
// call that holds it.
class Released {
 public:
  void add(Py_buffer* buffer) {
    if (PyGILState_Check()) return release_buffer(buffer);
    const std::lock_guard lock(mutex_);
    buffers_.push_back(buffer);
  }
  void drain() {
    std::vector<Py_buffer*> buffers;
    {
      const std::lock_guard lock(mutex_);
      buffers.swap(buffers_);
    }
    for (Py_buffer* buffer : buffers) release_buffer(buffer);
  }

 private:
  std::mutex mutex_;
  std::vector<Py_buffer*> buffers_;
};

Released& released() {
  static auto* const all = new Released;  // outlives whatever still runs at the end
  return *all;
}

struct LinkEndpoint {
  std::unique_ptr<Endpoint> endpoint;
  Maker maker;

  explicit LinkEndpoint(std::unique_ptr<Endpoint> made) : endpoint(std::move(made)) {}
  ~LinkEndpoint() {
    {
      const py::gil_scoped_release release;
      endpoint.reset();
    }
    released().drain();
  }

  Endpoint& get() const {
    if (!maker.here()) {
      throw LinkError("the link belongs to process " + std::to_string(maker.pid()) +
                      ", which this one was forked from: make one here");
    }
    return *endpoint;
  }

  // Without the GIL; then lets go of buffers.
  template <typename Call>
  auto call(Call&& function) {
    Endpoint& mine = get();
    struct Drain {
      ~Drain() { released().drain(); }
    } const drain;
    const py::gil_scoped_release release;
    return function(mine);
  }
};

Deadline after(double seconds) {
  // Far enough for everybody, and no overflow.
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::min(seconds, 1e8)));
}

Bound<LinkEndpoint> make(const std::string& transport, const std::string& name,
                         const std::string& host, uint16_t port, const py::bytes& token) {
  const EndpointOptions options{name, host, port, token};
  // Which libucp that is, is decided there.
  if (transport == "ucx") py::module_::import("psrl.ucx").attr("load")();
  const py::gil_scoped_release release;
  if (transport == "tcp") return make_bound<LinkEndpoint>(make_tcp_endpoint(options));
  if (transport == "ucx") return make_bound<LinkEndpoint>(make_ucx_endpoint(options));
  throw LinkError("no transport " + transport + "; there are tcp and ucx");
}

RegionPtr add_buffer(LinkEndpoint& self, const py::object& object) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_CONTIG) != 0)
    throw py::error_already_set();
  const std::shared_ptr<Py_buffer> owner(view.release(),
                                         [](Py_buffer* buffer) { released().add(buffer); });
  const Bytes memory(static_cast<std::byte*>(owner->buf), static_cast<size_t>(owner->len));
  return self.call([&](Endpoint& endpoint) { return endpoint.add_region(memory, owner); });
}

WindowAccess access_of(const std::string& text) {
  if (text == "put") return WindowAccess::kPut;
  if (text == "pull") return WindowAccess::kPull;
  throw LinkError("a window is for put or pull, not " + text);
}

using Pieces = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

std::span<const Piece> pieces_of(const Pieces& array) {
  static_assert(sizeof(Piece) == 3 * sizeof(uint64_t));
  if (array.size() == 0) return {};
  if (array.ndim() != 2 || array.shape(1) != 3) {
    throw LinkError("pieces are rows of (local offset, remote offset, length)");
  }
  return {reinterpret_cast<const Piece*>(array.data()), static_cast<size_t>(array.shape(0))};
}

const char* name_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kDone:
      return "done";
    case Event::Kind::kNotice:
      return "notice";
    case Event::Kind::kPeerConnected:
      return "connected";
    case Event::Kind::kPeerLost:
      return "lost";
  }
  return "";
}

const char* name_of(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kTimeout:
      return "timeout";
    case Status::kPeerLost:
      return "peer_lost";
    case Status::kRefused:
      return "refused";
    case Status::kStale:
      return "stale";
    case Status::kClosed:
      return "closed";
  }
  return "";
}

// What a peer says of itself need not be UTF-8.
py::str text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

py::dict as_dict(const PeerCounters& peer) {
  py::dict counts;
  counts["name"] = text_of(peer.name);
  counts["address"] = peer.address;
  counts["bytes_put"] = peer.bytes_put;
  counts["bytes_received"] = peer.bytes_received;
  counts["puts"] = peer.puts;
  counts["pulls"] = peer.pulls;
  counts["notices"] = peer.notices;
  counts["failures"] = peer.failures;
  return counts;
}

}  // namespace

Endpoint& endpoint_of(const py::object& endpoint) { return endpoint.cast<LinkEndpoint&>().get(); }

void bind_link(py::module_& m) {
  py::class_<Region, RegionPtr>(m, "LinkRegion")
      .def_property_readonly("size", [](const Region& r) { return r.const_bytes.size(); })
      .def_property_readonly("writable", [](const Region& r) { return r.writable; })
      .def_property_readonly("numa_node", [](const Region& r) { return r.numa_node; });

  py::class_<Event>(m, "LinkEvent")
      .def_property_readonly("kind", [](const Event& e) { return name_of(e.kind); })
      .def_readonly("peer", &Event::peer)
      .def_readonly("op", &Event::op)
      .def_property_readonly("status", [](const Event& e) { return name_of(e.status); })
      .def_property_readonly("data", [](const Event& e) { return py::bytes(e.text); });

  py::class_<LinkEndpoint, Bound<LinkEndpoint>>(m, "LinkEndpoint")
      .def(py::init(&make), py::arg("transport"), py::kw_only(), py::arg("name"),
           py::arg("host") = "127.0.0.1", py::arg("port") = 0, py::arg("token") = py::bytes())
      .def_property_readonly("address", [](LinkEndpoint& s) { return s.get().address(); })
      .def_property_readonly("description", [](LinkEndpoint& s) { return s.get().describe(); })
      .def_property_readonly("fd", [](LinkEndpoint& s) { return s.get().fd(); })
      .def(
          "add_region",
          [](LinkEndpoint& self, const std::shared_ptr<Segment>& segment) {
            return self.call([&](Endpoint& e) { return e.add_region(segment); });
          },
          py::arg("memory"))
      .def("add_region", &add_buffer, py::arg("memory"))
      .def(
          "remove_region",
          [](LinkEndpoint& self, const RegionPtr& region) {
            if (!self.maker.here()) return;  // a fork lets go of memory, too
            self.call([&](Endpoint& e) { e.remove_region(region); });
          },
          py::arg("region"))
      .def(
          "advertise",
          [](LinkEndpoint& self, const RegionPtr& region, uint64_t offset, uint64_t length,
             const std::string& access) {
            return py::bytes(self.call([&](Endpoint& e) {
              return e.advertise(region, offset, length, access_of(access)).encode();
            }));
          },
          py::arg("region"), py::arg("offset"), py::arg("length"), py::arg("access"))
      .def(
          "withdraw",
          [](LinkEndpoint& self, const std::string& advert) {
            self.call([&](Endpoint& e) { e.withdraw(Advert::decode(advert)); });
          },
          py::arg("advert"))
      .def(
          "connect",
          [](LinkEndpoint& self, const std::string& address, double timeout_s) {
            return self.call([&](Endpoint& e) { return e.connect(address, after(timeout_s)); });
          },
          py::arg("address"), py::arg("timeout_s"))
      .def(
          "put",
          [](LinkEndpoint& self, PeerId peer, const std::string& into, const RegionPtr& source,
             const Pieces& pieces, const std::string& notice, double timeout_s) {
            const auto list = pieces_of(pieces);
            return self.call([&](Endpoint& e) {
              return e.put(peer, Advert::decode(into), source, list, notice, after(timeout_s));
            });
          },
          py::arg("peer"), py::arg("into"), py::arg("source"), py::arg("pieces"), py::arg("notice"),
          py::arg("timeout_s"))
      .def(
          "pull",
          [](LinkEndpoint& self, PeerId peer, const std::string& source, const RegionPtr& into,
             const Pieces& pieces, double timeout_s) {
            const auto list = pieces_of(pieces);
            return self.call([&](Endpoint& e) {
              return e.pull(peer, Advert::decode(source), into, list, after(timeout_s));
            });
          },
          py::arg("peer"), py::arg("source"), py::arg("into"), py::arg("pieces"),
          py::arg("timeout_s"))
      .def(
          "notify",
          [](LinkEndpoint& self, PeerId peer, const std::string& notice, double timeout_s) {
            return self.call([&](Endpoint& e) { return e.notify(peer, notice, after(timeout_s)); });
          },
          py::arg("peer"), py::arg("notice"), py::arg("timeout_s"))
      .def(
          "flush",
          [](LinkEndpoint& self, PeerId peer, double timeout_s) {
            return self.call([&](Endpoint& e) { return e.flush(peer, after(timeout_s)); });
          },
          py::arg("peer"), py::arg("timeout_s"))
      .def("poll",
           [](LinkEndpoint& self) { return self.call([](Endpoint& e) { return e.poll(); }); })
      .def("counters",
           [](LinkEndpoint& self) {
             py::list all;
             for (const PeerCounters& peer : self.get().counters()) all.append(as_dict(peer));
             return all;
           })
      .def(
          "disconnect",
          [](LinkEndpoint& self, PeerId peer, double timeout_s) {
            self.call([&](Endpoint& e) { e.disconnect(peer, after(timeout_s)); });
          },
          py::arg("peer"), py::arg("timeout_s"))
      .def(
          "close",
          [](LinkEndpoint& self, double timeout_s) {
            return self.call([&](Endpoint& e) { return e.close(after(timeout_s)); });
          },
          py::arg("timeout_s"));
}

}  // namespace psrl::bindings
