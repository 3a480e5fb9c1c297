#include "relay/relay.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "relay/chunks.h"

namespace pdlink::relay {
namespace {

constexpr std::size_t kReadNbytes = 64 * 1024;
constexpr std::size_t kTellNbytes = 4 * 1024;  // so much is kept for the owner, about 20 events of one token
constexpr int kAtOnce = 256;                   // the others have their turn next time

double now_s() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// How many bytes were taken; an error is the owner's to find when it sends the rest.
std::size_t sent(int socket, std::string_view bytes) {
    ssize_t n;
    do {
        n = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? 0 : static_cast<std::size_t>(n);
}

}  // namespace

Relay::Relay() : ready_(::epoll_create1(EPOLL_CLOEXEC)), buffer_(kReadNbytes) {
    if (ready_.get() < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
}

Key Relay::lend(int worker, int client, std::string_view first, unsigned marks, std::string& unsent) {
    unsent.assign(first.substr(sent(client, first)));
    if (!unsent.empty()) return 0;
    Stream stream{Descriptor(::fcntl(worker, F_DUPFD_CLOEXEC, 0)),
                  Descriptor(::fcntl(client, F_DUPFD_CLOEXEC, 0)),
                  now_s(),
                  marks,
                  "",
                  ""};
    if (stream.worker.get() < 0 || stream.client.get() < 0) return 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = last_ + 1;
    if (::epoll_ctl(ready_.get(), EPOLL_CTL_ADD, stream.worker.get(), &event) != 0) return 0;
    streams_.emplace(++last_, std::move(stream));
    return last_;
}

std::vector<Report> Relay::turn() {
    std::array<epoll_event, kAtOnce> events;
    const int num = ::epoll_wait(ready_.get(), events.data(), kAtOnce, 0);
    std::vector<Report> reports;
    for (int i = 0; i < num; ++i) {
        const Key key = events[static_cast<std::size_t>(i)].data.u64;
        Stream& stream = streams_.at(key);
        std::string unread, unsent;
        if (!pass(stream, unread, unsent)) {
            reports.push_back(end(key, std::move(unread), std::move(unsent)));
        } else if (stream.passed.size() >= kTellNbytes) {
            reports.push_back({key, std::exchange(stream.passed, {}), false, {}, {}});
        }
    }
    return reports;
}

Report Relay::take(Key key) {
    const auto found = streams_.find(key);
    if (found == streams_.end()) throw std::out_of_range("key: no stream that is lent");
    return end(key, std::move(found->second.part), {});
}

double Relay::heard_s(Key key) const { return streams_.at(key).heard_s; }

bool Relay::pass(Stream& stream, std::string& unread, std::string& unsent) {
    const std::size_t before = stream.part.size();
    std::copy(stream.part.begin(), stream.part.end(), buffer_.begin());
    const ssize_t n = ::recv(stream.worker.get(), buffer_.data() + before, buffer_.size() - before, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) {  // its owner reads the same, and knows what to do
        unread = std::move(stream.part);
        return false;
    }
    const std::string_view bytes(buffer_.data(), before + static_cast<std::size_t>(n));
    stream.heard_s = now_s();
    std::size_t at = 0;
    const std::size_t passed_before = stream.passed.size();
    Found found = first_chunk(bytes, stream.marks);
    for (; found.what == Found::What::kEvents; found = first_chunk(bytes.substr(at), stream.marks)) {
        stream.passed.append(found.payload);
        at += found.nbytes;
    }
    const bool unusual = found.what == Found::What::kUnusual || bytes.size() - at == buffer_.size();
    if (unusual) {  // it gets all that came with it: an event before an error is a part of the answer to judge
        stream.passed.resize(passed_before);
        unread.assign(bytes);
        return false;
    }
    stream.part.assign(bytes.substr(at));
    if (at != 0) {
        const std::string_view whole = bytes.substr(0, at);
        unsent.assign(whole.substr(sent(stream.client.get(), whole)));
    }
    if (unsent.empty()) return true;
    unread = std::move(stream.part);
    return false;
}

Report Relay::end(Key key, std::string unread, std::string unsent) {
    Stream& stream = streams_.at(key);
    ::epoll_ctl(ready_.get(), EPOLL_CTL_DEL, stream.worker.get(),
                nullptr);  // or its owner's number would keep it there
    Report report{key, std::move(stream.passed), true, std::move(unsent), std::move(unread)};
    streams_.erase(key);
    return report;
}

}  // namespace pdlink::relay
