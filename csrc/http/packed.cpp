#include "http/packed.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pdlink::http {
namespace {

constexpr std::string_view kEventEnd = "\n\n";
constexpr std::size_t kStep = sizeof(std::uint64_t);

// How many bytes both begin with.
std::size_t common(std::string_view one, std::string_view other) {
    const std::size_t most = std::min(one.size(), other.size());
    std::size_t at = 0;
    for (; at + kStep <= most; at += kStep) {
        std::uint64_t a, b;
        std::memcpy(&a, one.data() + at, kStep);
        std::memcpy(&b, other.data() + at, kStep);
        if (a != b) break;
    }
    while (at < most && one[at] == other[at]) ++at;
    return at;
}

// Up to the next quote that is not escaped, or all: events of one stream have the same fields, so both go on alike
// from there.
std::size_t until_quote(std::string_view text) {
    std::size_t at = 0;
    while (at < text.size() && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
    return std::min(at, text.size());
}

// The event with which these bytes begin, or all of them.
std::size_t first_event(std::string_view data) {
    for (std::size_t from = 0;;) {
        const void* const found = std::memchr(data.data() + from, '\n', data.size() - from);
        if (found == nullptr) return data.size();
        from = static_cast<std::size_t>(static_cast<const char*>(found) - data.data());
        if (data.substr(from).starts_with(kEventEnd)) return from + kEventEnd.size();
        ++from;
    }
}

}  // namespace

void Packed::add(std::string_view data) {
    while (!data.empty()) {
        const std::string_view event = data.substr(0, first_event(data));
        write(event);
        data.remove_prefix(event.size());
    }
}

void Packed::write(std::string_view event) {
    put(event.size());
    std::string_view last = last_, rest = event;
    while (!rest.empty()) {
        const std::size_t copied = common(rest, last);
        put(copied);
        rest.remove_prefix(copied);
        last.remove_prefix(copied);
        if (rest.empty()) break;
        const std::size_t passed = until_quote(last), own = last.empty() ? rest.size() : until_quote(rest);
        put(passed);
        put(own);
        codes_.append(rest.substr(0, own));
        last.remove_prefix(passed);
        rest.remove_prefix(own);
    }
    last_.assign(event);
}

void Packed::put(std::size_t number) {
    for (; number >= 128; number >>= 7) codes_.push_back(static_cast<char>(number | 128));
    codes_.push_back(static_cast<char>(number));
}

std::string Packed::take() {
    std::string all;
    std::size_t at = 0, last = 0;  // where `codes_` is read, and where the last event begins in `all`
    const auto next = [&] {
        std::size_t number = 0;
        for (unsigned shift = 0;; shift += 7) {
            const auto byte = static_cast<unsigned char>(codes_[at++]);
            number |= static_cast<std::size_t>(byte & 127) << shift;
            if (byte < 128) return number;
        }
    };
    while (at < codes_.size()) {
        const std::size_t begin = all.size(), end = begin + next();
        all.reserve(end);
        for (std::size_t from = last;;) {
            const std::size_t copied = next();
            all.append(all, from, copied);
            if (all.size() == end) break;
            from += copied + next();
            const std::size_t own = next();
            all.append(codes_, at, own);
            at += own;
            if (all.size() == end) break;
        }
        last = begin;
    }
    codes_ = {};
    last_ = {};
    return all;
}

std::size_t num_events(std::string_view data) {
    std::size_t num = 0;
    while (!data.empty()) {
        const std::size_t nbytes = first_event(data);
        if (!data.substr(0, nbytes).ends_with(kEventEnd)) break;
        ++num;
        data.remove_prefix(nbytes);
    }
    return num;
}

}  // namespace pdlink::http
