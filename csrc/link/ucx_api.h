// The functions of libucp that we use, found when the first endpoint is made.
//
// Nothing links libucp: a process without links never loads it, and which file it is can be decided
// at run time. Compiled against UCX 1.13 and newer; only what 1.13 has is used.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace psrl::link {

#define PSRL_UCX_FUNCTIONS(X)       \
  X(ucp_am_send_nbx)                \
  X(ucp_cleanup)                    \
  X(ucp_config_modify)              \
  X(ucp_config_read)                \
  X(ucp_config_release)             \
  X(ucp_conn_request_query)         \
  X(ucp_ep_close_nbx)               \
  X(ucp_ep_create)                  \
  X(ucp_ep_flush_nbx)               \
  X(ucp_ep_print_info)              \
  X(ucp_ep_rkey_unpack)             \
  X(ucp_get_nbx)                    \
  X(ucp_get_version)                \
  X(ucp_get_version_string)         \
  X(ucp_init_version)               \
  X(ucp_listener_create)            \
  X(ucp_listener_destroy)           \
  X(ucp_listener_query)             \
  X(ucp_listener_reject)            \
  X(ucp_mem_map)                    \
  X(ucp_mem_unmap)                  \
  X(ucp_put_nbx)                    \
  X(ucp_request_free)               \
  X(ucp_rkey_buffer_release)        \
  X(ucp_rkey_destroy)               \
  X(ucp_rkey_pack)                  \
  X(ucp_worker_arm)                 \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_progress)            \
  X(ucp_worker_set_am_recv_handler) \
  X(ucs_status_string)

struct UcxApi {
#define PSRL_UCX_MEMBER(name) decltype(&::name) name;
  PSRL_UCX_FUNCTIONS(PSRL_UCX_MEMBER)
#undef PSRL_UCX_MEMBER
  std::string file, version;
};

// Loads libucp.so.0 once: out of the folder PSRL_UCX when that is a path, else the one that this
// process has loaded already (psrl.ucx does so), else the system's. Raises LinkError, saying what
// to install.
const UcxApi& ucx_api();

// Raises LinkError: `what`, and what UCX says of `status`.
[[noreturn]] void fail(const UcxApi& ucx, const std::string& what, ucs_status_t status);

}  // namespace psrl::link
