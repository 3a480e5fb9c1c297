// What events of a stream tell that somebody must act on. Quotes in generated text are escaped, so a mark is a field.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "http/json.h"

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

// What a whole answer says, or the last of whole events that says something (`usage_in`); 0 where none does.
Usage usage_of(std::string_view bytes);

}  // namespace pdlink::http
