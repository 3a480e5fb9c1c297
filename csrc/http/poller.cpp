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

SocketPoller::Turn SocketPoller::turn(const Ready& ready) {
    Turn turn;
    for (const bool quick : {true, false}) {
        for (int i = 0; i < ready.num; ++i) {
            const Key key = ready.events[static_cast<std::size_t>(i)].data.u64;
            turn.others = turn.others || key == kLoop;
            const auto found = watched_.find(key);
            if (found == watched_.end()) continue;  // a reader before it has ended that
            if (found->second.reader->is_quick() == quick) turn.told = read(found->second) || turn.told;
        }
    }
    return turn;
}

bool SocketPoller::read(Watched watched) {
    const auto [socket, reader] = watched;
    const ssize_t n = ::recv(socket, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n > 0) return reader->came({buffer_.data(), static_cast<std::size_t>(n)});
    reader->ended(n < 0 ? errno : 0);
    return true;
}

}  // namespace pdlink::http
