#include "http/answers.h"

#include <algorithm>

namespace pdlink::http {
namespace {

constexpr std::size_t kMaxDigits = 15;               // of a size in hexadecimal
constexpr std::size_t kMaxBesideNbytes = 16 * 1024;  // of an extension, or of all trailers

int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

std::optional<Part> Answers::feed(std::string_view bytes) {
    part_ = Part{};
    joined_.clear();
    if (state_ == State::kHead) {
        std::optional<PlainHead> found = plain_head(bytes);
        if (!found) return std::nullopt;
        bytes.remove_prefix(found->head_nbytes);
        part_.head = AnswerHead{found->status, std::move(found->fields)};
        left_ = found->nbytes.value_or(0);
        num_read_ = 0;
        state_ = found->nbytes ? State::kLength : State::kSize;
        if (found->nbytes && left_ == 0) end(bytes);
    }
    while (!bytes.empty() && !(part_.where & (kEnd | kBad))) {
        if (!step(bytes)) part_.where |= kBad;
    }
    return std::move(part_);
}

bool Answers::step(std::string_view& bytes) {
    const char c = bytes.front();
    switch (state_) {
        case State::kLength:
            take(bytes);
            if (left_ == 0) end(bytes);
            return true;
        case State::kData:
            take(bytes);
            if (left_ == 0) state_ = State::kDataEnd;
            return true;
        case State::kSize:
            bytes.remove_prefix(1);
            return size(c);
        case State::kExtension:
            bytes.remove_prefix(1);
            if (c == '\r') state_ = State::kSizeEnd;
            return c != '\n' && ++num_read_ <= kMaxBesideNbytes;
        case State::kSizeEnd:
            bytes.remove_prefix(1);
            num_read_ = 0;
            state_ = left_ == 0 ? State::kTrailer : State::kData;
            return c == '\n';
        case State::kDataEnd:
            bytes.remove_prefix(1);
            state_ = State::kLineEnd;
            return c == '\r';
        case State::kLineEnd:
            bytes.remove_prefix(1);
            num_read_ = 0;
            state_ = State::kSize;
            return c == '\n';
        case State::kTrailer:  // at the beginning of a line
            state_ = c == '\r' ? State::kLast : State::kTrailerLine;
            if (c == '\r') bytes.remove_prefix(1);
            return true;
        case State::kTrailerLine:
            bytes.remove_prefix(1);
            if (c == '\n') state_ = State::kTrailer;
            return ++num_read_ <= kMaxBesideNbytes;
        case State::kLast:
            bytes.remove_prefix(1);
            if (c == '\n') end(bytes);
            return c == '\n';
        case State::kHead:
            break;
    }
    return false;
}

bool Answers::size(char c) {
    if (const int digit = hex(c); digit >= 0) {
        left_ = (num_read_ == 0 ? 0 : left_ * 16) + static_cast<std::uint64_t>(digit);
        return ++num_read_ <= kMaxDigits;
    }
    if (num_read_ == 0 || (c != ';' && c != '\r')) return false;
    state_ = c == ';' ? State::kExtension : State::kSizeEnd;
    return true;
}

void Answers::take(std::string_view& bytes) {
    const std::string_view part = bytes.substr(0, std::min<std::uint64_t>(left_, bytes.size()));
    left_ -= part.size();
    bytes.remove_prefix(part.size());
    if (part_.body.empty()) {
        part_.body = part;
        return;
    }
    if (joined_.empty()) joined_.assign(part_.body);
    part_.body = joined_.append(part);
}

void Answers::end(std::string_view rest) {
    state_ = State::kHead;
    part_.where |= kEnd | (rest.empty() ? 0U : static_cast<unsigned>(kMore));
}

}  // namespace pdlink::http
