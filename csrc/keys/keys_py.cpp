// Python's view of the hash; `pdlink/_keys.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "keys/blake3.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink {
namespace {

using Words = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Of what PySequence_Fast gives, a list or a tuple; borrowed. The macros save a third of the time, and are not in the
// stable ABI.
#ifdef Py_LIMITED_API
Py_ssize_t size_of(PyObject* items) { return PySequence_Size(items); }

PyObject* item_at(PyObject* items, Py_ssize_t i) {
    return PyList_Check(items) ? PyList_GetItem(items, i) : PyTuple_GetItem(items, i);
}
#else
Py_ssize_t size_of(PyObject* items) { return PySequence_Fast_GET_SIZE(items); }

PyObject* item_at(PyObject* items, Py_ssize_t i) { return PySequence_Fast_GET_ITEM(items, i); }
#endif

// Token ids of any sequence of integers. Throws nb::python_error (OverflowError, TypeError).
std::vector<std::uint32_t> words_of(nb::handle tokens) {
    const nb::object items = nb::steal(PySequence_Fast(tokens.ptr(), "tokens must be a sequence of integers"));
    if (!items.is_valid()) throw nb::python_error();
    std::vector<std::uint32_t> words;
    words.reserve(static_cast<std::size_t>(size_of(items.ptr())));
    // The size is asked for each time: __index__ of a foreign integer may change the list.
    for (Py_ssize_t i = 0; i < size_of(items.ptr()); ++i) {
        PyObject* item = item_at(items.ptr(), i);
        nb::object index;
        if (!PyLong_Check(item)) {
            index = nb::steal(PyNumber_Index(item));
            if (!index.is_valid()) throw nb::python_error();
            item = index.ptr();
        }
        const unsigned long word = PyLong_AsUnsignedLong(item);
        if (word > UINT32_MAX) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_OverflowError, "token: got %lu; limit 4294967295", word);
            throw nb::python_error();
        }
        words.push_back(static_cast<std::uint32_t>(word));
    }
    return words;
}

std::vector<std::string> kind_names() {
    std::vector<std::string> names;
    for (const blake3::Kind& kind : blake3::kinds()) names.emplace_back(kind.name);
    return names;
}

const blake3::Kind& kind_named(const std::string& name) {
    for (const blake3::Kind& kind : blake3::kinds())
        if (name.empty() || name == kind.name) return kind;
    throw std::invalid_argument("this CPU cannot hash with " + name);
}

nb::bytes chain(const nb::bytes& root, nb::handle tokens, std::int64_t chunk_tokens, const std::string& name) {
    const blake3::Kind& kind = kind_named(name);
    if (root.size() != blake3::kDigestNbytes) throw std::invalid_argument("root must have 32 bytes");
    if (chunk_tokens < 1) throw std::invalid_argument("chunk_tokens must be at least 1");
    Words array;
    std::vector<std::uint32_t> copied;
    const std::uint32_t* words;
    std::size_t num_words;
    if (nb::try_cast(tokens, array, false)) {
        words = array.data(), num_words = array.shape(0);
    } else {
        copied = words_of(tokens);
        words = copied.data(), num_words = copied.size();
    }
    const std::size_t step = static_cast<std::size_t>(chunk_tokens), num_keys = num_words / step;
    nb::bytes keys(nullptr, num_keys * blake3::kDigestNbytes);
    char* out = PyBytes_AsString(keys.ptr());
    blake3::Digest key;
    std::memcpy(key.data(), root.c_str(), sizeof key);
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < num_keys; ++i, words += step, out += sizeof key) {
        key = blake3::keyed(kind, key, words, step * sizeof *words);
        std::memcpy(out, key.data(), sizeof key);
    }
    return keys;
}

nb::bytes derive(const nb::str& context, const nb::bytes& material) {
    const blake3::Digest key = blake3::derive(context.c_str(), {material.c_str(), material.size()});
    return nb::bytes(key.data(), sizeof key);
}

}  // namespace
}  // namespace pdlink

NB_MODULE(_keys, m) {
    m.def("chain", &pdlink::chain, "root"_a, "tokens"_a, "chunk_tokens"_a, "kind"_a = "");
    m.def("kinds", &pdlink::kind_names);
    m.def("derive", &pdlink::derive, "context"_a, "material"_a);
}
