// Python's view of plain heads; `pdlink/_http.pyi` is its manual.
#include "http/http_py.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/native_py.h"
#include "http/events.h"
#include "http/heads.h"
#include "http/json.h"
#include "http/large_pages.h"
#include "http/packed.h"
#include "http/stream_begin.h"

namespace pdlink::http {

// None if a name comes twice.
static nb::object by_name(const std::vector<Field>& fields) {
    nb::dict found;
    for (const auto& [name, value] : fields) {
        std::string lower(name);
        for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
        found[nb::str(lower.data(), lower.size())] = nb::str(value.data(), value.size());
    }
    if (found.size() != fields.size()) return nb::none();
    return found;
}

nb::object request_of(std::string_view lines) {
    const auto found = plain_request(lines);
    if (!found) return nb::none();
    nb::object fields = by_name(found->fields);
    return fields.is_none() ? fields : nb::make_tuple(fields, found->nbytes, found->keep);
}

namespace {

nb::str timing_of(double queue_s, double placement_s, std::optional<double> prefill_s,
                  std::optional<double> transfer_s, std::optional<double> decode_s, const nb::str& last,
                  double until_now_s) {
    const std::string text =
        server_timing({queue_s, placement_s, prefill_s, transfer_s, decode_s}, last.c_str(), until_now_s);
    return nb::str(text.data(), text.size());
}

nb::bytes take(Packed& self) { return bytes_of(self.take()); }

nb::object shorter(const nb::bytes& json, std::size_t long_nbytes) {
    const auto found = shortened(view(json), long_nbytes);
    if (!found) return nb::none();
    nb::dict longs;
    for (const auto& [name, value] : found->longs) longs[nb::str(name.data(), name.size())] = bytes_of(value);
    return nb::make_tuple(bytes_of(found->json), found->num_fields, longs);
}

nb::object first_event(const nb::bytes& events) {
    const auto found = first_data_event(view(events));
    if (!found) return nb::none();
    return nb::make_tuple(found->begin, found->end, found->is_token);
}

unsigned marks(const nb::bytes& events, unsigned wanted) { return marks_of(view(events), wanted); }

}  // namespace
}  // namespace pdlink::http

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_http, m) {
    pdlink::translate_system_errors();
    pdlink::http::add_headers(m);
    pdlink::http::add_exchange(m);
    pdlink::http::add_requests(m);
    pdlink::http::add_exchanges(m);
    pdlink::http::add_buckets(m);
    m.attr("ERROR") = static_cast<unsigned>(pdlink::http::kError);
    m.attr("FINISH") = static_cast<unsigned>(pdlink::http::kFinish);
    m.attr("CACHED") = static_cast<unsigned>(pdlink::http::kCached);
    m.attr("DONE") = static_cast<unsigned>(pdlink::http::kDone);
    m.attr("PARAMS") = static_cast<unsigned>(pdlink::http::kParams);
    m.attr("NAMED") = static_cast<unsigned>(pdlink::http::kNamed);
    m.attr("ABORT") = static_cast<unsigned>(pdlink::http::kAbort);
    m.attr("ANYTHING") = static_cast<unsigned>(pdlink::http::kAnything);
    m.attr("FAILED") = static_cast<unsigned>(pdlink::http::kFailed);
    m.attr("END") = static_cast<unsigned>(pdlink::http::kEnd);
    m.attr("BAD") = static_cast<unsigned>(pdlink::http::kBad);
    m.attr("MORE") = static_cast<unsigned>(pdlink::http::kMore);
    m.def(
        "names_media", [](const nb::bytes& json) { return pdlink::http::names_media(pdlink::http::view(json)); },
        "json"_a);
    m.def(
        "is_answer", [](const nb::bytes& json) { return pdlink::http::is_answer(pdlink::http::view(json)); },
        "json"_a);
    m.def("shortened", &pdlink::http::shorter, "json"_a, "long_nbytes"_a);
    nb::class_<pdlink::http::Packed>(m, "Packed")
        .def(nb::init<>())
        .def(
            "add", [](pdlink::http::Packed& self, const nb::bytes& data) { self.add(pdlink::http::view(data)); },
            "data"_a)
        .def("take", &pdlink::http::take)
        .def_prop_ro("nbytes", &pdlink::http::Packed::nbytes);
    m.def(
        "num_events", [](const nb::bytes& data) { return pdlink::http::num_events(pdlink::http::view(data)); },
        "data"_a);
    m.def(
        "usage_of",
        [](const nb::bytes& data) {
            const pdlink::http::Usage found = pdlink::http::usage_of(pdlink::http::view(data));
            return nb::make_tuple(found.prompt_tokens, found.completion_tokens);
        },
        "data"_a);
    m.def("take_arenas_from_large_pages", &pdlink::http::take_arenas_from_large_pages);
    m.def("move_heap_to_large_pages", &pdlink::http::move_heap_to_large_pages);
    m.def("first_data_event", &pdlink::http::first_event, "events"_a);
    m.def(
        "place_of_done",
        [](const nb::bytes& events) { return pdlink::http::place_of_done(pdlink::http::view(events)); }, "events"_a);
    m.def("marks_of", &pdlink::http::marks, "events"_a, "wanted"_a);
    m.def("server_timing", &pdlink::http::timing_of, "queue_s"_a, "placement_s"_a, "prefill_s"_a.none(),
          "transfer_s"_a.none(), "decode_s"_a.none(), "last"_a, "until_now_s"_a);
}
