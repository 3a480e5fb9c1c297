#include "http/heads.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <utility>

namespace pdlink::http {
namespace {

constexpr std::string_view kLineEnd = "\r\n", kHeadEnd = "\r\n\r\n", kBegin = "HTTP/1.1 ";
constexpr std::size_t kMaxHeadNbytes = 16 * 1024;
constexpr std::size_t kMaxDigits = 12;  // of a length

constexpr bool is_alnum(unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

constexpr std::array<bool, 256> kToken = [] {  // RFC 9110 5.6.2
    std::array<bool, 256> found{};
    for (std::size_t c = 0; c < 256; ++c) {
        found[c] =
            is_alnum(static_cast<unsigned char>(c)) ||
            (c != 0 && std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string_view::npos);
    }
    return found;
}();

bool is_printable(std::string_view text) {
    for (const char c : text) {
        if ((c < ' ' && c != '\t') || c > '~') return false;
    }
    return true;
}

bool same(std::string_view one, std::string_view lower) {
    if (one.size() != lower.size()) return false;
    for (std::size_t i = 0; i < one.size(); ++i) {
        const char c = one[i] >= 'A' && one[i] <= 'Z' ? static_cast<char>(one[i] | 0x20) : one[i];
        if (c != lower[i]) return false;
    }
    return true;
}

bool is_unusual(std::string_view name) {
    switch (name.size()) {
        case 2:
            return same(name, "te");
        case 6:
            return same(name, "expect");
        case 7:
            return same(name, "upgrade") || same(name, "trailer");
        case 16:
            return same(name, "content-encoding");
        case 17:
            return same(name, "transfer-encoding");
        default:
            return false;
    }
}

// False for anything but digits.
bool read_length(std::string_view text, std::uint64_t& nbytes) {
    if (text.size() > kMaxDigits) return false;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), nbytes);
    return error == std::errc{} && stop == text.data() + text.size();
}

void add(std::string& text, std::string_view name, double seconds, int digits) {
    std::array<char, 64> number;
    const auto [end, error] =
        std::to_chars(number.data(), number.data() + number.size(), seconds * 1000, std::chars_format::fixed, digits);
    text.append(text.empty() ? "" : ", ").append(name).append(";dur=");
    text.append(number.data(), error == std::errc{} ? static_cast<std::size_t>(end - number.data()) : 0);
}

}  // namespace

std::optional<std::vector<Field>> fields(std::string_view lines) {
    std::vector<Field> found;
    found.reserve(16);
    while (!lines.starts_with(kLineEnd)) {
        std::size_t colon = 0;
        while (colon < lines.size() && kToken[static_cast<unsigned char>(lines[colon])]) ++colon;
        if (colon == 0 || colon == lines.size() || lines[colon] != ':') return std::nullopt;
        const std::size_t end = lines.find(kLineEnd, colon);
        if (end == std::string_view::npos) return std::nullopt;
        std::string_view value = lines.substr(colon + 1, end - colon - 1);
        if (!is_printable(value)) return std::nullopt;
        const std::size_t first = value.find_first_not_of(" \t");
        value = first == std::string_view::npos ? std::string_view{}
                                                : value.substr(first, value.find_last_not_of(" \t") - first + 1);
        found.push_back({lines.substr(0, colon), value});
        lines.remove_prefix(end + kLineEnd.size());
    }
    if (lines.size() != kLineEnd.size()) return std::nullopt;
    return found;
}

std::optional<Request> plain_request(std::string_view lines) {
    if (lines.size() > kMaxHeadNbytes) return std::nullopt;
    std::optional<std::vector<Field>> found = fields(lines);
    if (!found) return std::nullopt;
    bool has_host = false, has_length = false, keep = true;
    std::uint64_t nbytes = 0;
    for (const auto& [name, value] : *found) {
        if (is_unusual(name)) return std::nullopt;
        if (same(name, "host")) {
            has_host = true;
        } else if (same(name, "content-length")) {
            if (!read_length(value, nbytes)) return std::nullopt;
            has_length = true;
        } else if (same(name, "connection")) {
            keep = same(value, "keep-alive");
            if (!keep && !same(value, "close")) return std::nullopt;
        }
    }
    if (!has_host || !has_length) return std::nullopt;
    return Request{std::move(*found), nbytes, keep};
}

std::string server_timing(const Stages& stages, std::string_view last, double until_now_s) {
    std::string text;
    text.reserve(160);
    add(text, "queue", stages.queue_s, 1);
    add(text, "placement", stages.placement_s, 3);
    if (stages.prefill_s) add(text, "prefill", *stages.prefill_s, 1);
    if (stages.transfer_s) add(text, "transfer", *stages.transfer_s, 1);
    if (stages.decode_s) add(text, "decode", *stages.decode_s, 1);
    add(text, last, until_now_s, 1);
    return text;
}

std::optional<PlainHead> plain_head(std::string_view bytes) {
    if (!bytes.starts_with(kBegin)) return std::nullopt;
    const std::size_t line = bytes.find(kLineEnd);
    const std::size_t end = bytes.substr(0, kMaxHeadNbytes).find(kHeadEnd);
    if (end == std::string_view::npos || line < kBegin.size() + 4) return std::nullopt;
    int status = 0;
    const std::string_view said = bytes.substr(kBegin.size(), line - kBegin.size());
    const auto [stop, error] = std::from_chars(said.data(), said.data() + 3, status);
    if (error != std::errc{} || stop != said.data() + 3 || said[3] != ' ' || !is_printable(said)) return std::nullopt;
    if (status < 200 || status > 599 || status == 204 || status == 304) return std::nullopt;  // or it has no body
    const std::size_t begin = line + kLineEnd.size();
    std::optional<std::vector<Field>> found = fields(bytes.substr(begin, end + kHeadEnd.size() - begin));
    if (!found) return std::nullopt;
    PlainHead head{status, {}, end + kHeadEnd.size(), std::nullopt};
    bool chunked = false;
    for (const auto& [name, value] : *found) {
        switch (name.size()) {  // that of one of these names
            case 14:
                if (same(name, "content-length")) {
                    std::uint64_t nbytes = 0;
                    if (head.nbytes || !read_length(value, nbytes)) return std::nullopt;
                    head.nbytes = nbytes;
                }
                break;
            case 10:
                if (same(name, "connection") && !same(value, "keep-alive")) return std::nullopt;
                break;
            case 17:
                if (same(name, "transfer-encoding")) {
                    if (chunked || !same(value, "chunked")) return std::nullopt;
                    chunked = true;
                }
                break;
            case 7:
                if (same(name, "upgrade")) return std::nullopt;
                break;
            default:
                break;
        }
    }
    if (chunked == head.nbytes.has_value()) return std::nullopt;  // neither, or both
    head.fields = std::move(*found);
    return head;
}

}  // namespace pdlink::http
