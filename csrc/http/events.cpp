#include "http/events.h"

#include <cstring>

namespace pdlink::http {
namespace {

constexpr std::string_view kErrorObject = "{\"error\"", kDoneMarker = "[DONE]";
constexpr std::string_view kReason = "\"finish_reason\":", kNull = "null";
constexpr std::string_view kDetails = "_tokens_details\":", kRead = "\"cache_read_input_tokens\":";
constexpr std::size_t kDoneWithin = 16;

// memmem: `find` of a string_view stops at each first character, and every field begins with a quote.
std::size_t find(std::string_view text, std::string_view mark) {
    const void* const at = memmem(text.data(), text.size(), mark.data(), mark.size());
    if (at == nullptr) return std::string_view::npos;
    return static_cast<std::size_t>(static_cast<const char*>(at) - text.data());
}

bool has(std::string_view text, std::string_view mark) { return find(text, mark) != std::string_view::npos; }

// What follows a name and its colon, with a space before it or none.
std::string_view value_at(std::string_view text) { return text.substr(text.starts_with(' ') ? 1 : 0); }

// Whether an answer ends in these events: of the others each says null.
bool has_reason(std::string_view rest) {
    for (std::size_t at; (at = find(rest, kReason)) != std::string_view::npos;) {
        rest = value_at(rest.substr(at + kReason.size()));
        if (!rest.starts_with(kNull)) return true;
    }
    return false;
}

bool has_details(std::string_view rest) {
    for (std::size_t at; (at = find(rest, kDetails)) != std::string_view::npos;) {
        rest = value_at(rest.substr(at + kDetails.size()));
        if (rest.starts_with('{')) return true;
    }
    return false;
}

}  // namespace

unsigned marks_of(std::string_view events) {
    const std::size_t end = events.size() > kDoneWithin ? events.size() - kDoneWithin : 0;
    return (has(events, kErrorObject) ? kError : 0U) | (has_reason(events) ? kFinish : 0U) |
           (has_details(events) || has(events, kRead) ? kCached : 0U) |
           (has(events.substr(end), kDoneMarker) ? kDone : 0U);
}

}  // namespace pdlink::http
