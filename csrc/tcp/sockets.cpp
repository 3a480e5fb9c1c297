#include "tcp/sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace pdlink::tcp {
namespace {

// Give up a silent peer host after this, also while its window is closed.
constexpr int kUserTimeout_ms = 10'000;
constexpr int kKeepIdle_s = 3;
constexpr int kKeepInterval_s = 1;
constexpr int kKeepCount = 5;
// Behind a flood a connection waits here, rather than a second for its SYN to be sent again; the kernel may cap it.
constexpr int kBacklog = 4096;

struct Name {
    sockaddr_storage storage{};
    socklen_t nbytes = sizeof(sockaddr_storage);
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

Name name_of(const Address& address) {
    Name name;
    auto* v4 = reinterpret_cast<sockaddr_in*>(&name.storage);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&name.storage);
    if (::inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(address.port);
        name.nbytes = sizeof *v4;
    } else if (::inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(address.port);
        name.nbytes = sizeof *v6;
    } else {
        throw std::invalid_argument(address.host + " is not a numeric address");
    }
    return name;
}

Descriptor open_socket(int family) {
    Descriptor fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) fail("socket");
    return fd;
}

bool on_one_host(int fd) {
    Name here, there;
    if (::getsockname(fd, here.get(), &here.nbytes) != 0 || ::getpeername(fd, there.get(), &there.nbytes) != 0)
        return false;
    if (here.storage.ss_family == AF_INET) {
        const in_addr_t a = reinterpret_cast<sockaddr_in*>(here.get())->sin_addr.s_addr;
        const in_addr_t b = reinterpret_cast<sockaddr_in*>(there.get())->sin_addr.s_addr;
        return a == b || ntohl(b) >> 24 == 127;
    }
    return std::memcmp(&reinterpret_cast<sockaddr_in6*>(here.get())->sin6_addr,
                       &reinterpret_cast<sockaddr_in6*>(there.get())->sin6_addr, sizeof(in6_addr)) == 0;
}

bool set_congestion(int fd, const std::string& name) {
    return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

}  // namespace

Descriptor listen_on(Address& address) {
    Name name = name_of(address);
    Descriptor fd = open_socket(name.storage.ss_family);
    if (::bind(fd.get(), name.get(), name.nbytes) != 0 || ::listen(fd.get(), kBacklog) != 0 ||
        ::getsockname(fd.get(), name.get(), &name.nbytes) != 0)
        fail(("listening on " + address.host).c_str());
    address.port = ntohs(name.storage.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(name.get())->sin_port
                                                           : reinterpret_cast<sockaddr_in6*>(name.get())->sin6_port);
    return fd;
}

Descriptor begin_connect(const Address& address) {
    Name name = name_of(address);
    Descriptor fd = open_socket(name.storage.ss_family);
    set_options(fd.get());
    if (::connect(fd.get(), name.get(), name.nbytes) != 0 && errno != EINPROGRESS)
        fail(("connecting to " + address.host).c_str());
    return fd;
}

int connect_error(int fd) {
    int code = 0;
    socklen_t nbytes = sizeof code;
    return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &nbytes) == 0 ? code : errno;
}

int accept_one(int listener) { return ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }

void set_options(int fd) {
    const auto set = [fd](int level, int option, int value) {
        ::setsockopt(fd, level, option, &value, sizeof value);  // optional: correctness does not depend on any
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle_s);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepInterval_s);
    set(IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeout_ms);
}

void choose_congestion(int fd, const std::string& wanted) {
    if (!wanted.empty())
        set_congestion(fd, wanted);  // usable: the constructor has tried it
    else if (on_one_host(fd) && !set_congestion(fd, "cubic"))
        set_congestion(fd, "reno");
}

std::string congestion_of(int fd) {
    char name[16] = {};
    socklen_t nbytes = sizeof name - 1;
    return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0 ? name : "";
}

bool congestion_usable(const std::string& name) {
    const Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return fd.get() >= 0 && set_congestion(fd.get(), name);
}

void shut(int fd) {
    // Not only close: a forked child may hold a copy of the descriptor.
    ::shutdown(fd, SHUT_RDWR);
}

}  // namespace pdlink::tcp
