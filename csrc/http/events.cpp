#include "http/events.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

namespace pdlink::http {
namespace {

// Words without the quote that ends them.
constexpr std::string_view kErrorObject = "{\"error", kAbortWord = "\"abort";
constexpr std::string_view kReason = "\"finish_reason", kDetails = "t_tokens_details";
constexpr std::string_view kRead = "\"cache_read_input_tokens", kParamsField = "\"kv_transfer_params";
constexpr std::string_view kNull = "null", kDoneMarker = "[DONE]", kName = "event: ";
constexpr std::string_view kErrorWord = "\"error\"";
constexpr std::string_view kUsage = "\"usage", kMeta = "\"meta_info", kData = "data:";
constexpr unsigned kWords = kError | kFinish | kCached | kParams | kAbort | kFailed;
constexpr std::array<std::string_view, 5> kNames = {"response.completed", "response.incomplete", "response.failed",
                                                    "message_stop", "error"};
constexpr std::size_t kDoneWithin = 16;

// memmem: `find` of a string_view stops at each first character.
std::size_t find(std::string_view text, std::string_view mark) {
    const void* const at = memmem(text.data(), text.size(), mark.data(), mark.size());
    if (at == nullptr) return std::string_view::npos;
    return static_cast<std::size_t>(static_cast<const char*>(at) - text.data());
}

std::string_view trimmed(std::string_view text) { return text.substr(0, text.find_last_not_of(" \t\r\n") + 1); }

bool ends_with_done(std::string_view events) {
    const std::size_t last = events.size() > kDoneWithin ? events.size() - kDoneWithin : 0;
    return trimmed(events.substr(last)).ends_with(kDoneMarker);
}

// What stands behind the quote at this place, if the word that ends there is a field.
std::optional<std::string_view> value_of(std::string_view events, std::size_t quote) {
    std::string_view value = events.substr(quote + 1);
    if (!value.starts_with(':')) return std::nullopt;
    value.remove_prefix(value.substr(1).starts_with(' ') ? 2 : 1);
    return value;
}

// Which marks a word of JSON is, or has as its value: the word before the quote at this place.
unsigned marks_of_word(std::string_view events, std::size_t quote) {
    const std::string_view word = events.substr(0, quote);
    unsigned mark = 0;
    switch (word.back()) {
        case 'r':
            return word.ends_with(kErrorObject) ? kError : 0U;
        case 't':
            return word.ends_with(kAbortWord) ? kAbort : 0U;
        case 'n':
            mark = word.ends_with(kReason) ? kFinish : 0U;
            break;
        case 's':
            mark = word.ends_with(kParamsField)                        ? kParams
                   : word.ends_with(kDetails) || word.ends_with(kRead) ? kCached
                                                                       : 0U;
            break;
        default:
            break;
    }
    if (mark == 0) return 0;
    const std::optional<std::string_view> value = value_of(events, quote);
    if (!value) return 0;
    if (mark == kFinish) {
        if (value->starts_with(kNull)) return 0;
        return kFinish | (value->starts_with(kErrorWord) ? kFailed : 0U);
    }
    return value->starts_with('{') || word.ends_with(kRead) ? mark : 0U;
}

// One of these.
template <char... kOnes>
struct Letters {
    static bool has(char one) { return ((one == kOnes) || ...); }
#ifdef __SSE2__
    __attribute__((target("avx2"))) static __m256i are_in(__m256i bytes) {
        return (_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(kOnes)) | ...);
    }
#endif
};

#ifdef __SSE2__
// As `each_quote`; returns where it stopped, less than 32 bytes before the end.
template <class Before, class Last, class See>
__attribute__((target("avx2"))) std::size_t quotes_by_32(std::string_view events, See& see) {
    std::size_t at = 2;
    for (; at + sizeof(__m256i) <= events.size(); at += sizeof(__m256i)) {
        const char* const here = events.data() + at;
        const __m256i quotes =
            _mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(here)), _mm256_set1_epi8('"'));
        const __m256i last = Last::are_in(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(here - 1)));
        const __m256i before = Before::are_in(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(here - 2)));
        for (auto found = static_cast<unsigned>(_mm256_movemask_epi8(quotes & last & before)); found != 0;
             found &= found - 1)
            see(at + static_cast<std::size_t>(std::countr_zero(found)));
    }
    return at;
}
#endif

