// Python's view of the index; `pdlink/_index.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "index/columns.h"
#include "index/guesses.h"
#include "index/held.h"
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

constexpr std::size_t kLongNbytes = 1 << 18;  // reading so much takes longer than to give up the lock and get it back

std::vector<Key> names(Key seed, const nb::bytes& data, std::size_t piece_nbytes) {
    if (piece_nbytes == 0 || piece_nbytes % 4) throw std::invalid_argument("piece_nbytes: expected a multiple of 4");
    const std::span<const std::uint8_t> all = bytes_of(data);
    if (all.size() < kLongNbytes) return keys_of(seed, all, piece_nbytes);
    const nb::gil_scoped_release others_run;
    return keys_of(seed, all, piece_nbytes);
}

using Column = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const Holder, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByWorker = std::optional<nb::dict>;

// A prompt: its keys, how many tokens each stands for, how many it has, and what workers say that they hold of it.
struct Asked {
    const std::vector<Key>& keys;
    double key_tokens, num_tokens;
    const Held* held;
};

// The arrays are the caller's, of equal length: they are read anew with each call.
class PyColumns {
  public:
    PyColumns(Column load, Column slowness, Column taken, Numbers numbers, nb::dict rows)
        : load_(std::move(load)),
          slowness_(std::move(slowness)),
          taken_(std::move(taken)),
          numbers_(std::move(numbers)),
          rows_(std::move(rows)),
          cached_(load_.shape(0)),
          loading_(load_.shape(0)),
          costs_(load_.shape(0)) {
        const std::size_t num = load_.shape(0);
        if (slowness_.shape(0) != num || taken_.shape(0) != num || numbers_.shape(0) != num)
            throw std::invalid_argument("columns: expected equal lengths");
    }

    std::size_t least(const std::optional<Mask>& fit, std::size_t turn) const {
        return index::least(of(load_), fitting(fit), turn);
    }
    Scored lowest(const std::optional<Mask>& fit, std::size_t most) const {
        return index::lowest(of(load_), fitting(fit), most);
    }
    std::vector<double> held(const Held& held) {
        std::ranges::fill(cached_, 0.0);
        add(held);
        return cached_;
    }
    std::vector<double> cached(Guesses& guesses, const std::vector<Key>& keys, double key_tokens, double num_tokens,
                               const Held* held) {
        look({keys, key_tokens, num_tokens, held}, guesses);
        return cached_;
    }
    std::tuple<std::size_t, std::size_t, Scored> cheapest(Guesses& guesses, const std::vector<Key>& keys,
                                                          double key_tokens, double num_tokens, const Held* held,
                                                          const ByWorker& behind, double unit,
                                                          const std::optional<Mask>& fit, std::size_t turn,
                                                          std::size_t num_scores) {
        look({keys, key_tokens, num_tokens, held}, guesses);
        const Columns columns{of(load_), of(slowness_), of(taken_)};
        for (std::size_t row = 0; row < costs_.size(); ++row)
            costs_[row] = (columns.load[row] + num_tokens - cached_[row]) * columns.slowness[row] + loading_[row];
        if (behind)
            for (const auto [key, extra] : *behind)
                if (PyObject* const row = PyDict_GetItemWithError(rows_.ptr(), key.ptr()))
                    costs_[nb::cast<std::size_t>(nb::handle(row))] += nb::cast<double>(extra) * num_tokens;
        const std::size_t row = index::cheapest(columns, costs_, cached_, num_tokens, unit, fitting(fit), turn);
        Scored scores;
        if (num_scores) scores = index::lowest(costs_, fitting(fit), num_scores);
        return {row, static_cast<std::size_t>(cached_[row]), std::move(scores)};
    }

