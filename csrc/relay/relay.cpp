#include "relay/relay.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
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
constexpr int kAtOnce = 256;
constexpr Key kStop = 0;  // no stream's

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

Relay::Relay()
    : ready_(::epoll_create1(EPOLL_CLOEXEC)),
      told_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      buffer_(kReadNbytes) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kStop;
    if (ready_.get() < 0 || told_.get() < 0 || stop_.get() < 0 ||
        ::epoll_ctl(ready_.get(), EPOLL_CTL_ADD, stop_.get(), &event) != 0)
        throw std::system_error(errno, std::generic_category(), "relay");
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "pdlink-relay");
}

Relay::~Relay() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
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
    const std::lock_guard lock(mutex_);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = last_ + 1;
    if (::epoll_ctl(ready_.get(), EPOLL_CTL_ADD, stream.worker.get(), &event) != 0) return 0;
    streams_.emplace(++last_, std::move(stream));
    return last_;
}

void Relay::run() {
    std::array<epoll_event, kAtOnce> events;
    while (true) {
        const int num = ::epoll_wait(ready_.get(), events.data(), kAtOnce, -1);
        for (int i = 0; i < num; ++i) {
            const Key key = events[static_cast<std::size_t>(i)].data.u64;
            if (key == kStop) return;
            turn(key, (events[static_cast<std::size_t>(i)].events & EPOLLERR) != 0);
        }
    }
}

void Relay::turn(Key key, bool broken) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(key);
    if (found == streams_.end()) return;  // taken meanwhile
    Stream& stream = found->second;
    std::string unread, unsent;
    if (broken) {  // the system tells of a reset once: to its owner, when that reads
        tell(end(key, std::move(stream.part), {}));
    } else if (!pass(stream, unread, unsent)) {
        tell(end(key, std::move(unread), std::move(unsent)));
    } else if (stream.passed.size() >= kTellNbytes) {
        tell({key, std::exchange(stream.passed, {}), false, {}, {}});
    }
}

std::vector<Report> Relay::reports() {
    eventfd_t num;
    ::eventfd_read(told_.get(), &num);
    const std::lock_guard lock(mutex_);
    return std::exchange(reports_, {});
}

Report Relay::take(Key key) {
    const std::lock_guard lock(mutex_);
    const auto own = [key](const Report& report) { return report.key == key; };
    std::string passed;
    for (auto at = reports_.begin(); (at = std::find_if(at, reports_.end(), own)) != reports_.end();) {
        Report report = std::move(*at);
        at = reports_.erase(at);
        passed += report.passed;
        report.passed = std::move(passed);
        if (report.over) return report;
        passed = std::move(report.passed);
    }
    const auto found = streams_.find(key);
    if (found == streams_.end()) throw std::out_of_range("key: no stream that is lent");
    Report report = end(key, std::move(found->second.part), {});
    report.passed = passed + report.passed;
    return report;
}

double Relay::heard_s(Key key) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(key);
    return found == streams_.end() ? 0.0 : found->second.heard_s;
}

std::size_t Relay::num_lent() const {
    const std::lock_guard lock(mutex_);
    return streams_.size();
}

void Relay::tell(Report report) {
    reports_.push_back(std::move(report));
    ::eventfd_write(told_.get(), 1);
}

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
