#include "http/socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <utility>

namespace pdlink::http {

void Socket::open(std::shared_ptr<SocketPoller> poller, int socket) {
    close();
    poller_ = std::move(poller);
    socket_ = socket;
    go_on();
}

void Socket::open_to_write(int socket) {
    close();
    own_ = Descriptor(::fcntl(socket, F_DUPFD_CLOEXEC, 0));
    socket_ = own_.get();
}

void Socket::close() {
    hold();
    poller_.reset();
    own_ = Descriptor();
    socket_ = -1;
}

void Socket::hold() {
    if (key_ != 0) poller_->unwatch(std::exchange(key_, 0));
}

void Socket::go_on() {
    if (key_ == 0 && poller_) key_ = poller_->watch(socket_, *this);
}

std::size_t Socket::send(std::string_view head, std::string_view body) const {
    if (socket_ < 0) return 0;
    std::array<iovec, 2> parts{
        {{const_cast<char*>(head.data()), head.size()}, {const_cast<char*>(body.data()), body.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t n;
    do {  // an event is one part, of which the kernel need not read a list
        n = body.empty() ? ::send(socket_, head.data(), head.size(), kFlags) : ::sendmsg(socket_, &message, kFlags);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? 0 : static_cast<std::size_t>(n);
}

}  // namespace pdlink::http
