// What events of a stream tell that somebody must act on. Quotes in generated text are escaped, so a mark is a field.
#pragma once

#include <string_view>

namespace pdlink::http {

enum Mark : unsigned {
    kError = 1,   // an error object
    kFinish = 2,  // a finish_reason that is not null
    kCached = 4,  // cached tokens, in a usage
    kDone = 8,    // the marker at the end of a stream
};

// All marks of whole events, or of a whole answer.
unsigned marks_of(std::string_view events);

}  // namespace pdlink::http
