// UCX as a table of functions found at run time.
//
// pdlink is built against UCX headers but not linked with UCX: which copy is right is only known on the machine where
// it runs (`pdlink/transport/ucx_copies.py`). One binary works with every version from 1.20
// on: the structures only ever grew behind new bits of their field_mask.
#pragma once

#include <ucp/api/ucp.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace pdlink::ucx {

// Below 1.20 a put to ordinary memory over TCP with peer error handling is emulated in software: a third of the
// speed, and the death of the writer aborts the process that is written to.
constexpr unsigned kNeededMajor = 1;
constexpr unsigned kNeededMinor = 20;

// UCX cannot be used here; the message says why and what would help.
struct Unavailable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

#define PDLINK_UCX_FUNCTIONS(X)   \
    X(ucp_get_version)            \
    X(ucs_status_string)          \
    X(ucp_config_read)            \
    X(ucp_config_modify)          \
    X(ucp_config_release)         \
    X(ucp_init_version)           \
    X(ucp_cleanup)                \
    X(ucp_mem_map)                \
    X(ucp_mem_unmap)              \
    X(ucp_rkey_pack)              \
    X(ucp_rkey_buffer_release)    \
    X(ucp_worker_create)          \
    X(ucp_worker_destroy)         \
    X(ucp_worker_get_address)     \
    X(ucp_worker_release_address) \
    X(ucp_worker_get_efd)         \
    X(ucp_worker_arm)             \
    X(ucp_worker_progress)        \
    X(ucp_ep_create)              \
    X(ucp_ep_print_info)          \
    X(ucp_ep_rkey_unpack)         \
    X(ucp_rkey_destroy)           \
    X(ucp_put_nbx)                \
    X(ucp_ep_flush_nbx)           \
    X(ucp_ep_close_nbx)           \
    X(ucp_request_free)

// A loaded UCX. It stays loaded until the process ends: its threads and exit handlers cannot be unloaded safely.
struct Library {
#define PDLINK_UCX_MEMBER(name) decltype(&::name) name;
    PDLINK_UCX_FUNCTIONS(PDLINK_UCX_MEMBER)
#undef PDLINK_UCX_MEMBER

    std::string path;
    unsigned major;
    unsigned minor;
    unsigned release;

    // The one that is loaded already, by another package for instance. Throws Unavailable if it is too old.
    static std::optional<Library> loaded();
    // path: the copy to use, or the name that the system knows one by. hooks: UCX may patch mmap and others inside
    // libc, which its cache of RDMA registrations needs. Throws Unavailable.
    static Library load(const std::string& path, bool hooks);

    std::string version() const;
};

}  // namespace pdlink::ucx
