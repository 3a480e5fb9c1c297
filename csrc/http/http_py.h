// What Python's views of HTTP have in common.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>

#include "http/answers.h"

namespace pdlink::http {

namespace nb = nanobind;
using namespace nb::literals;

inline std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

inline nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// As `Headers` of Python.
nb::object headers_of(const AnswerHead& head);

// The fields by name in lower case, the bytes of the body and whether the connection stays, of a plain request; else
// None.
nb::object request_of(std::string_view lines);

// Headers of answers (headers_py.cpp), a loop's sockets and connections to workers (exchange_py.cpp), connections of
// clients (requests_py.cpp), requests to workers (exchanges_py.cpp), and what is counted of them (buckets_py.cpp).
void add_headers(nb::module_& m);
void add_exchange(nb::module_& m);
void add_requests(nb::module_& m);
void add_exchanges(nb::module_& m);
void add_buckets(nb::module_& m);

}  // namespace pdlink::http