// Calls `see` with each place of a quote before which two such letters stand: few words end so, and all are found in
// one pass.
template <class Before, class Last, class See>
void each_quote(std::string_view events, See see) {
    std::size_t at = 2;
#ifdef __SSE2__
    static const bool is_wide = __builtin_cpu_supports("avx2");
    if (is_wide) at = quotes_by_32<Before, Last>(events, see);
#endif
    for (; at < events.size(); ++at) {
        if (events[at] == '"' && Last::has(events[at - 1]) && Before::has(events[at - 2])) see(at);
    }
}

// A line of JSON has no line ends in it, so a name is at the beginning of a line.
bool has_name(std::string_view events) {
    for (std::size_t at, from = 0; (at = find(events.substr(from), kName)) != std::string_view::npos;) {
        at += from;
        from = at + kName.size();
        const std::string_view name = events.substr(from, events.find_first_of("\r\n", from) - from);
        if ((at == 0 || events[at - 1] == '\n') && std::ranges::find(kNames, name) != kNames.end()) return true;
    }
    return false;
}

}  // namespace

unsigned marks_of(std::string_view events, unsigned wanted) {
    unsigned found = wanted & kAnything;
    if ((wanted & kWords) != 0)
        each_quote<Letters<'o', 'r', 'l', 'n', 'm'>, Letters<'r', 't', 'n', 's'>>(
            events, [&](std::size_t quote) { found |= marks_of_word(events, quote) & wanted; });
    if ((wanted & kDone) != 0 && ends_with_done(events)) found |= kDone;
    if ((wanted & kNamed) != 0 && has_name(events)) found |= kNamed;
    return found;
}

std::optional<std::size_t> place_of_done(std::string_view events) {
    if (!ends_with_done(events)) return std::nullopt;
    return events.rfind('\n', events.rfind(kDoneMarker)) + 1;  // npos: 0
}

Usage usage_of(std::string_view bytes) {
    const std::size_t first = bytes.find_first_not_of(" \t\r\n");
    const bool is_whole = first != std::string_view::npos && bytes[first] == '{';
    std::vector<std::size_t> quotes;
    each_quote<Letters<'g', 'f'>, Letters<'e', 'o'>>(bytes, [&](std::size_t quote) {
        const std::string_view word = bytes.substr(0, quote);
        const std::size_t nbytes = word.ends_with(kUsage) ? kUsage.size() : word.ends_with(kMeta) ? kMeta.size() : 0;
        if (nbytes == 0 || (nbytes < word.size() && word[word.size() - nbytes - 1] == '\\')) return;
        if (const auto value = value_of(bytes, quote); value && value->starts_with('{')) quotes.push_back(quote);
    });
    std::size_t read = bytes.size();  // what begins here
    for (auto quote = quotes.rbegin(); quote != quotes.rend(); ++quote) {
        if (*quote >= read) continue;
        read = is_whole ? first : bytes.rfind('\n', *quote) + 1;  // npos: 0
        const std::string_view json = bytes.substr(read, is_whole ? bytes.npos : bytes.find('\n', *quote) - read);
        if (!is_whole && !json.starts_with(kData)) continue;
        std::optional<Usage> found;
        // Nearly always it is the object's own: that shows in what follows, and what is before it is not read.
        if (bytes.substr(0, *quote).ends_with(kUsage))
            found = usage_in(json.substr(*quote - kUsage.size() - 1 - read));
        if (!found) found = usage_in(json.substr(std::min(json.find('{'), json.size())));
        if (found) return *found;
    }
    return {};
}

}  // namespace pdlink::http
