#include "anchors/sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <system_error>

namespace pdlink::anchors {
namespace {

constexpr std::size_t kIovsPerCall = 64;

// num_runs is 0 for "here come the bytes of this batch", else the number of runs that follow and become the batch.
struct Header {
    std::uint32_t batch;
    std::uint32_t num_runs;
};

struct Target {
    std::uint64_t dst;
    std::uint64_t nbytes;
};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int tcp_socket() {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("socket");
    return fd;
}

sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
}

void tune(int fd, const std::string& congestion) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (!congestion.empty() && ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion.data(),
                                            static_cast<socklen_t>(congestion.size())) != 0)
        fail(congestion.c_str());
}

// Moves every byte of the iovecs by calls of at most kIovsPerCall of them; false if the other side has hung up.
template <typename Call>
bool move_all(std::vector<iovec>& iovecs, Call call) {
    std::size_t next = 0;
    while (next < iovecs.size()) {
        msghdr message{};
        message.msg_iov = iovecs.data() + next;
        message.msg_iovlen = std::min(kIovsPerCall, iovecs.size() - next);
        const ssize_t done = call(&message);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) fail("moving bytes");
        if (done == 0) return false;
        std::size_t left = static_cast<std::size_t>(done);
        while (next < iovecs.size() && left >= iovecs[next].iov_len) left -= iovecs[next++].iov_len;
        if (left > 0) {
            iovecs[next].iov_base = static_cast<std::byte*>(iovecs[next].iov_base) + left;
            iovecs[next].iov_len -= left;
        }
    }
    return true;
}

bool receive(int fd, std::vector<iovec> iovecs) {
    return move_all(iovecs, [fd](msghdr* message) { return ::recvmsg(fd, message, 0); });
}

bool receive(int fd, void* data, std::size_t nbytes) { return receive(fd, {{data, nbytes}}); }

void send(int fd, std::vector<iovec> iovecs) {
    move_all(iovecs, [fd](msghdr* message) { return ::sendmsg(fd, message, MSG_NOSIGNAL); });
}

void set_timeout(int fd, double seconds) {
    timeval limit{};
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

}  // namespace

SocketReader::SocketReader(std::uintptr_t base, std::uint64_t nbytes, std::string congestion)
    : base_(base), nbytes_(nbytes), congestion_(std::move(congestion)), listener_(tcp_socket()) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::listen(listener_.get(), 1) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
        fail("listening on 127.0.0.1");
    port_ = ntohs(address.sin_port);
    thread_ = std::thread(&SocketReader::serve, this);
}

SocketReader::~SocketReader() {
    stopping_ = true;
    ::shutdown(listener_.get(), SHUT_RDWR);  // wakes accept()
    if (const int fd = connection_; fd >= 0) ::shutdown(fd, SHUT_RDWR);
    thread_.join();
}

void SocketReader::serve() {
    const Descriptor connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0) return;
    connection_ = connection.get();
    try {
        tune(connection.get(), congestion_);
        if (!stopping_) serve_connection(connection.get());
    } catch (const std::system_error&) {
        // The writer sees its connection end.
    }
    connection_ = -1;
}

void SocketReader::serve_connection(int fd) {
    Header header;
    while (receive(fd, &header, sizeof header)) {
        if (header.num_runs > 0) {
            if (header.batch != batches_.size() || !learn(fd, header.num_runs)) return;
            continue;
        }
        if (header.batch >= batches_.size() || !receive(fd, batches_[header.batch])) return;
        std::uint8_t landed = 1;
        send(fd, {{&landed, sizeof landed}});
    }
}

bool SocketReader::learn(int fd, std::uint64_t num_runs) {
    std::vector<Target> targets(num_runs);
    if (!receive(fd, targets.data(), targets.size() * sizeof(Target))) return false;
    std::vector<iovec>& iovecs = batches_.emplace_back();
    for (const Target& target : targets) {
        if (target.dst > nbytes_ || target.nbytes > nbytes_ - target.dst) return false;
        iovecs.push_back({reinterpret_cast<void*>(base_ + target.dst), target.nbytes});
    }
    return true;
}

SocketWriter::SocketWriter(std::uintptr_t base, std::uint64_t nbytes, std::uint16_t port,
                           const std::string& congestion)
    : base_(base), nbytes_(nbytes), socket_(tcp_socket()) {
    tune(socket_.get(), congestion);
    const sockaddr_in address = loopback(port);
    if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        fail("connecting to 127.0.0.1");
}

std::uint32_t SocketWriter::declare(const std::vector<Run>& runs) {
    std::vector<Target> targets;
    std::vector<iovec> iovecs;
    for (const Run& run : runs) {
        if (run.src > nbytes_ || run.nbytes > nbytes_ - run.src)
            throw std::invalid_argument("a run lies outside of the buffer");
        targets.push_back({run.dst, run.nbytes});
        iovecs.push_back({reinterpret_cast<void*>(base_ + run.src), run.nbytes});
    }
    Header header{static_cast<std::uint32_t>(batches_.size()), static_cast<std::uint32_t>(runs.size())};
    send(socket_.get(), {{&header, sizeof header}, {targets.data(), targets.size() * sizeof(Target)}});
    batches_.push_back(std::move(iovecs));
    return header.batch;
}

void SocketWriter::push(std::uint32_t batch, double timeout_s) {
    set_timeout(socket_.get(), timeout_s);
    Header header{batch, 0};
    std::vector<iovec> iovecs{{&header, sizeof header}};
    iovecs.insert(iovecs.end(), batches_.at(batch).begin(), batches_.at(batch).end());
    send(socket_.get(), std::move(iovecs));
    std::uint8_t landed = 0;
    if (!receive(socket_.get(), &landed, sizeof landed)) {
        errno = ECONNRESET;
        fail("the reader has hung up");
    }
}

}  // namespace pdlink::anchors
