#include "http/events.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace pdlink::http {
namespace {

constexpr std::string_view kErrorObject = "{\"error\"", kDoneMarker = "[DONE]";
constexpr std::string_view kReason = "\"finish_reason\":", kNull = "null";
constexpr std::string_view kDetails = "t_tokens_details\":", kRead = "\"cache_read_input_tokens\":";
constexpr std::string_view kParamsField = "\"kv_transfer_params\":", kAbortWord = "\"abort\"", kName = "event: ";
constexpr std::array<std::string_view, 5> kNames = {"response.completed", "response.incomplete", "response.failed",
                                                    "message_stop", "error"};
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

// Whether this field is an object somewhere.
bool has_object(std::string_view rest, std::string_view field) {
    for (std::size_t at; (at = find(rest, field)) != std::string_view::npos;) {
        rest = value_at(rest.substr(at + field.size()));
        if (rest.starts_with('{')) return true;
    }
    return false;
}

// A line of JSON has no line ends in it, so a name is at the beginning of a line.
bool has_name(std::string_view events) {
    for (std::size_t at, from = 0; (at = find(events.substr(from), kName)) != std::string_view::npos;) {
        at += from;
        from = at + kName.size();
        const std::string_view name = events.substr(from, events.find_first_of("\r\n", from) - from);
        if ((at == 0 || events[at - 1] == '\n') && std::ranges::find(kNames, name) != kNames.end()) return true;
    }
    return false;
}

}  // namespace

unsigned marks_of(std::string_view events, unsigned wanted) {
    const std::size_t end = events.size() > kDoneWithin ? events.size() - kDoneWithin : 0;
    const auto found = [wanted](Mark mark, auto has_it) { return (wanted & mark) != 0 && has_it() ? mark : 0U; };
    return found(kError, [&] { return has(events, kErrorObject); }) |
           found(kFinish, [&] { return has_reason(events); }) |
           found(kCached, [&] { return has_object(events, kDetails) || has(events, kRead); }) |
           found(kDone, [&] { return has(events.substr(end), kDoneMarker); }) |
           found(kParams, [&] { return has_object(events, kParamsField); }) |
           found(kNamed, [&] { return has_name(events); }) | found(kAbort, [&] { return has(events, kAbortWord); }) |
           (wanted & kAnything);
}

}  // namespace pdlink::http
