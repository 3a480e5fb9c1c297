#include "http/json.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pdlink::http {
namespace {

constexpr std::size_t kMaxDepth = 64, kAnyDepth = SIZE_MAX, kMaxDigits = 12;

using Chunk = std::uint8_t __attribute__((vector_size(16)));  // of GCC and Clang, for any processor

// Where the first quote, backslash or control character is.
const char* past_plain(const char* at, const char* end) {
    static_assert(std::endian::native == std::endian::little);
    for (; end - at >= static_cast<std::ptrdiff_t>(sizeof(Chunk)); at += sizeof(Chunk)) {
        Chunk chunk;
        std::memcpy(&chunk, at, sizeof chunk);
        const auto found = (chunk == '"') | (chunk == '\\') | (chunk < 0x20);
        std::array<std::uint64_t, 2> words;
        std::memcpy(words.data(), &found, sizeof words);
        if (words[0]) return at + std::countr_zero(words[0]) / 8;
        if (words[1]) return at + 8 + std::countr_zero(words[1]) / 8;
    }
    while (at != end && *at != '"' && *at != '\\' && static_cast<std::uint8_t>(*at) >= 0x20) ++at;
    return at;
}

class Scan {
  public:
    explicit Scan(std::string_view json, std::size_t max_depth = kMaxDepth)
        : at_(json.data()), end_(json.data() + json.size()), max_depth_(max_depth) {}

    const char* at() const { return at_; }
    bool at_end() const { return at_ == end_; }

    bool is_at(char c) const { return at_ != end_ && *at_ == c; }

    void space() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    }
    // Each of these: whether it was there. It is behind it then, and anywhere if not.
    bool one(char c) {
        if (at_ == end_ || *at_ != c) return false;
        ++at_;
        return true;
    }
    bool string();
    bool value();
    // An object whose fields `read` reads: it gets each name as it is written.
    template <class Read>
    bool object(Read read);
    // A list, or what else has brackets, whose items `read` reads.
    template <class Read>
    bool items(char close, Read read);

  private:
    bool word(std::string_view text) {
        if (!std::string_view(at_, static_cast<std::size_t>(end_ - at_)).starts_with(text)) return false;
        at_ += text.size();
        return true;
    }
    bool digits() {
        const char* const begin = at_;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        return at_ != begin;
    }
    bool number() {
        one('-');
        if (!one('0') && !digits()) return false;
        if (one('.') && !digits()) return false;
        if (!one('e') && !one('E')) return true;
        if (!one('-')) one('+');
        return digits();
    }
    bool escape();
    std::optional<unsigned> unit();
    // What is no list and no object.
    bool single();
    // A field's, with what stands between it and the value.
    std::optional<std::string_view> name();

    const char *at_, *const end_;
    const std::size_t max_depth_;
};

bool Scan::string() {
    if (!one('"')) return false;
    while ((at_ = past_plain(at_, end_)) != end_) {
        if (one('"')) return true;
        if (!one('\\') || !escape()) return false;
    }
    return false;
}

bool Scan::escape() {
    if (at_ == end_) return false;
    if (!one('u')) return std::string_view("\"\\/bfnrt").find(*at_++) != std::string_view::npos;
    const auto first = unit();
    if (!first) return false;
    if (*first < 0xD800 || *first > 0xDFFF) return true;
    if (*first > 0xDBFF || !word("\\u")) return false;  // half of a pair
    const auto second = unit();
    return second && *second >= 0xDC00 && *second <= 0xDFFF;
}

// Four hexadecimal digits.
std::optional<unsigned> Scan::unit() {
    if (end_ - at_ < 4) return std::nullopt;
    unsigned found = 0;
    for (const char* const stop = at_ + 4; at_ != stop; ++at_) {
        const char c = *at_, lower = static_cast<char>(c | 0x20);
        if (c >= '0' && c <= '9') {
            found = found * 16 + static_cast<unsigned>(c - '0');
        } else if (lower >= 'a' && lower <= 'f') {
            found = found * 16 + static_cast<unsigned>(lower - 'a') + 10;
        } else {
            return std::nullopt;
        }
    }
    return found;
}

template <class Read>
bool Scan::items(char close, Read read) {
    ++at_;
    space();
    if (one(close)) return true;
    do {
        space();
        if (!read()) return false;
        space();
    } while (one(','));
    return one(close);
}

std::optional<std::string_view> Scan::name() {
    const char* const begin = at_ + 1;
    if (!string()) return std::nullopt;
    const std::string_view found(begin, static_cast<std::size_t>(at_ - 1 - begin));
    space();
    if (!one(':')) return std::nullopt;
    space();
    return found;
}

template <class Read>
bool Scan::object(Read read) {
    return items('}', [&] {
        const auto found = name();
        return found && read(*found);
    });
}

bool Scan::value() {
    std::string open;  // the brackets that are to come; no recursion, for a worker may nest as deeply as it likes
    const auto next = [&] { return open.back() == ']' || name(); };
    while (true) {
        if (is_at('{') || is_at('[')) {
            if (open.size() == max_depth_) return false;
            open += *at_++ == '{' ? '}' : ']';
            space();
            if (!is_at(open.back())) {
                if (!next()) return false;
                continue;
            }
        } else if (!single()) {
            return false;
        }
        while (true) {  // behind a value, or before the bracket that ends an empty one
            if (open.empty()) return true;
            space();
            if (!one(open.back())) break;
            open.pop_back();
        }
        if (!one(',')) return false;
        space();
        if (!next()) return false;
    }
}

