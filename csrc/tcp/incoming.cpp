#include "tcp/incoming.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "common/native.h"
#include "copy/stores.h"

namespace pdlink::tcp {

Turn Incoming::broken(std::string reason) {
    reason_ = std::move(reason);
    return Turn::kBroken;
}

Turn Incoming::receive() {
    std::uint64_t moved = 0;
    while (true) {
        if (const Turn turn = flush_answers(); turn != Turn::kMore) return turn;
        if (refused_) return Turn::kBroken;
        if (!ready.in) return Turn::kIdle;
        if (moved >= kMaxFrameNbytes) return Turn::kMore;

        const std::lock_guard placing(placing_);
        if (!revoked_.empty()) {
            reason_ = std::exchange(revoked_, {});
            refuse(Verdict::kOutside);
            continue;
        }
        iovec one{};
        msghdr message{};
        message.msg_iov = &one;
        message.msg_iovlen = 1;
        if (part_ == Part::kHeader) {
            one = {reinterpret_cast<std::byte*>(&header_) + header_nbytes_, sizeof header_ - header_nbytes_};
        } else if (part_ == Part::kTable) {
            const std::size_t whole = header_.num_runs * sizeof(WireRun);
            one = {reinterpret_cast<std::byte*>(table_) + table_nbytes_, whole - table_nbytes_};
        } else {
            message.msg_iov = places_.data() + next_place_;
            message.msg_iovlen = places_.size() - next_place_;
        }
        const auto receive_some = [&] {
            const TouchesPages pages;
            return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
        };
        const ssize_t got = receive_some();
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ready.in = false;
            continue;
        }
        if (got < 0) return broken(std::strerror(errno));
        if (got == 0) {
            if (part_ == Part::kHeader && header_nbytes_ == 0) return Turn::kEnded;
            return broken("ended in the middle of a frame");
        }
        moved += static_cast<std::uint64_t>(got);
        take(static_cast<std::size_t>(got));
    }
}

// Account for received bytes.
void Incoming::take(std::size_t nbytes) {
    if (part_ == Part::kTable) {
        table_nbytes_ += nbytes;
        if (table_nbytes_ == header_.num_runs * sizeof(WireRun)) table_complete();
        return;
    }
    if (part_ == Part::kPayload) {
        while (nbytes > 0 && payload_left_ > 0) {
            iovec& place = places_[next_place_];
            const std::size_t part = nbytes < place.iov_len ? nbytes : place.iov_len;
            place.iov_base = static_cast<std::byte*>(place.iov_base) + part;
            place.iov_len -= part;
            if (place.iov_len == 0) ++next_place_;
            nbytes -= part;
            payload_left_ -= part;
        }
        if (payload_left_ > 0) return;
        frame_complete();
    }
    header_nbytes_ += nbytes;
    if (header_nbytes_ == sizeof header_) header_complete();
}

void Incoming::header_complete() {
    if (const Verdict verdict = check_header(header_, session_, sequence_, reason_); verdict != Verdict::kPlaced)
        return refuse(verdict);
    ticket_ = header_.ticket;  // the next header may overwrite this one before the answer is written
    table_nbytes_ = 0;
    part_ = Part::kTable;
    if (header_.num_runs == 0) table_complete();
}

// Check the whole frame against the invited regions before a byte of it is placed.
void Incoming::table_complete() {
    const std::span<const WireRun> runs(table_, header_.num_runs);
    if (const Verdict verdict = check_runs(header_, runs, *regions_, reason_); verdict != Verdict::kPlaced)
        return refuse(verdict);
    if (guard_ && !guard_->all_open(runs, peer_, reason_)) return refuse(Verdict::kOutside);
    places_.clear();
    next_place_ = 0;
    std::size_t packed_nbytes = 0;
    for (const WireRun& run : runs)
        if (run.nbytes < pack_below_) packed_nbytes += run.nbytes;
    if (packed_.size() < packed_nbytes) packed_.resize(packed_nbytes);
    unpack_ = packed_nbytes > 0 ? runs : std::span<const WireRun>();
    std::byte* free = packed_.data();
    for (const WireRun& run : runs) {
        if (run.nbytes == 0) continue;
        const bool pack = run.nbytes < pack_below_;
        std::byte* at = pack ? free : (*regions_)[run.region].base + run.offset;
        if (pack) free += run.nbytes;
        if (pack && !places_.empty() &&
            static_cast<std::byte*>(places_.back().iov_base) + places_.back().iov_len == at)
            places_.back().iov_len += run.nbytes;
        else
            places_.push_back({at, run.nbytes});
    }
    payload_left_ = header_.nbytes;
    if (payload_left_ == 0) {
        frame_complete();
    } else {
        places_.push_back({&header_, sizeof header_});
        part_ = Part::kPayload;
    }
}

void Incoming::look_again() {
    const std::lock_guard placing(placing_);
    std::string why;
    if (part_ == Part::kPayload && guard_ && !guard_->all_open({table_, header_.num_runs}, peer_, why))
        revoked_ = why + " any more";
}

// The table is checked and is our own copy, so it cannot change.
void Incoming::unpack() {
    if (unpack_.empty()) return;
    const TouchesPages pages;
    const std::byte* from = packed_.data();
    for (const WireRun& run : unpack_) {
        if (run.nbytes >= pack_below_) continue;
        copy_run((*regions_)[run.region].base + run.offset, from, run.nbytes);
        from += run.nbytes;
    }
    store_fence();
}

void Incoming::frame_complete() {
    unpack();
    answer(Verdict::kPlaced);
    ++sequence_;
    header_nbytes_ = 0;
    part_ = Part::kHeader;
}

void Incoming::refuse(Verdict verdict) {
    refused_ = true;
    answer(verdict);
}

void Incoming::answer(Verdict verdict) {
    const Answer words{kAnswerMagic, verdict, sequence_, ticket_};
    const auto* at = reinterpret_cast<const std::byte*>(&words);
    answers_.insert(answers_.end(), at, at + sizeof words);
}

// kMore if there are none left.
Turn Incoming::flush_answers() {
    while (!answers_.empty()) {
        const ssize_t sent = ::send(socket_.get(), answers_.data(), answers_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (refused_) return Turn::kBroken;
            ready.out = false;
            return Turn::kIdle;
        }
        if (sent < 0) return refused_ ? Turn::kBroken : broken(std::strerror(errno));
        answers_.erase(answers_.begin(), answers_.begin() + sent);
    }
    return Turn::kMore;
}

}  // namespace pdlink::tcp
