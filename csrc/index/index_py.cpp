// Python's view of the index; `pdlink/_index.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <charconv>
#include <optional>
#include <stdexcept>
#include <vector>

#include "index/msgpack.h"
#include "index/prefixes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdlink::index {
namespace {

using Tokens = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> bytes_of(const nb::bytes& packed) {
    return {reinterpret_cast<const std::uint8_t*>(packed.c_str()), packed.size()};
}

// A bit of kMedia.
Key bit(unsigned medium) {
    if (medium >= kNumMedia) throw std::invalid_argument("medium: expected 0 to 3");
    return Key{1} << medium;
}

std::size_t stored(Prefixes& self, Holder holder, unsigned medium, const nb::bytes& ids,
                   const std::optional<nb::bytes>& parent, Key root, const nb::bytes& tokens) {
    const std::vector<Id> names = msgpack::ids(bytes_of(ids));
    const std::vector<std::uint32_t> words = msgpack::tokens(bytes_of(tokens));
    std::optional<Id> before;
    if (parent) before = msgpack::id(bytes_of(*parent));
    return self.stored(holder, bit(medium), names, before ? &*before : nullptr, root, words);
}

// The ids in "[1, 2, 3]" as little-endian words. Throws std::invalid_argument for other JSON.
nb::bytes words_of_json(const nb::bytes& json) {
    const char *at = json.c_str(), *const end = at + json.size();
    const auto refuse = [] { throw std::invalid_argument("JSON: expected a list of integers from 0 to 4294967295"); };
    const auto skip = [&] {
        while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) ++at;
    };
    std::vector<std::uint32_t> words;
    words.reserve(json.size() / 4);
    char before = '[';
    for (skip(); at < end && *at == before; before = ',') {
        ++at, skip();
        std::uint32_t word = 0;
        const auto [stop, error] = std::from_chars(at, end, word);
        if (error != std::errc{}) {
            if (before == '[' && at < end && *at == ']') break;
            refuse();
        }
        words.push_back(word);
        at = stop, skip();
    }
    if (at == end || *at++ != ']') refuse();
    skip();
    if (at != end) refuse();
    return nb::bytes(words.data(), words.size() * sizeof words[0]);
}

}  // namespace
}  // namespace pdlink::index

NB_MODULE(_index, m) {
    using namespace pdlink::index;
    m.def("words_of_json", &words_of_json, "json"_a);
    nb::class_<Prefixes>(m, "Prefixes")
        .def(nb::init<std::size_t, std::size_t>(), "block_tokens"_a, "max_blocks"_a)
        .def("stored", &stored, "holder"_a, "medium"_a, "ids"_a, "parent"_a.none(), "root"_a, "tokens"_a)
        .def(
            "removed",
            [](Prefixes& self, Holder holder, unsigned medium, const nb::bytes& ids) {
                self.removed(holder, bit(medium), msgpack::ids(bytes_of(ids)));
            },
            "holder"_a, "medium"_a, "ids"_a)
        .def("cleared", &Prefixes::cleared, "holder"_a)
        .def(
            "lookup",
            [](Prefixes& self, Key root, const Tokens& tokens) {
                return self.lookup(root, {tokens.data(), tokens.shape(0)});
            },
            "root"_a, "tokens"_a)
        .def_prop_ro("block_tokens", &Prefixes::block_tokens)
        .def_prop_ro("num_blocks", &Prefixes::num_blocks)
        .def_prop_ro("nbytes", &Prefixes::nbytes);
}
