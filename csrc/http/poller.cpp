#include "http/poller.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace pdlink::http {
namespace {

constexpr std::size_t kReadNbytes = 256 * 1024;
constexpr int kAtOnce = 64;

}  // namespace

SocketPoller::SocketPoller() : ready_(::epoll_create1(EPOLL_CLOEXEC)), buffer_(kReadNbytes) {
    if (ready_.get() < 0) throw std::system_error(errno, std::generic_category(), "epoll");
}

SocketPoller::Key SocketPoller::watch(int socket, Reader& reader) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = last_ + 1;
    if (::epoll_ctl(ready_.get(), EPOLL_CTL_ADD, socket, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll");
    watched_.emplace(++last_, Watched{socket, &reader});
    return last_;
}

void SocketPoller::unwatch(Key key) {
    const auto found = watched_.find(key);
    if (found == watched_.end()) return;
    ::epoll_ctl(ready_.get(), EPOLL_CTL_DEL, found->second.socket, nullptr);
    watched_.erase(found);
}

void SocketPoller::turn() {
    std::array<epoll_event, kAtOnce> events;
    const int num = ::epoll_wait(ready_.get(), events.data(), kAtOnce, 0);
    for (int i = 0; i < num; ++i) {
        const auto found = watched_.find(events[static_cast<std::size_t>(i)].data.u64);
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
}

}  // namespace pdlink::http
