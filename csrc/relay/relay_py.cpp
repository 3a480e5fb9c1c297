// Python's view of the relay; `pdlink/_relay.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <string>
#include <string_view>
#include <utility>

#include "relay/relay.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::relay {
namespace {

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

nb::tuple told(const Report& report) {
    return nb::make_tuple(report.key, bytes_of(report.passed), report.over, bytes_of(report.unsent),
                          bytes_of(report.unread));
}

nb::list reports(Relay& self) {
    nb::list found;
    for (const Report& report : self.reports()) found.append(told(report));
    return found;
}

std::pair<Key, nb::bytes> lend(Relay& self, int worker, int client, const nb::bytes& first, unsigned marks) {
    std::string unsent;
    const Key key = self.lend(worker, client, {first.c_str(), first.size()}, marks, unsent);
    return {key, bytes_of(unsent)};
}

}  // namespace
}  // namespace pdlink::relay

NB_MODULE(_relay, m) {
    using namespace pdlink::relay;
    nb::class_<Relay>(m, "Relay")
        .def(nb::init<>())
        .def_prop_ro("fd", &Relay::fd)
        .def("lend", &lend, "worker"_a, "client"_a, "first"_a, "marks"_a)
        .def("reports", &reports)
        .def(
            "take", [](Relay& self, Key key) { return told(self.take(key)); }, "key"_a)
        .def("heard_s", &Relay::heard_s, "key"_a)
        .def("__len__", &Relay::num_lent);
}
