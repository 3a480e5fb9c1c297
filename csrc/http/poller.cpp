#include "http/poller.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>

#include "common/native.h"

namespace pdlink::http {
namespace {

constexpr std::size_t kReadNbytes = 256 * 1024;
constexpr SocketPoller::Key kLoop = 0;  // that of the sockets of others

}  // namespace

SocketPoller::SocketPoller(int loop) : ready_(::epoll_create1(EPOLL_CLOEXEC)), buffer_(kReadNbytes) {
    if (ready_.get() < 0) throw std::system_error(errno, std::generic_category(), "epoll");
    if (loop >= 0) add(loop, kLoop);
}

int SocketPoller::control(int how, int socket, Key key, std::uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    return ::epoll_ctl(ready_.get(), how, socket, &event);
}

void SocketPoller::add(int socket, Key key) {
    if (control(EPOLL_CTL_ADD, socket, key, EPOLLIN) != 0)
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

int SocketPoller::end_rests(int most_ms) {
    if (resting_.empty()) return most_ms;
    const double now = now_s();
    for (; !resting_.empty() && resting_.front().until_s <= now; resting_.pop_front()) {
        const auto found = watched_.find(resting_.front().key);
        if (found != watched_.end()) control(EPOLL_CTL_MOD, found->second.socket, found->first, EPOLLIN);
    }
    if (resting_.empty()) return most_ms;
    const int rest_ms = static_cast<int>(std::ceil((resting_.front().until_s - now) * 1e3));
    return most_ms < 0 ? rest_ms : std::min(most_ms, rest_ms);
}

SocketPoller::Ready SocketPoller::wait(int most_ms) const {
    Ready ready;
    ready.num = ::epoll_wait(ready_.get(), ready.events.data(), static_cast<int>(ready.events.size()), most_ms);
    return ready;
}

SocketPoller::Turn SocketPoller::turn(const Ready& ready) {
    Turn turn;
    std::bitset<kMostReady> slow;  // decided before any is read: a quick one that ends is slow from then on
    for (const bool quick : {true, false}) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(std::max(ready.num, 0)); ++i) {
            if (!quick && !slow[i]) continue;
            const Key key = ready.events[i].data.u64;
            turn.others = turn.others || key == kLoop;
            const auto found = watched_.find(key);
            if (found == watched_.end()) continue;  // a reader before it has ended that
            if (quick && !found->second.reader->is_quick())
                slow.set(i);
            else
                turn.told = read(key, found->second) || turn.told;
        }
    }
    return turn;
}

bool SocketPoller::read(Key key, Watched watched) {
    const auto [socket, reader] = watched;
    const ssize_t n = ::recv(socket, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n > 0) {
        const bool told = reader->came({buffer_.data(), static_cast<std::size_t>(n)});
        if (watched_.contains(key) && reader->rests()) {
            control(EPOLL_CTL_MOD, socket, key, 0);
            resting_.push_back({key, now_s() + kRestMs * 1e-3});
        }
        return told;
    }
    reader->ended(n < 0 ? errno : 0);
    return true;
}

}  // namespace pdlink::http
