// Heads of HTTP/1.1 messages (RFC 9112) of the plain kind, which is nearly all of them. What is not plain is not
// judged here: a whole parser reads it.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

namespace pdlink::http {

struct Field {
    std::string_view name, value;  // the value without the spaces around it
};

// The fields in `lines`, which end with an empty line. Nothing if any is not a token, a colon and printable ASCII.
std::optional<std::vector<Field>> fields(std::string_view lines);

struct Answer {
    int status;
    std::vector<Field> fields;
    std::string_view body;
};

// The one whole answer that `bytes` are, if it has a body of known length and the connection stays after it.
std::optional<Answer> whole_answer(std::string_view bytes);

}  // namespace pdlink::http
