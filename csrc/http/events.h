// What events of a stream tell that somebody must act on. Quotes in generated text are escaped, so a mark is a field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pdlink::http {

enum Mark : unsigned {
    kError = 1,    // an error object
    kFinish = 2,   // a finish_reason that is not null
    kCached = 4,   // cached tokens, in a usage
    kDone = 8,     // the marker at the end of a stream
    kParams = 16,  // kv_transfer_params that are not null
    kNamed = 32,   // an event with a name that ends a stream or tells of a failure
    kAbort = 64,   // a finish_reason of SGLang's /generate that may tell of a failure
    kAnything = 128,
    kFailed = 256,  // a finish_reason "error"
};

// Which of the marks in `wanted` whole events have, or a whole answer. All have kAnything.
unsigned marks_of(std::string_view events, unsigned wanted);

// Where the line with the marker at the end of a stream begins, if whole events end with it.
std::optional<std::size_t> place_of_done(std::string_view events);

struct Usage {
    std::uint64_t prompt_tokens = 0, completion_tokens = 0;
};

// What the last usage in events or in a whole answer says; 0 where it says nothing.
Usage usage_of(std::string_view events);

}  // namespace pdlink::http
