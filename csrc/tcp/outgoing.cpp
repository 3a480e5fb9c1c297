#include "tcp/outgoing.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace pdlink::tcp {

Outgoing::Outgoing(Descriptor socket, const Hello& hello) : socket_(std::move(socket)), hello_(hello) {
    table_.reserve(kMaxRuns);
    pieces_.reserve(kMaxRuns + 2);
    pieces_.push_back({const_cast<Hello*>(&hello_), sizeof hello_});
}

Turn Outgoing::broken(std::string reason) {
    reason_ = std::move(reason);
    return Turn::kBroken;
}

void Outgoing::load(Batch& batch) {
    table_.clear();
    pieces_.clear();
    next_piece_ = 0;
    pieces_.push_back({&header_, sizeof header_});
    pieces_.push_back({});  // the table, once it is known where it lies
    std::uint64_t nbytes = 0;
    while (batch.next_put < batch.puts.size() && table_.size() < kMaxRuns - 1 && nbytes < kMaxFrameNbytes) {
        const ucx::Put& put = batch.puts[batch.next_put];
        const std::uint64_t part = std::min(put.nbytes - batch.next_nbytes, kMaxFrameNbytes - nbytes);
        table_.push_back({put.dst + batch.next_nbytes, put.dst_region, static_cast<std::uint32_t>(part)});
        pieces_.push_back({reinterpret_cast<void*>(put.src + batch.next_nbytes), part});
        nbytes += part;
        batch.next_nbytes += part;
        if (batch.next_nbytes == put.nbytes) {
            ++batch.next_put;
            batch.next_nbytes = 0;
        }
    }
    pieces_[1] = {table_.data(), table_.size() * sizeof(FrameRun)};
    header_ = {kFrameMagic, static_cast<std::uint32_t>(table_.size()), hello_.session, sequence_++, batch.ticket,
               nbytes};
    batch.cut = batch.next_put == batch.puts.size();
    ++batch.unanswered;
    asked_.push_back({&batch, batch.ticket});
}

Turn Outgoing::send() {
    while (!sent()) {
        if (!ready.out) return Turn::kIdle;
        msghdr message{};
        message.msg_iov = pieces_.data() + next_piece_;
        message.msg_iovlen = pieces_.size() - next_piece_;
        const ssize_t done = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ready.out = false;
            return Turn::kIdle;
        }
        if (done < 0) return broken(std::strerror(errno));
        std::size_t left = static_cast<std::size_t>(done);
        while (next_piece_ < pieces_.size() && left >= pieces_[next_piece_].iov_len)
            left -= pieces_[next_piece_++].iov_len;
        if (left > 0) {
            iovec& piece = pieces_[next_piece_];
            piece.iov_base = static_cast<std::byte*>(piece.iov_base) + left;
            piece.iov_len -= left;
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
