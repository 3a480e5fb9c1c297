// Python's view of plain heads; `pdlink/_http.pyi` is its manual.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "http/heads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::http {
namespace {

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::object fields_of(const nb::bytes& data, std::size_t start, std::size_t end) {
    const std::string_view all = view(data);
    if (start > end || end > all.size()) throw std::out_of_range("start, end: limit the bytes that are there");
    const auto found = fields(all.substr(start, end - start));
    if (!found) return nb::none();
    nb::dict by_name;
    for (const auto& [name, value] : *found) {
        std::string lower(name);
        for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
        by_name[nb::str(lower.data(), lower.size())] = nb::str(value.data(), value.size());
    }
    if (by_name.size() != found->size()) return nb::none();
    return by_name;
}

nb::object answer_of(const nb::bytes& data) {
    const auto found = whole_answer(view(data));
    if (!found) return nb::none();
    nb::list pairs;
    for (const auto& [name, value] : found->fields) pairs.append(nb::make_tuple(bytes_of(name), bytes_of(value)));
    return nb::make_tuple(found->status, pairs, bytes_of(found->body));
}

}  // namespace
}  // namespace pdlink::http

NB_MODULE(_http, m) {
    m.def("fields", &pdlink::http::fields_of, "data"_a, "start"_a, "end"_a);
    m.def("whole_answer", &pdlink::http::answer_of, "data"_a);
}
