#include "http/stream_begin.h"

#include <algorithm>

#include "http/events.h"
#include "http/json.h"

namespace pdlink::http {
namespace {

constexpr std::string_view kData = "data:", kEnd = "\n\n", kSpace = " \t\r\n";

// Behind the empty line that ends the event with which these bytes begin; 0 without one.
std::size_t end_of_event(std::string_view events) {
    for (std::size_t at = events.find('\n'); at != std::string_view::npos; at = events.find('\n', at + 1)) {
        const std::string_view rest = events.substr(at + 1);
        if (rest.starts_with('\n')) return at + 2;
        if (rest.starts_with("\r\n")) return at + 3;
    }
    return 0;
}

bool is_token(std::string_view event) {
    if (!event.starts_with(kData) || event.find('\n') != event.size() - kEnd.size()) return false;
    std::string_view data = event.substr(kData.size());
    data.remove_prefix(std::min(data.find_first_not_of(kSpace), data.size()));
    data = data.substr(0, data.find_last_not_of(kSpace) + 1);
    return lacks(data, "error") && marks_of(event, kAbort) == 0;
}

}  // namespace

std::optional<FirstEvent> first_data_event(std::string_view events) {
    for (std::size_t begin = 0, nbytes; (nbytes = end_of_event(events.substr(begin))) != 0; begin += nbytes) {
        const std::string_view event = events.substr(begin, nbytes);
        if (event.starts_with(kData) || event.find("\ndata:") != std::string_view::npos)
            return FirstEvent{begin, begin + nbytes, is_token(event)};
    }
    return std::nullopt;
}

}  // namespace pdlink::http