  private:
    static std::span<const double> of(const Column& column) { return {column.data(), column.shape(0)}; }
    Fit fitting(const std::optional<Mask>& fit) const {
        if (!fit) return {};
        if (fit->shape(0) != load_.shape(0)) throw std::invalid_argument("fit: expected a mark for each row");
        return {fit->data(), fit->shape(0)};
    }
    // `cached_`: tokens of the prompt that each row may hold, by what it says or else by what it was sent;
    // `loading_`: what it costs to use them, by what it says.
    void look(const Asked& asked, Guesses& guesses) {
        guesses.leading(asked.keys, {numbers_.data(), numbers_.shape(0)}, cached_);
        for (double& tokens : cached_) tokens = std::min(tokens * asked.key_tokens, asked.num_tokens);
        std::ranges::fill(loading_, 0.0);
        if (asked.held) add(*asked.held);
    }
    void add(const Held& held) {
        if (held.shares.empty()) return;
        share_of_.resize(std::max<std::size_t>(share_of_.size(), held.shares.back().worker + 1));
        for (std::size_t at = 0; at < held.shares.size(); ++at) share_of_[held.shares[at].worker] = at + 1;
        for (std::size_t row = 0; row < cached_.size(); ++row) {
            const Holder worker = numbers_.data()[row];
            if (worker >= share_of_.size() || !share_of_[worker]) continue;
            const Share& share = held.shares[share_of_[worker] - 1];
            cached_[row] = std::max(cached_[row], share.tokens);
            loading_[row] = share.loading;
        }
        for (const Share& share : held.shares) share_of_[share.worker] = 0;
    }

    Column load_, slowness_, taken_;
    Numbers numbers_;
    nb::dict rows_;
    std::vector<double> cached_, loading_, costs_;
    std::vector<std::size_t> share_of_;  // by number of a worker, in `add`: place of its share, from 1
};

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
    m.def("keys_of", &names, "seed"_a, "data"_a, "piece_nbytes"_a);
    nb::class_<Guesses>(m, "Guesses")
        .def(nb::init<std::size_t>(), "max_keys"_a)
        .def(
            "note",
            [](Guesses& self, Holder worker, const std::vector<Key>& keys, std::size_t most) {
                return self.note(worker, keys, most);
            },
            "worker"_a, "keys"_a, "most"_a)
        .def("forget", &Guesses::forget, "worker"_a)
        .def_prop_ro("num_keys", &Guesses::num_keys)
        .def_prop_ro("nbytes", &Guesses::nbytes);
    nb::class_<Held>(m, "HeldKV")
        .def(
            "__init__",
            [](Held* self, const std::vector<std::tuple<Holder, double, double>>& shares) {
                new (self) Held();
                for (const auto& [worker, tokens, loading] : shares)
                    self->shares.push_back({worker, tokens, loading});
                std::ranges::sort(self->shares, {}, &Share::worker);
            },
            "shares"_a)
        .def(
            "tokens_of",
            [](const Held& self, Holder worker) {
                const Share* const share = self.find(worker);
                return share ? static_cast<std::size_t>(share->tokens) : 0;
            },
            "worker"_a)
        .def_prop_ro("most", [](const Held& self) { return static_cast<std::size_t>(self.most()); })
        .def_prop_ro("shares",
                     [](const Held& self) {
                         std::vector<std::tuple<Holder, std::size_t, double>> found;
                         for (const Share& share : self.shares)
                             found.emplace_back(share.worker, static_cast<std::size_t>(share.tokens), share.loading);
                         return found;
                     })
        .def("__bool__", [](const Held& self) { return !self.shares.empty(); });
    nb::class_<Publishers>(m, "Publishers")
        .def(nb::init<std::array<double, kNumMedia>>(), "loading"_a)
        .def("of", &Publishers::of, "publisher"_a, "workers"_a, "shared"_a)
        .def(
            "held",
            [](Publishers& self, const std::vector<Prefixes*>& by_size, Key root, const Tokens& tokens) {
                return self.held(by_size, root, {tokens.data(), tokens.shape(0)});
            },
            "by_size"_a, "root"_a, "tokens"_a);
    nb::class_<PyColumns>(m, "Columns")
        .def(nb::init<Column, Column, Column, Numbers, nb::dict>(), "load"_a, "slowness"_a, "taken"_a, "numbers"_a,
             "rows"_a)
        .def("least", &PyColumns::least, "fit"_a.none(), "turn"_a)
        .def("lowest", &PyColumns::lowest, "fit"_a.none(), "most"_a)
        .def("held", &PyColumns::held, "held"_a)
        .def("cached", &PyColumns::cached, "guesses"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none())
        .def("cheapest", &PyColumns::cheapest, "guesses"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none(),
             "behind"_a.none(), "unit"_a, "fit"_a.none(), "turn"_a, "num_scores"_a);
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
