// Requests to workers, for Python: each is sent at once where a connection is free. Who has to wait, and how
// connections are made and dropped, its subclass says (`HttpClient`). `pdlink/_http.pyi` is its manual.
#include <cstddef>
#include <utility>

#include "common/native.h"
#include "http/http_py.h"

namespace pdlink::http {
namespace {

class Exchanges {
  public:
    explicit Exchanges(std::size_t limit)
        : limit(limit), waiting(nb::module_::import_("collections").attr("deque")()) {}

    nb::object send(nb::handle method, nb::handle url, nb::handle listener, nb::handle body, nb::handle lines);
    nb::object newest(nb::handle host);
    void freed(nb::handle connection);
    void keep(nb::handle connection);
    bool is_full() const { return limit != 0 && running.size() >= limit; }

    std::size_t limit;
    nb::dict known;
    nb::set running, resting;
    nb::object waiting;

    // Of the collector.
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const Exchanges* const one = nb::inst_ptr<Exchanges>(self);
        Py_VISIT(one->known.ptr());
        Py_VISIT(one->running.ptr());
        Py_VISIT(one->resting.ptr());
        Py_VISIT(one->waiting.ptr());
        return 0;
    }
    static int clear(PyObject* self) {
        if (!nb::inst_ready(self)) return 0;
        Exchanges* const one = nb::inst_ptr<Exchanges>(self);
        one->known.clear();
        one->running.clear();
        one->resting.clear();
        one->waiting.attr("clear")();
        return 0;
    }

  private:
    nb::object self() { return nb::find(this); }
};

nb::object Exchanges::send(nb::handle method, nb::handle url, nb::handle listener, nb::handle body,
                           nb::handle lines) {
    const nb::object mine = self();
    const nb::tuple name = nb::make_tuple(method, url);
    nb::object found = nb::borrow(PyDict_GetItemWithError(known.ptr(), name.ptr()));
    if (!found.is_valid()) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        found = mine.attr("split")(method, url);
    }
    const nb::object connection = is_full() ? nb::none() : newest(found[0]);
    if (connection.is_none()) return mine.attr("start")(method, url, listener, body, lines);
    running.add(connection);
    try {
        connection.attr("ask")(found[1], lines, body, listener, mine);
    } catch (...) {
        running.discard(connection);
        connection.attr("leave")();
        throw;
    }
    return connection;
}

nb::object Exchanges::newest(nb::handle host) {
    const auto idle = nb::cast<nb::list>(host.attr("idle"));
    while (idle.size() != 0) {
        const nb::object connection = idle[idle.size() - 1];  // the others may end
        nb::del(idle[idle.size() - 1]);
        if (!nb::cast<bool>(connection.attr("keeps"))) continue;
        connection.attr("reused") = true;
        return connection;
    }
    return nb::none();
}

void Exchanges::freed(nb::handle connection) {
    running.discard(connection);
    try {
        keep(connection);
    } catch (...) {
        self().attr("next")();
        throw;
    }
    if (nb::len(waiting) != 0) self().attr("next")();
}

void Exchanges::keep(nb::handle connection) {
    if (!nb::cast<bool>(connection.attr("keeps"))) {
        connection.attr("abort")();
        return;
    }
    const nb::object host = connection.attr("host");
    connection.attr("idle_since_s") = now_s();
    nb::cast<nb::list>(host.attr("idle")).append(connection);
    if (!resting.contains(host)) self().attr("rest")(host);
}

}  // namespace

void add_exchanges(nb::module_& m) {
    PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Exchanges::traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(&Exchanges::clear)},
                           {0, nullptr}};
    nb::class_<Exchanges>(m, "Exchanges", nb::type_slots(slots))
        .def(nb::init<std::size_t>(), "limit"_a)
        .def("send", &Exchanges::send, "method"_a, "url"_a, "listener"_a, "body"_a = nb::bytes("", 0),
             "lines"_a = nb::bytes("", 0))
        .def("newest", &Exchanges::newest, "host"_a)
        .def("freed", &Exchanges::freed, "connection"_a)
        .def("keep", &Exchanges::keep, "connection"_a)
        .def_prop_ro("is_full", &Exchanges::is_full)
        .def_ro("known", &Exchanges::known)
        .def_ro("running", &Exchanges::running)
        .def_ro("resting", &Exchanges::resting)
        .def_ro("waiting", &Exchanges::waiting);
}

}  // namespace pdlink::http
