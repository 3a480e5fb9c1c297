// Answers on one connection to a worker (RFC 9112) of the plain kind: a head that comes in one piece, and a body of
// known length or in chunks, which may come in any. What is not plain is not judged here: a whole parser reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http/heads.h"

namespace pdlink::http {

enum Where : unsigned {
    kEnd = 1,   // the answer is over
    kBad = 4,   // they are no HTTP; nothing more can be read
    kMore = 8,  // more came than the answer
};

struct AnswerHead {
    int status;
    std::vector<Field> fields;
};

struct Part {
    std::optional<AnswerHead> head;  // where it came with these bytes
    std::string_view body;           // what they have of the body; valid until the next call
    unsigned where = 0;
};

class Answers {
  public:
    // Of bytes that came. Nothing if an answer begins with them that is not plain: none of it was read.
    std::optional<Part> feed(std::string_view bytes);

  private:
    enum class State {
        kHead,
        kLength,
        kSize,
        kExtension,
        kSizeEnd,
        kData,
        kDataEnd,
        kLineEnd,
        kTrailer,
        kTrailerLine,
        kLast
    };

    // Reads what `bytes` begin with, in this state. False if that is no HTTP.
    bool step(std::string_view& bytes);
    bool size(char c);
    void take(std::string_view& bytes);
    void end(std::string_view rest);

    State state_ = State::kHead;
    std::uint64_t left_ = 0;    // of the body, or of a chunk; while its size is read, that
    std::size_t num_read_ = 0;  // digits of a size, or bytes of what stands beside chunks
    Part part_;
    std::string joined_;  // the body in bytes with several chunks
};

}  // namespace pdlink::http
