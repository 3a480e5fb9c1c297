#include "http/poller.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace pdlink::http {
namespace {

constexpr std::size_t kReadNbytes = 256 * 1024;
constexpr SocketPoller::Key kLoop = 0;  // that of the sockets of others

}  // namespace

SocketPoller::SocketPoller(int loop) : ready_(::epoll_create1(EPOLL_CLOEXEC)), buffer_(kReadNbytes) {
    if (ready_.get() < 0) throw std::system_error(errno, std::generic_category(), "epoll");
    if (loop >= 0) add(loop, kLoop);
}

void SocketPoller::add(int socket, Key key) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key;
    if (::epoll_ctl(ready_.get(), EPOLL_CTL_ADD, socket, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll");
}

SocketPoller::Key SocketPoller::watch(int socket, Reader& reader) {
    add(socket, last_ + 1);
    watched_.emplace(++last_, Watched{socket, &reader});
    return last_;
}

void SocketPoller::unwatch(Key key) {
    const auto found = watched_.find(key);
    if (found == watched_.end()) return;
    ::epoll_ctl(ready_.get(), EPOLL_CTL_DEL, found->second.socket, nullptr);
    watched_.erase(found);
}

SocketPoller::Ready SocketPoller::wait(int most_ms) const {
    Ready ready;
    ready.num = ::epoll_wait(ready_.get(), ready.events.data(), static_cast<int>(ready.events.size()), most_ms);
    return ready;
}

bool SocketPoller::turn(const Ready& ready) {
    bool others = false;
    for (int i = 0; i < ready.num; ++i) {
        const Key key = ready.events[static_cast<std::size_t>(i)].data.u64;
        const auto found = watched_.find(key);
        others = others || key == kLoop;
        if (found == watched_.end()) continue;  // a reader before it has ended that
        const auto [socket, reader] = found->second;
        const ssize_t n = ::recv(socket, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n > 0) {
            reader->came({buffer_.data(), static_cast<std::size_t>(n)});
        } else {
            reader->ended(n < 0 ? errno : 0);
        }
    }
    return others;
}

}  // namespace pdlink::http
