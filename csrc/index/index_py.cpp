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
#include <functional>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "index/columns.h"
#include "index/costs.h"
#include "index/guesses.h"
#include "index/held.h"
#include "index/msgpack.h"
#include "index/prefixes.h"
#include "index/worker_load.h"

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

using Column = nb::ndarray<nb::numpy, double, nb::ndim<1>>;
using Mask = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByWorker = std::optional<nb::dict>;
using Keys = std::vector<Key>;

// A row for each worker.
class PyColumns {
  public:
    PyColumns(std::vector<nb::object> works, nb::dict rows) : kept_(std::move(works)), rows_(std::move(rows)) {
        for (const nb::object& each : kept_) works_.push_back(nb::cast<const WorkerLoad*>(each));
        cached_.resize(works_.size()), loading_.resize(works_.size()), costs_.resize(works_.size());
    }

    void put(std::size_t row, nb::object work) {
        works_.at(row) = nb::cast<const WorkerLoad*>(work);
        kept_[row] = std::move(work);
    }
    bool tells_room() const {
        return std::ranges::any_of(works_, [](const WorkerLoad* each) { return each->room_tokens.has_value(); });
    }
    template <auto Of>
    Column column() const {
        auto* const values = new std::vector<double>(works_.size());
        std::ranges::transform(works_, values->begin(), [](const WorkerLoad* each) { return std::invoke(Of, each); });
        const nb::capsule owner(values, [](void* at) noexcept { delete static_cast<std::vector<double>*>(at); });
        return Column(values->data(), {values->size()}, owner);
    }
    std::size_t least(const std::optional<Mask>& fit, std::size_t turn) const {
        return index::least(works_, fitting(fit), turn);
    }
    Scored lowest(const std::optional<Mask>& fit, std::size_t most) {
        std::ranges::transform(works_, costs_.begin(), &WorkerLoad::load);
        return index::lowest(costs_, fitting(fit), most);
    }
    std::vector<double> held(const Held& held) {
        std::ranges::fill(cached_, 0.0);
        add(held);
        return cached_;
    }
    std::vector<double> cached(Guesses& guesses, const Keys& keys, double key_tokens, double num_tokens,
                               const Held* held) {
        look({keys, key_tokens, num_tokens, held}, guesses);
        return cached_;
    }
    std::tuple<std::size_t, std::size_t, Scored> cheapest(Guesses& guesses, const TakenKV& taken, const Keys& keys,
                                                          double key_tokens, double num_tokens, const Held* held,
                                                          const ByWorker& behind, const std::optional<Mask>& fit,
                                                          std::size_t turn, std::size_t num_scores) {
        look({keys, key_tokens, num_tokens, held}, guesses);
        for (std::size_t row = 0; row < costs_.size(); ++row)
            costs_[row] = (works_[row]->load() + num_tokens - cached_[row]) * works_[row]->slowness + loading_[row];
        if (behind)
            for (const auto [key, extra] : *behind)
                if (PyObject* const row = PyDict_GetItemWithError(rows_.ptr(), key.ptr()))
                    costs_[nb::cast<std::size_t>(nb::handle(row))] += nb::cast<double>(extra) * num_tokens;
        const std::size_t row = index::cheapest(works_, taken, costs_, cached_, num_tokens, fitting(fit), turn);
        Scored scores;
        if (num_scores) scores = index::lowest(costs_, fitting(fit), num_scores);
        return {row, static_cast<std::size_t>(cached_[row]), std::move(scores)};
    }

  private:
    Fit fitting(const std::optional<Mask>& fit) const {
        if (!fit) return {};
        if (fit->shape(0) != works_.size()) throw std::invalid_argument("fit: expected a mark for each row");
        return {fit->data(), fit->shape(0)};
    }
    // `cached_`: tokens of the prompt that each row may hold, by what it says or else by what it was sent;
    // `loading_`: what it costs to use them, by what it says.
    void look(const Asked& asked, Guesses& guesses) {
        guesses.leading(asked.keys, works_, cached_);
        for (double& tokens : cached_) tokens = std::min(tokens * asked.key_tokens, asked.num_tokens);
        std::ranges::fill(loading_, 0.0);
        if (asked.held) add(*asked.held);
    }
    void add(const Held& held) {
        if (held.shares.empty()) return;
        share_of_.resize(std::max<std::size_t>(share_of_.size(), held.shares.back().worker + 1));
        for (std::size_t at = 0; at < held.shares.size(); ++at) share_of_[held.shares[at].worker] = at + 1;
        for (std::size_t row = 0; row < cached_.size(); ++row) {
            const Holder worker = works_[row]->number;
            if (worker >= share_of_.size() || !share_of_[worker]) continue;
            const Share& share = held.shares[share_of_[worker] - 1];
            cached_[row] = std::max(cached_[row], share.tokens);
            loading_[row] = share.loading;
        }
        for (const Share& share : held.shares) share_of_[share.worker] = 0;
    }

