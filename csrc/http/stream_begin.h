// How a stream of events begins.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace pdlink::http {

struct FirstEvent {
    std::size_t begin, end;
    bool is_token;  // it is nothing else for certain
};

// Of whole events the first one with data; nothing if none has any. A token's data are one line, a JSON object
// without an error. Whether they are one all the same if they are written in another way is not judged here.
std::optional<FirstEvent> first_data_event(std::string_view events);

}  // namespace pdlink::http
