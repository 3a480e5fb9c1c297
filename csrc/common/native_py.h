// How lists come from Python, and reports and errors get there: the same for every engine with an Outbox.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "common/engine.h"
#include "common/outbox.h"
#include "common/runs.h"

namespace pdlink {

namespace nb = nanobind;

using PyRuns = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using PyRunList = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, PyRuns>;

// As long as `lists` are there.
inline std::vector<RunList> views_of(const std::vector<PyRunList>& lists) {
    std::vector<RunList> views;
    views.reserve(lists.size());
    for (const auto& [src_region, src_base, dst_region, dst_base, runs] : lists)
        views.push_back({src_region, src_base, dst_region, dst_base, runs.data(), runs.shape(0)});
    return views;
}

// From now on std::system_error becomes OSError.
inline void translate_system_errors() {
    nb::register_exception_translator(
        [](const std::exception_ptr& error, void*) {
            try {
                std::rethrow_exception(error);
            } catch (const std::system_error& failure) {
                const nb::object args = nb::make_tuple(failure.code().value(), failure.what());
                PyErr_SetObject(PyExc_OSError, args.ptr());
            }
        },
        nullptr);
}

// The exceptions of an engine, each with types of its own: nanobind's modules share one table of them, and one type
// would come out as the exception of the module that was imported last.
template <class Engine>
void add_errors(nb::module_& m) {
    nb::exception<Unusable<Engine>>(m, "PeerUnusable", PyExc_RuntimeError);
    nb::exception<Taken<Engine>>(m, "NameTaken", PyExc_ValueError);
    translate_system_errors();
}

// What all engines have (`pdlink/_copy.pyi` is its manual).
template <class Engine>
nb::class_<Engine> add_engine(nb::module_& m, const char* name) {
    using namespace nb::literals;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::set_leak_warnings(
        false);  // of a process that ends with its node open: a daemon thread still holds the engine
    add_errors<Engine>(m);
    return nb::class_<Engine>(m, name)
        .def(
            "submit",
            [](Engine& engine, const std::string& peer, const std::vector<PyRunList>& lists, double timeout_s) {
                const std::vector<RunList> views = views_of(lists);
                const nb::gil_scoped_release release;
                return engine.submit(peer, views, timeout_s);
            },
            "peer"_a, "lists"_a.noconvert(), "timeout_s"_a)
        .def(
            "connected", [](Engine& engine, const std::string& peer) { return engine.connected(peer); }, "peer"_a,
            Unlocked())
        .def("poll",
             [](Engine& engine) {
                 nb::list out;
                 for (const Report& report : engine.poll())
                     out.append(nb::make_tuple(kKindNames[static_cast<int>(report.kind)], report.peer, report.ticket,
                                               kOutcomeNames[static_cast<int>(report.outcome)], report.nbytes,
                                               report.submitted_s, report.done_s, report.detail));
                 return out;
             })
        .def("fileno", [](Engine& engine) { return engine.fd(); })
        .def(
            "close_peer", [](Engine& engine, const std::string& peer) { engine.close_peer(peer); }, "peer"_a,
            Unlocked());
}

}  // namespace pdlink
