#include "relay/chunks.h"

#include <charconv>

#include "http/events.h"

namespace pdlink::relay {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::size_t kMostDigits = 8;  // of a size in hexadecimal
constexpr std::string_view kEventEnd = "\n\n";

bool is_plain(std::string_view payload, unsigned marks) {
    return payload.ends_with(kEventEnd) && http::marks_of(payload, marks) == 0;
}

}  // namespace

Found first_chunk(std::string_view bytes, unsigned marks) {
    using What = Found::What;
    if (bytes.empty()) return {What::kPart};
    std::size_t size = 0;
    const char* const end = bytes.data() + bytes.size();
    const auto [stop, error] = std::from_chars(bytes.data(), end, size, 16);
    const std::size_t digits = static_cast<std::size_t>(stop - bytes.data());
    if (error != std::errc{} || digits > kMostDigits || bytes.front() == '-') return {What::kUnusual};
    const std::string_view rest = bytes.substr(digits);
    if (rest.size() < kLineEnd.size()) return {kLineEnd.starts_with(rest) ? What::kPart : What::kUnusual};
    if (!rest.starts_with(kLineEnd) || size == 0) return {What::kUnusual};
    const std::size_t nbytes = digits + size + 2 * kLineEnd.size();
    if (bytes.size() < nbytes) return {What::kPart};
    const std::string_view payload = rest.substr(kLineEnd.size(), size);
    if (!rest.substr(kLineEnd.size() + size).starts_with(kLineEnd) || !is_plain(payload, marks))
        return {What::kUnusual};
    return {What::kEvents, nbytes, payload};
}

}  // namespace pdlink::relay
