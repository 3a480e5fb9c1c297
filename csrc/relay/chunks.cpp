#include "relay/chunks.h"

#include <charconv>

namespace pdlink::relay {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::size_t kMostDigits = 8;  // of a size in hexadecimal
// As `sse.py` has them: a worker's error object, the marker at the end of a stream, and the reason of an answer's end.
constexpr std::string_view kError = "{\"error\"", kDone = "[DONE]", kEventEnd = "\n\n";
constexpr std::string_view kFinish = "\"finish_reason\":", kNull = "null";
constexpr std::size_t kDoneWithin = 16;

// Whether an answer ends in these events: of the others each says null, with a space before it or none.
bool has_finish(std::string_view payload) {
    for (std::size_t at = 0; (at = payload.find(kFinish, at)) != std::string_view::npos;) {
        at += kFinish.size();
        const std::string_view value = payload.substr(at + (payload.substr(at).starts_with(' ') ? 1 : 0));
        if (!value.starts_with(kNull)) return true;
    }
    return false;
}

bool is_plain(std::string_view payload) {
    if (!payload.ends_with(kEventEnd) || payload.find(kError) != std::string_view::npos) return false;
    if (has_finish(payload)) return false;
    const std::size_t end = payload.size() > kDoneWithin ? payload.size() - kDoneWithin : 0;
    return payload.find(kDone, end) == std::string_view::npos;
}

}  // namespace

Found first_chunk(std::string_view bytes) {
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
    if (!rest.substr(kLineEnd.size() + size).starts_with(kLineEnd) || !is_plain(payload)) return {What::kUnusual};
    return {What::kEvents, nbytes, payload};
}

}  // namespace pdlink::relay