bool Scan::single() {
    if (at_ == end_) return false;
    switch (*at_) {
        case '"':
            return string();
        case 't':
            return word("true");
        case 'f':
            return word("false");
        case 'n':
            return word("null");
        default:
            return number();
    }
}

// Each with quotes, as a field's name or a value.
constexpr std::array<std::string_view, 7> kMedia = {"\"image_url\"",    "\"input_audio\"", "\"video_url\"",
                                                    "\"image_embeds\"", "\"audio_url\"",   "\"image_pil\"",
                                                    "\"prompt_embeds\""};

}  // namespace

std::optional<Shortened> shortened(std::string_view json, std::size_t long_nbytes) {
    Scan scan(json);
    Shortened found{{}, 0, {}};
    const char* kept = json.data();  // up to here it is in `found.json`
    scan.space();
    if (!scan.is_at('{')) return std::nullopt;
    const bool is_plain = scan.object([&](std::string_view name) {
        const char* const begin = scan.at();
        if (!scan.value()) return false;
        ++found.num_fields;
        if (const auto nbytes = static_cast<std::size_t>(scan.at() - begin); nbytes >= long_nbytes) {
            if (std::ranges::any_of(name, [](char c) { return c == '\\' || static_cast<signed char>(c) < 0; }))
                return false;
            found.longs.push_back({name, {begin, nbytes}});
            found.json.append(kept, begin).append("null");
            kept = scan.at();
        }
        return true;
    });
    if (!is_plain) return std::nullopt;
    found.json.append(kept, json.data() + json.size());
    return found;
}

bool is_answer(std::string_view json) {
    Scan scan(json, kAnyDepth);
    bool has_meta = false, has_choices = false, has_output = false, has_content = false;
    const auto read = [&] {
        if (!scan.is_at('{')) return false;
        has_meta = false;
        return scan.object([&](std::string_view name) {
            const bool is_list = scan.is_at('[');
            if (name == "choices") has_choices = is_list;
            if (name == "output") has_output = is_list;
            if (name == "content") has_content = is_list;
            if (name == "meta_info") has_meta = scan.is_at('{');
            return scan.value();
        });
    };
    scan.space();
    const bool is_one = scan.is_at('[') ? scan.items(']', [&] { return read() && has_meta; }) && has_meta
                                        : read() && (has_choices || has_output || has_content || has_meta);
    scan.space();
    return is_one && scan.at_end();
}

std::optional<Usage> usage_in(std::string_view json) {
    Scan scan(json, kAnyDepth);
    std::optional<Usage> usage, meta;
    bool is_one_of_several = false;
    const auto read = [&](std::optional<Usage>& into) {
        Usage& found = into.emplace();
        std::optional<std::uint64_t> input;
        std::uint64_t cached = 0;  // of /v1/messages, which counts it apart from its input
        const bool is_read = scan.object([&](std::string_view name) {
            const char* const begin = scan.at();
            if (!scan.value()) return false;
            std::uint64_t number = 0;
            if (scan.at() - begin > static_cast<std::ptrdiff_t>(kMaxDigits) ||
                std::from_chars(begin, scan.at(), number).ptr != scan.at())
                number = 0;  // of no prompt
            if (name == "prompt_tokens") found.prompt_tokens = number;
            if (name == "input_tokens") input = number;
            if (name == "completion_tokens" || name == "output_tokens") found.completion_tokens = number;
            if (name == "cache_read_input_tokens" || name == "cache_creation_input_tokens") cached += number;
            return true;
        });
        if (input) found.prompt_tokens = *input + cached;
        return is_read;
    };
    // Of a name that comes twice the last counts.
    const auto field = [&](std::string_view name, std::string_view wanted, std::optional<Usage>& into) {
        if (name != wanted) return false;
        into.reset();
        return scan.is_at('{');
    };
    const auto read_usage = [&](std::string_view name) {
        return field(name, "usage", usage) ? read(usage) : scan.value();
    };
    const bool is_object = !json.empty() && scan.object([&](std::string_view name) {
        is_one_of_several = is_one_of_several || name == "index";
        if (name == "response" && scan.is_at('{')) return scan.object(read_usage);
        return field(name, "meta_info", meta) ? read(meta) : read_usage(name);
    });
    scan.space();
    if (!is_object || !scan.at_end()) return std::nullopt;
    return usage || is_one_of_several ? usage : meta;
}

bool lacks(std::string_view json, std::string_view field) {
    Scan scan(json);
    if (!scan.is_at('{')) return false;
    const bool found = scan.object([&](std::string_view name) {
        return name != field && name.find('\\') == std::string_view::npos && scan.value();
    });
    return found && scan.at_end();
}

bool names_media(std::string_view json) {
    // Quotes are frequent in JSON, and underscores are rare in prose.
    for (std::size_t at = json.find('_'); at != std::string_view::npos; at = json.find('_', at + 1))
        for (const std::string_view each : kMedia)
            if (const std::size_t before = each.find('_');
                before <= at && json.substr(at - before, each.size()) == each)
                return true;
    return false;
}

}  // namespace pdlink::http
