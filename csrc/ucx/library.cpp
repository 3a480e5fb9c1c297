#include "ucx/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <vector>

namespace pdlink::ucx {
namespace {

constexpr const char* kSoname = "libucp.so.0";

// UCX reads these once, while it is being loaded. What the user has set wins, and the environment is afterwards as it
// was, so that child processes do not inherit our choices.
//
// Other threads may be reading the environment, which setenv would change under their hands. So nothing of it is
// changed: `environ` points to another list of the same strings meanwhile, with ours behind them. A reader of
// one of the two lists goes on reading it, so neither is ever freed.
class LoadSettings {
  public:
    explicit LoadSettings(bool hooks) : before_(__atomic_load_n(&environ, __ATOMIC_ACQUIRE)) {
        // The default patches mmap, munmap, brk and others inside libc. Only a registration cache for memory it was
        // never told of needs that; our pools are registered by hand.
        if (!hooks) set("UCX_MEM_MMAP_HOOK_MODE", "none");
        set("UCX_HANDLE_ERRORS", "none");  // otherwise SIGSEGV handlers
        set("UCX_DEBUG_SIGNO", "0");       // otherwise SIGHUP freezes the process for a debugger
        set("UCX_WARN_UNUSED_ENV_VARS", "n");
        // A peer that dies is an event of ours, not a line on somebody's terminal.
        set("UCX_LOG_LEVEL", "fatal");
        auto* all = new std::vector<char*>;
        for (char** at = before_; at && *at; ++at) all->push_back(*at);
        all->insert(all->end(), ours_.begin(), ours_.end());
        all->push_back(nullptr);
        with_ours_ = all->data();
        __atomic_store_n(&environ, with_ours_, __ATOMIC_RELEASE);
    }
    ~LoadSettings() {
        // Somebody who has called setenv meanwhile has made a list of his own, which then stays.
        __atomic_compare_exchange_n(&environ, &with_ours_, before_, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    LoadSettings(const LoadSettings&) = delete;
    LoadSettings& operator=(const LoadSettings&) = delete;

  private:
    void set(const char* name, const char* value) {
        if (!::getenv(name)) ours_.push_back(::strdup((std::string(name) + "=" + value).c_str()));
    }
    char** before_;
    char** with_ours_;
    std::vector<char*> ours_;
};

std::string path_of(void* function) {
    Dl_info info{};
    return ::dladdr(function, &info) && info.dli_fname ? info.dli_fname : kSoname;
}

// The functions of an opened library. Throws Unavailable if it is too old or not UCX at all.
Library bind(void* handle) {
    Library library{};
    const char* missing = nullptr;
#define PDLINK_UCX_BIND(name)                                                        \
    library.name = reinterpret_cast<decltype(library.name)>(::dlsym(handle, #name)); \
    if (!library.name && !missing) missing = #name;
    PDLINK_UCX_FUNCTIONS(PDLINK_UCX_BIND)
#undef PDLINK_UCX_BIND
    std::string problem;
    if (library.ucp_get_version) {
        library.ucp_get_version(&library.major, &library.minor, &library.release);
        library.path = path_of(reinterpret_cast<void*>(library.ucp_get_version));
        if (library.major != kNeededMajor || library.minor < kNeededMinor)
            problem = library.path + " is UCX " + library.version() + ", needed is 1.20 or later";
    }
    if (problem.empty() && missing) problem = std::string("it has no function ") + missing;
    if (!problem.empty()) {
        ::dlclose(handle);
        throw Unavailable(problem);
    }
    return library;
}

std::string last_error() {
    const char* text = ::dlerror();
    return text ? text : "unknown error";
}

}  // namespace

std::optional<Library> Library::loaded() {
    void* handle = ::dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD);
    if (!handle) return std::nullopt;
    return bind(handle);
}

Library Library::load(const std::string& path, bool hooks) {
    const std::string file = std::filesystem::path(path).filename();
    // A copy with mangled names (as in some wheels) can live beside another; two plain ones resolve each other's
    // symbols and break in ways that look like anything else.
    if (file.rfind("libucp.so", 0) == 0) {
        if (const std::optional<Library> other = loaded()) {
            std::error_code unknown;  // of a file that is not there: it is another one
            if (path == kSoname || std::filesystem::equivalent(other->path, path, unknown)) return *other;
            throw Unavailable("got " + path + ", but this process has already loaded " + other->path +
                              "; two copies of UCX cannot work in one process");
        }
    }
    const LoadSettings settings(hooks);
    void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw Unavailable(last_error());
    return bind(handle);
}

std::string Library::version() const {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

}  // namespace pdlink::ucx
