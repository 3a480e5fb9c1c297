// The fields of a JSON object (RFC 8259), found without building what is in them. What is not plain is not judged
// here: a whole parser reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pdlink::http {

struct LongField {
    std::string_view name, value;  // the name as it is written, between its quotes; the value's JSON
};

struct Shortened {
    std::string json;  // the object, with null in place of each long value
    std::size_t num_fields;
    std::vector<LongField> longs;
};

// long_nbytes: of a value that is long. Nothing if the text is not such an object, for one that is nested deeply, and
// for a long value whose name is not plain ASCII.
std::optional<Shortened> shortened(std::string_view json, std::size_t long_nbytes);

// Whether a whole answer is one: an object with a list of `choices`, of `output` (/v1/responses) or of `content`
// (/v1/messages), or with `meta_info` (SGLang's /generate), or a list of objects with that. Of a name that comes
// twice the last counts. Names count as they are written, without escapes: no server writes them otherwise.
bool is_answer(std::string_view json);

struct Usage {
    std::uint64_t prompt_tokens = 0, completion_tokens = 0;
};

// What an answer, or the payload of an event, says in its own `usage`, in that of its `response` (/v1/responses), or
// in its `meta_info`; nothing if it has none. `input_tokens` and `output_tokens` are other names for both numbers.
// One answer of a batch, which has an `index` beside `meta_info`, says nothing of the request. The first character is
// not looked at: instead of "{" it may be a comma within the object, whose later fields are read then.
std::optional<Usage> usage_in(std::string_view json);

// Whether this is an object without such a field. False, too, for what is nested deeply or has names with escapes.
bool lacks(std::string_view json, std::string_view field);

// Whether messages have parts, images say, that become tokens which do not tell what is in them. Quotes in text are
// escaped, so a name in quotes is a field or its value.
bool names_media(std::string_view json);

}  // namespace pdlink::http
