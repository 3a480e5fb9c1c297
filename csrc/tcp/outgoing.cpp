#include "tcp/outgoing.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/native.h"
#include "copy/stores.h"

namespace pdlink::tcp {
namespace {

// Packed bytes of one frame: they should still be in the cache when the kernel takes them.
constexpr std::size_t kMaxPackedNbytes = std::size_t{256} << 10;

}  // namespace

Outgoing::Outgoing(Descriptor socket, const Hello& hello, std::uint64_t pack_below)
    : socket_(std::move(socket)), hello_(hello), pack_below_(pack_below) {
    table_.reserve(kMaxRuns);
    iovecs_.reserve(kMaxRuns + 2);
    iovecs_.push_back({const_cast<Hello*>(&hello_), sizeof hello_});
}

Turn Outgoing::broken(std::string reason) {
    reason_ = std::move(reason);
    return Turn::kBroken;
}

// Add bytes to the payload. Bytes adjacent to the last ones extend its entry; packed bytes are adjacent to the packed
// ones before them. The kernel takes about as long for an entry as for a kilobyte.
void Outgoing::gather(const std::byte* src, std::uint64_t nbytes, bool pack) {
    iovec& last = iovecs_.back();
    const bool goes_on = iovecs_.size() > 2 && static_cast<const std::byte*>(last.iov_base) + last.iov_len == src;
    if (goes_on || !pack) {
        if (goes_on)
            last.iov_len += nbytes;
        else
            iovecs_.push_back({const_cast<std::byte*>(src), nbytes});
        return;
    }
    const std::byte* at = packed_.data() + packed_.size();
    {
        const TouchesPages pages;
        packed_.insert(packed_.end(), src, src + nbytes);
    }
    gather(at, nbytes, false);
}

void Outgoing::load(Batch& batch) {
    table_.clear();
    iovecs_.clear();
    packed_.clear();
    next_iovec_ = 0;
    iovecs_.push_back({&header_, sizeof header_});
    iovecs_.push_back({});  // the table, once it is known where it lies
    std::uint64_t nbytes = 0;
    while (batch.next_run < batch.runs.size() && table_.size() < kMaxRuns - 1 && iovecs_.size() < kMaxRuns + 1 &&
           nbytes < kMaxFrameNbytes && packed_.size() < kMaxPackedNbytes) {
        const Run& run = batch.runs[batch.next_run];
        if (batch.next_run + kPrefetchAhead < batch.runs.size()) {
            const Run& ahead = batch.runs[batch.next_run + kPrefetchAhead];
            prefetch_run(reinterpret_cast<const std::byte*>(ahead.src), ahead.nbytes);
        }
        const bool pack = run.nbytes < pack_below_;
        if (pack && packed_.capacity() == 0) packed_.reserve(kMaxPackedNbytes + kMaxPackBelow);
        const std::uint64_t part = std::min(run.nbytes - batch.next_nbytes, kMaxFrameNbytes - nbytes);
        append_run(table_, run.dst_region, run.dst + batch.next_nbytes, part);
        gather(reinterpret_cast<const std::byte*>(run.src + batch.next_nbytes), part, pack);
        nbytes += part;
        batch.next_nbytes += part;
        if (batch.next_nbytes == run.nbytes) {
            ++batch.next_run;
            batch.next_nbytes = 0;
        }
    }
    iovecs_[1] = {table_.data(), table_.size() * sizeof(WireRun)};
    header_ = {kFrameMagic, static_cast<std::uint32_t>(table_.size()), hello_.session, sequence_++, batch.ticket,
               nbytes};
    batch.cut = batch.next_run == batch.runs.size();
    ++batch.unanswered;
    asked_.push_back({&batch, batch.ticket});
}

Turn Outgoing::send() {
    while (!sent()) {
        if (!ready.out) return Turn::kIdle;
        msghdr message{};
        message.msg_iov = iovecs_.data() + next_iovec_;
        message.msg_iovlen = iovecs_.size() - next_iovec_;
        const auto send_some = [&] {
            const TouchesPages pages;
            return ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        };
        const ssize_t done = send_some();
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ready.out = false;
            return Turn::kIdle;
        }
        if (done < 0) return broken(std::strerror(errno));
        std::size_t left = static_cast<std::size_t>(done);
        while (next_iovec_ < iovecs_.size() && left >= iovecs_[next_iovec_].iov_len)
            left -= iovecs_[next_iovec_++].iov_len;
        if (left > 0) {
            iovec& cut = iovecs_[next_iovec_];
            cut.iov_base = static_cast<std::byte*>(cut.iov_base) + left;
            cut.iov_len -= left;
        }
    }
    return Turn::kMore;
}

Turn Outgoing::receive(std::vector<Batch*>& answered) {
    while (ready.in) {
        const ssize_t got =
            ::recv(socket_.get(), answer_ + answer_nbytes_, sizeof answer_ - answer_nbytes_, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ready.in = false;
            break;
        }
        if (got < 0) return broken(std::strerror(errno));
        if (got == 0) {
            reason_ =
                "the peer has ended the connection: it closed us, was restarted or does not know our invitation";
            return Turn::kEnded;
        }
        if (draining_) continue;
        answer_nbytes_ += static_cast<std::size_t>(got);
        std::size_t at = 0;
        for (; answer_nbytes_ - at >= sizeof(Answer); at += sizeof(Answer)) {
            Answer answer;
            std::memcpy(&answer, answer_ + at, sizeof answer);
            if (answer.magic != kAnswerMagic || asked_.empty() || answer.sequence != answered_sequence_)
                return broken("the peer answers what was not asked");
            if (answer.verdict != Verdict::kPlaced)
                return broken("the peer refused a frame: " +
                              std::string(answer.verdict == Verdict::kOutside ? "outside of its regions"
                                          : answer.verdict == Verdict::kStale ? "of another session"
                                                                              : "malformed"));
            if (answer.ticket != asked_.front().ticket) return broken("the peer answers for another batch");
            // The last frame loaded cannot be answered before it is sent.
            if (asked_.size() == 1 && !sent()) return broken("the peer answers what was not sent");
            answered.push_back(asked_.front().batch);
            asked_.pop_front();
            ++answered_sequence_;
        }
        std::memmove(answer_, answer_ + at, answer_nbytes_ - at);
        answer_nbytes_ -= at;
    }
    return Turn::kIdle;
}

bool Outgoing::drain() {
    draining_ = true;
    if (!connected_ || asked_.empty()) return false;
    ::shutdown(socket_.get(), SHUT_WR);
    return true;
}

}  // namespace pdlink::tcp