    std::vector<nb::object> kept_;
    std::vector<const WorkerLoad*> works_;  // of `kept_`
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
        .def(
            "placed",
            [](Guesses& self, const WorkerLoad& worker, const Keys& keys, double key_tokens, double num_tokens,
               const Held* held, std::size_t of_worker, std::size_t unheard) {
                const Asked asked{keys, key_tokens, num_tokens, held};
                return static_cast<std::int64_t>(note(self, {of_worker, unheard}, worker, asked));
            },
            "worker"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none(), "of_worker"_a, "unheard"_a)
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
    nb::class_<Fares>(m, "Fares")
        .def(nb::init<>())
        .def_rw("out", &Fares::out)
        .def_ro("failed", &Fares::failed)
        .def_ro("pace", &Fares::pace)
        .def_ro("num", &Fares::num)
        .def_ro("num_timed", &Fares::num_timed)
        .def("count", &Fares::count, "failed"_a, "pace"_a.none())
        .def("forget", &Fares::forget);
    nb::class_<WorkerLoad>(m, "WorkerLoad")
        .def(nb::init<bool>(), "allowed"_a)
        .def("sent", &WorkerLoad::sent, "tokens"_a, "now"_a)
        .def("finished", &WorkerLoad::finished, "tokens"_a, "now"_a, "served"_a)
        .def(
            "served",
            [](WorkerLoad& self, std::int64_t tokens, double now, Fares& fares, std::optional<double> pace) {
                if (!fares.out) fares.count(false, pace);
                self.finished(tokens, now, true);
            },
            "tokens"_a, "now"_a, "fares"_a, "pace"_a.none())
        .def("heard", &WorkerLoad::heard, "requests"_a, "free_tokens"_a.none(), "load_tokens"_a.none() = nb::none())
        .def_ro("number", &WorkerLoad::number)
        .def_prop_ro("load", &WorkerLoad::load)
        .def_prop_ro("requests", &WorkerLoad::requests)
        .def_prop_ro("tokens", &WorkerLoad::tokens)
        .def_prop_ro("foreign", &WorkerLoad::foreign)
        .def_prop_ro("tokens_per_s", &WorkerLoad::tokens_per_s)
        .def_prop_ro("idle", &WorkerLoad::idle)
        .def_rw("slowness", &WorkerLoad::slowness)
        .def_rw("taken", &WorkerLoad::taken)
        .def_rw("room_tokens", &WorkerLoad::room_tokens, nb::arg().none())
        .def_rw("pool_tokens", &WorkerLoad::pool_tokens, nb::arg().none())
        .def_rw("publishes", &WorkerLoad::publishes);
    nb::class_<TakenKV>(m, "TakenKV")
        .def(nb::init<>())
        .def("add", &TakenKV::add, "worker"_a, "tokens"_a, "num_workers"_a)
        .def("of", &TakenKV::of, "worker"_a);
    nb::class_<PyColumns>(m, "Columns")
        .def(nb::init<std::vector<nb::object>, nb::dict>(), "works"_a, "rows"_a)
        .def("put", &PyColumns::put, "row"_a, "work"_a)
        .def_prop_ro("tells_room", &PyColumns::tells_room)
        .def_prop_ro("load", &PyColumns::column<&WorkerLoad::load>, nb::rv_policy::automatic)
        .def_prop_ro("room", &PyColumns::column<&WorkerLoad::room>, nb::rv_policy::automatic)
        .def_prop_ro("slowness", &PyColumns::column<&WorkerLoad::slowness>, nb::rv_policy::automatic)
        .def("least", &PyColumns::least, "fit"_a.none(), "turn"_a)
        .def("lowest", &PyColumns::lowest, "fit"_a.none(), "most"_a)
        .def("held", &PyColumns::held, "held"_a)
        .def("cached", &PyColumns::cached, "guesses"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none())
        .def("cheapest", &PyColumns::cheapest, "guesses"_a, "taken"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a,
             "held"_a.none(), "behind"_a.none(), "fit"_a.none(), "turn"_a, "num_scores"_a);
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
