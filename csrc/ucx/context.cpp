#include "ucx/context.h"

#include <utility>

#include "cuda/current.h"

namespace pdlink::ucx {
namespace {

void configure(const Library& ucx, ucp_config_t* config, const Choice& choice) {
    const auto set = [&](const char* key, const char* value, bool optional) {
        const ucs_status_t status = ucx.ucp_config_modify(config, key, value);
        if (status != UCS_OK && !optional)
            throw std::runtime_error(std::string("UCX ") + ucx.version() + " refuses " + key + "=" + value + ": " +
                                     ucx.ucs_status_string(status));
    };
    // cma cannot carry UCX's own connection messages, so "shm" takes tcp for those; on one host that is lo.
    const std::string& tls = choice.tls;
    if (tls != "auto") set("TLS", tls == "shm" ? "cma,tcp" : tls.c_str(), false);
    if (!choice.devices.empty()) set("NET_DEVICES", choice.devices.c_str(), false);
    // With a rendezvous threshold UCX wants memory that can be revoked whenever peer failures are to be reported,
    // finds that neither cma nor tcp has it, and falls back to copying puts through active messages (1.20, select.c).
    // That is slow, and the death of the writer then aborts the process written to ("ucp_request.inl:319 Fatal").
    set("RNDV_THRESH", "inf", false);
    // No such fallback unseen: without a one-sided lane a put fails. 1.21 and later.
    set("PROTO_EMULATION_ENABLE", "n", true);
    // Otherwise creating an endpoint to a black-holed host blocks the progress thread in connect() for 40 s or more.
    set("TCP_CONN_NB", "y", true);
}

}  // namespace

void check(const Library& ucx, ucs_status_t status, const char* what) {
    if (status != UCS_OK) throw std::runtime_error(std::string(what) + ": " + ucx.ucs_status_string(status));
}

ucp_request_param_t calling(ucp_send_nbx_callback_t done, void* with) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = done;
    param.user_data = with;
    return param;
}

Context::Context(Library library, const Choice& choice) : library_(std::move(library)) {
    ucp_config_t* config = nullptr;
    check(library_, library_.ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
    params.mt_workers_shared = 1;  // callers make workers and regions while the thread progresses others
    ucs_status_t status = UCS_OK;
    try {
        configure(library_, config, choice);
        status = library_.ucp_init_version(kNeededMajor, kNeededMinor, &params, config, &handle_);
    } catch (...) {
        library_.ucp_config_release(config);
        throw;
    }
    library_.ucp_config_release(config);
    check(library_, status, "ucp_init");
}

Context::~Context() {
    for (const Region& region : regions_) library_.ucp_mem_unmap(handle_, region.memh);
    library_.ucp_cleanup(handle_);
}

const Region& Context::add_region(std::uintptr_t base, std::uint64_t nbytes, std::uintptr_t cuda_context) {
    const cuda::Current current(cuda_context);  // UCX's CUDA modules use the thread's
    ucp_mem_map_params_t params{};
    params.field_mask =
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = cuda_context ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    params.address = reinterpret_cast<void*>(base);
    params.length = nbytes;
    ucp_mem_h memh = nullptr;
    check(library_, library_.ucp_mem_map(handle_, &params, &memh), "ucp_mem_map");
    void* packed = nullptr;
    std::size_t packed_nbytes = 0;
    const ucs_status_t status = library_.ucp_rkey_pack(handle_, memh, &packed, &packed_nbytes);
    if (status != UCS_OK) {
        library_.ucp_mem_unmap(handle_, memh);
        check(library_, status, "ucp_rkey_pack");
    }
    Region region{base, nbytes, memh, std::string(static_cast<const char*>(packed), packed_nbytes)};
    library_.ucp_rkey_buffer_release(packed);
    const std::lock_guard lock(mutex_);
    return regions_.emplace_back(std::move(region));
}

ucp_worker_h Context::make_worker() const {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    ucp_worker_h worker = nullptr;
    check(library_, library_.ucp_worker_create(handle_, &params, &worker), "ucp_worker_create");
    return worker;
}

ucp_ep_h Context::make_endpoint(ucp_worker_h worker, const std::string& address, ucp_err_handler_cb_t on_error,
                                void* with) const {
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {on_error, with};
    ucp_ep_h ep = nullptr;
    check(library_, library_.ucp_ep_create(worker, &params, &ep), "ucp_ep_create");
    return ep;
}

bool Context::end(ucp_ep_h ep, ucp_send_nbx_callback_t done, void* with) const {
    ucp_request_param_t param = calling(done, with);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    return !UCS_PTR_IS_PTR(library_.ucp_ep_close_nbx(ep, &param));
}

int Context::worker_fd(ucp_worker_h worker) const {
    int fd = -1;
    check(library_, library_.ucp_worker_get_efd(worker, &fd), "ucp_worker_get_efd");
    return fd;
}

}  // namespace pdlink::ucx
