// Python's view of plain heads; `pdlink/_http.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "http/events.h"
#include "http/heads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::http {
namespace {

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string_view part(const nb::bytes& data, std::size_t start, std::size_t end) {
    const std::string_view all = view(data);
    if (start > end || end > all.size()) throw std::out_of_range("start, end: limit the bytes that are there");
    return all.substr(start, end - start);
}

// None if a name comes twice.
nb::object by_name(const std::vector<Field>& fields) {
    nb::dict found;
    for (const auto& [name, value] : fields) {
        std::string lower(name);
        for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
        found[nb::str(lower.data(), lower.size())] = nb::str(value.data(), value.size());
    }
    if (found.size() != fields.size()) return nb::none();
    return found;
}

nb::object request_of(const nb::bytes& data, std::size_t start, std::size_t end) {
    const auto found = plain_request(part(data, start, end));
    if (!found) return nb::none();
    nb::object fields = by_name(found->fields);
    return fields.is_none() ? fields : nb::make_tuple(fields, found->nbytes, found->keep);
}

nb::str timing_of(double queue_s, double placement_s, std::optional<double> prefill_s,
                  std::optional<double> transfer_s, std::optional<double> decode_s, const nb::str& last,
                  double until_now_s) {
    const std::string text =
        server_timing({queue_s, placement_s, prefill_s, transfer_s, decode_s}, last.c_str(), until_now_s);
    return nb::str(text.data(), text.size());
}

nb::object answer_of(const nb::bytes& data) {
    const auto found = whole_answer(view(data));
    if (!found) return nb::none();
    nb::list pairs;
    for (const auto& [name, value] : found->fields) pairs.append(nb::make_tuple(bytes_of(name), bytes_of(value)));
    return nb::make_tuple(found->status, pairs, bytes_of(found->body), found->is_json);
}

unsigned marks(const nb::bytes& events) { return marks_of(view(events)); }

}  // namespace
}  // namespace pdlink::http

NB_MODULE(_http, m) {
    m.attr("ERROR") = static_cast<unsigned>(pdlink::http::kError);
    m.attr("FINISH") = static_cast<unsigned>(pdlink::http::kFinish);
    m.attr("CACHED") = static_cast<unsigned>(pdlink::http::kCached);
    m.attr("DONE") = static_cast<unsigned>(pdlink::http::kDone);
    m.def("marks_of", &pdlink::http::marks, "events"_a);
    m.def("plain_request", &pdlink::http::request_of, "data"_a, "start"_a, "end"_a);
    m.def("server_timing", &pdlink::http::timing_of, "queue_s"_a, "placement_s"_a, "prefill_s"_a.none(),
          "transfer_s"_a.none(), "decode_s"_a.none(), "last"_a, "until_now_s"_a);
    m.def("whole_answer", &pdlink::http::answer_of, "data"_a);
}
