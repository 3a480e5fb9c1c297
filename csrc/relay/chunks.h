// The body of a chunked answer (RFC 9112 7.1), as far as it can be passed on without a look at it.
#pragma once

#include <cstddef>
#include <string_view>

namespace pdlink::relay {

struct Found {
    enum class What {
        kEvents,   // a chunk of whole events
        kPart,     // more bytes are needed
        kUnusual,  // marks (http/events.h), half an event, an extension, what is no chunk: all that somebody must
                   // read
    };
    What what;
    std::size_t nbytes = 0;         // of the whole chunk, its frame included
    std::string_view payload = {};  // in it
};

// What these bytes begin with. marks: what somebody must look at.
Found first_chunk(std::string_view bytes, unsigned marks);

}  // namespace pdlink::relay
