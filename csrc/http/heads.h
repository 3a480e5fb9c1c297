// Heads of HTTP/1.1 messages (RFC 9112) of the plain kind, which is nearly all of them. What is not plain is not
// judged here: a whole parser reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pdlink::http {

struct Field {
    std::string_view name, value;  // the value without the spaces around it
};

// The fields in `lines`, which end with an empty line. Nothing if any is not a token, a colon and printable ASCII.
std::optional<std::vector<Field>> fields(std::string_view lines);

struct Request {
    std::vector<Field> fields;
    std::uint64_t nbytes;  // of its body
    bool keep;             // the connection stays after it
};

// The fields of a request in `lines`, as of `fields`, if it has a host, a body of known length, and nothing that
// changes how either is read.
std::optional<Request> plain_request(std::string_view lines);

struct Stages {
    double queue_s, placement_s;
    std::optional<double> prefill_s, transfer_s, decode_s;
};

// The value of Server-Timing, in ms. last: the name of `until_now_s`.
std::string server_timing(const Stages& stages, std::string_view last, double until_now_s);

struct PlainHead {
    int status;
    std::vector<Field> fields;
    std::size_t head_nbytes;
    std::optional<std::uint64_t> nbytes;  // of the body; none if it comes in chunks
};

// The head with which these bytes begin, if it is whole, says how long the body is or that it comes in chunks, and
// the connection stays after it.
std::optional<PlainHead> plain_head(std::string_view bytes);

}  // namespace pdlink::http
