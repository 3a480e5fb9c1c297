// The headers of an answer, for Python: kept as they came, and made texts when they are asked for. `pdlink/_http.pyi`
// is their manual.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "http/http_py.h"

namespace pdlink::http {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c; }

bool same(std::string_view one, std::string_view other) {
    return std::ranges::equal(one, other, [](char a, char b) { return lower(a) == lower(b); });
}

nb::str text_of(std::string_view bytes) {
    PyObject* const made =
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape");
    if (made == nullptr) throw nb::python_error();
    return nb::steal<nb::str>(made);
}

class Headers {
  public:
    explicit Headers(const std::vector<Field>& fields) {
        std::size_t nbytes = 0;
        for (const auto& [name, value] : fields) nbytes += name.size() + value.size();
        text_.reserve(nbytes);
        ends_.reserve(fields.size());
        for (const auto& [name, value] : fields) {
            text_.append(name).append(value);
            ends_.emplace_back(text_.size() - value.size(), text_.size());
        }
    }

    std::vector<Field> fields() const {
        std::vector<Field> found;
        const std::string_view text = text_;
        std::size_t at = 0;
        for (const auto& [name_end, end] : ends_) {
            found.push_back({text.substr(at, name_end - at), text.substr(name_end, end - name_end)});
            at = end;
        }
        return found;
    }

    // The first of a name, in any case.
    std::optional<std::string_view> find(std::string_view name) const {
        const std::string_view text = text_;
        std::size_t at = 0;
        for (const auto& [name_end, end] : ends_) {
            if (name_end - at == name.size() && same(text.substr(at, name.size()), name))
                return text.substr(name_end, end - name_end);
            at = end;
        }
        return std::nullopt;
    }

    std::string content_type() const {
        const std::string_view said = find("content-type").value_or("");
        std::string_view type = said.substr(0, said.find(';'));
        while (!type.empty() && (type.front() == ' ' || type.front() == '\t')) type.remove_prefix(1);
        while (!type.empty() && (type.back() == ' ' || type.back() == '\t')) type.remove_suffix(1);
        std::string found(type);
        std::ranges::transform(found, found.begin(), lower);
        return found;
    }

  private:
    std::string text_;                                       // names and values, without anything between them
    std::vector<std::pair<std::size_t, std::size_t>> ends_;  // of each name, and of its value
};

// A name that `text_of` made, or any other text.
std::optional<std::string_view> find(const Headers& self, const nb::str& name) {
    Py_ssize_t nbytes = 0;
    if (const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &nbytes))
        return self.find({text, static_cast<std::size_t>(nbytes)});
    PyErr_Clear();
    if (PyObject* const encoded = PyUnicode_AsEncodedString(name.ptr(), "utf-8", "surrogateescape"))
        return self.find(view(nb::steal<nb::bytes>(encoded)));
    PyErr_Clear();
    return std::nullopt;  // no bytes are decoded to such a text
}

nb::object get(const Headers& self, const nb::str& name, nb::object otherwise) {
    const auto found = find(self, name);
    return found ? text_of(*found) : otherwise;
}

nb::str item(const Headers& self, const nb::str& name) {
    if (const auto found = find(self, name)) return text_of(*found);
    PyErr_SetObject(PyExc_KeyError, name.ptr());
    throw nb::python_error();
}

// A name or a value of a header to send, as `text_of` would read it.
void append(std::string& lines, nb::handle text) {
    Py_ssize_t nbytes = 0;
    if (const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes)) {
        lines.append(utf8, static_cast<std::size_t>(nbytes));
        return;
    }
    PyErr_Clear();
    PyObject* const encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
    if (encoded == nullptr) throw nb::python_error();
    lines.append(view(nb::steal<nb::bytes>(encoded)));
}

nb::bytes header_lines(nb::handle headers) {
    std::string lines;
    for (const nb::handle item : headers.attr("items")()) {
        append(lines, item[0]);
        lines.append(": ");
        append(lines, item[1]);
        lines.append("\r\n");
    }
    return bytes_of(lines);
}

nb::list names(const Headers& self) {
    nb::dict found;
    for (const auto& [name, value] : self.fields()) found[text_of(name)] = true;
    return found.keys();
}

}  // namespace

nb::object headers_of(const AnswerHead& head) { return nb::cast(Headers(head.fields)); }

void add_headers(nb::module_& m) {
    m.def("header_lines", &header_lines, "headers"_a);
    nb::class_<Headers>(m, "Headers")
        .def(
            "__init__",
            [](Headers* self, const nb::list& pairs) {
                std::vector<Field> fields;
                for (const nb::handle pair : pairs)
                    fields.push_back(
                        {view(nb::cast<nb::bytes>(pair[nb::int_(0)])), view(nb::cast<nb::bytes>(pair[nb::int_(1)]))});
                new (self) Headers(fields);
            },
            "pairs"_a)
        .def("get", &get, "name"_a, "default"_a = nb::none())
        .def("__getitem__", &item)
        .def("__contains__", [](const Headers& self, const nb::str& name) { return find(self, name).has_value(); })
        .def("__iter__", [](const Headers& self) { return nb::iter(names(self)); })
        .def("__len__", [](const Headers& self) { return nb::len(names(self)); })
        .def("keys", &names)
        .def_prop_ro("content_type", [](const Headers& self) { return text_of(self.content_type()); });
}

}  // namespace pdlink::http
