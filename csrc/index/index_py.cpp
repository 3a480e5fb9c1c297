// Python's view of the index; `pdlink/_index.pyi` is its manual.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "index/columns.h"
#include "index/costs.h"
#include "index/events.h"
#include "index/guesses.h"
#include "index/held.h"
#include "index/kv_index.h"
#include "index/msgpack.h"
#include "index/pairing.h"
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

// Keeps the bytes.
class PyEvents : public Events {
  public:
    explicit PyEvents(nb::bytes batch) : Events(bytes_of(batch)), batch_(std::move(batch)) {}

  private:
    nb::bytes batch_;
};

std::string_view text_of(nb::handle text) {
    Py_ssize_t nbytes = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &nbytes);
    if (!utf8) nb::raise_python_error();
    return {utf8, static_cast<std::size_t>(nbytes)};
}

Held held(KVIndex& self, const nb::str& model, const nb::tuple& extra, const Tokens& tokens) {
    std::vector<std::string_view> names;
    for (const nb::handle name : extra) names.push_back(text_of(name));
    return self.held(text_of(model), names, {tokens.data(), tokens.shape(0)});
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
using Keys = std::vector<Key>;

struct Lacking {
    double most;  // tokens
    bool known;   // that it is no less
    std::int64_t least() const { return known ? static_cast<std::int64_t>(most) : 0; }
};

// A `PlacementRequest` goes to this worker. Returns how many tokens of it the worker lacks. With one worker on each
// side nobody asks for the keys of a prompt: it counts as computed as a whole, and the worker may lack less.
Lacking placed(Guesses& self, const Kept& kept, nb::handle request, const WorkerLoad& worker) {
    const nb::object chain = request.attr("chain"), held = request.attr("held");
    const bool known = !chain.is_none();
    const auto keys = known ? nb::cast<Keys>(chain) : Keys{};
    const Asked asked{keys, nb::cast<double>(request.attr("key_tokens")),
                      nb::cast<double>(request.attr("num_tokens")),
                      held.is_none() ? nullptr : nb::cast<const Held*>(held)};
    return {note(self, kept, worker, asked), known};
}

// Keeps its workers.
class PyColumns : public Columns {
  public:
    PyColumns(std::vector<nb::object> workers, nb::dict rows)
        : Columns(cast(workers)), kept_(std::move(workers)), rows_(std::move(rows)) {}

    void put(std::size_t row, nb::object worker) {
        Columns::put(row, nb::cast<const WorkerLoad&>(worker));
        kept_[row] = std::move(worker);
    }
    bool tells_room() const {
        return std::ranges::any_of(workers(), [](const WorkerLoad* each) { return each->room_tokens.has_value(); });
    }
    template <auto Of>
    Column column() const {
        auto* const values = new std::vector<double>(workers().size());
        std::ranges::transform(workers(), values->begin(),
                               [](const WorkerLoad* each) { return std::invoke(Of, each); });
        const nb::capsule owner(values, [](void* at) noexcept { delete static_cast<std::vector<double>*>(at); });
        return Column(values->data(), {values->size()}, owner);
    }
    Fit fitting(const std::optional<Mask>& fit) const {
        if (!fit) return {};
        if (fit->shape(0) != workers().size()) throw std::invalid_argument("fit: expected a mark for each row");
        return {{reinterpret_cast<const std::uint8_t*>(fit->data()), fit->shape(0)}};
    }
    // The row of a worker with this key.
    std::optional<std::size_t> row(nb::handle key) const {
        PyObject* const found = PyDict_GetItemWithError(rows_.ptr(), key.ptr());
        return found ? std::optional(nb::cast<std::size_t>(nb::handle(found))) : std::nullopt;
    }
    // By row what is given by key.
    std::vector<RowValue> by_row(const nb::dict& by_key) const {
        std::vector<RowValue> found;
        for (const auto [key, value] : by_key)
            if (const auto at = row(key)) found.emplace_back(*at, nb::cast<double>(value));
        return found;
    }

  private:
    static std::vector<const WorkerLoad*> cast(const std::vector<nb::object>& workers) {
        std::vector<const WorkerLoad*> found;
        for (const nb::object& each : workers) found.push_back(nb::cast<const WorkerLoad*>(each));
        return found;
    }
    std::vector<nb::object> kept_;
    nb::dict rows_;
};

std::tuple<std::size_t, std::size_t, Scored> cheapest(PyColumns& self, Costs& costs, const Keys& keys,
                                                      double key_tokens, double num_tokens, const Held* held,
                                                      const std::optional<nb::dict>& behind,
                                                      const std::optional<Mask>& fit, std::size_t turn,
                                                      std::size_t num_scores) {
    const Fit fits = self.fitting(fit);
    const std::vector<RowValue> extra = behind ? self.by_row(*behind) : std::vector<RowValue>();
    const Picked picked = self.cheapest({keys, key_tokens, num_tokens, held}, costs, extra, fits, turn);
    return {picked.row, static_cast<std::size_t>(picked.cached),
            num_scores ? self.lowest(fits, num_scores) : Scored()};
}

// One leg of a `Pairing`, and what it is called where it is told what was weighed.
struct PyPairLeg {
    PyColumns& columns;
    std::vector<std::uint8_t> marks;
    Costs* costs;
    std::string policy;
    std::vector<std::string> labels;  // by row

    PairLeg leg() const { return {&columns, marks, costs}; }
    // In MessagePack, an entry of a map of Python's `Considered` by leg: it is kept with many requests, and read for
    // few.
    void tell(msgpack::Writer& to, std::string_view leg, const PairWeighed& weighed) const {
        if (!weighed.of) return;
        to.text(leg), to.map(3);
        to.text("policy"), to.text(policy);
        to.text("of"), to.number(weighed.of);
        to.text("scores"), to.array(weighed.lowest.size());
        for (const auto& [row, score] : weighed.lowest) to.array(2), to.text(labels.at(row)), to.number(score);
    }
};

void make_pair_leg(PyPairLeg* self, PyColumns& columns, const std::optional<Mask>& fit, Costs* costs,
                   std::string policy, std::vector<std::string> labels) {
    const std::span<const std::uint8_t> marks = columns.fitting(fit).marks;
    new (self) PyPairLeg{columns, {marks.begin(), marks.end()}, costs, std::move(policy), std::move(labels)};
}

class PyPairing : public Pairing {
  public:
    PyPairing(const PyPairLeg& prefill, const PyPairLeg& decode, double alone, double idle_alone,
              const nb::dict& behind)
        : Pairing(prefill.leg(), decode.leg(), {alone, idle_alone}, by_row(prefill, decode, behind)),
          prefill_(prefill),
          decode_(decode) {}

    nb::object choose(const Keys& keys, double key_tokens, double num_tokens, double more_tokens, const Held* held,
                      double most_load, std::size_t turn, std::size_t num_scores) {
        const auto found =
            Pairing::choose({keys, key_tokens, num_tokens, held}, more_tokens, most_load, turn, num_scores);
        if (!found) return nb::none();
        nb::object weighed = nb::none();
        if (const std::size_t num = (found->by_decode.of > 0) + (found->by_prefill.of > 0)) {
            msgpack::Writer to;
            to.map(num);
            decode_.tell(to, "decode", found->by_decode);
            prefill_.tell(to, "prefill", found->by_prefill);
            weighed = nb::bytes(to.data().data(), to.data().size());
        }
        return nb::make_tuple(found->prefill, found->decode, static_cast<std::size_t>(found->cached), weighed);
    }

  private:
    static std::vector<std::vector<RowValue>> by_row(const PyPairLeg& prefill, const PyPairLeg& decode,
                                                     const nb::dict& behind) {
        std::vector<std::vector<RowValue>> found(behind.size() ? decode.labels.size() : 0);
        for (const auto [key, extra] : behind)
            if (const auto row = decode.columns.row(key))
                found[*row] = prefill.columns.by_row(nb::cast<nb::dict>(extra));
        return found;
    }
    PyPairLeg prefill_, decode_;
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
            [](Guesses& self, std::size_t of_worker, std::size_t unheard, nb::handle request,
               const WorkerLoad& worker) { return placed(self, {of_worker, unheard}, request, worker).least(); },
            "of_worker"_a, "unheard"_a, "request"_a, "worker"_a)
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
    nb::class_<PyEvents>(m, "Events").def(nb::init<nb::bytes>(), "batch"_a);
    nb::class_<KVIndex>(m, "Index")
        .def(nb::init<std::size_t, std::size_t, std::array<double, kNumMedia>>(), "max_blocks"_a, "max_sizes"_a,
             "loading"_a)
        .def(
            "apply",
            [](KVIndex& self, Holder publisher, const nb::str& model, PyEvents& events, const nb::str& scope) {
                return self.apply(publisher, text_of(model), text_of(scope), events);
            },
            "publisher"_a, "model"_a, "events"_a, "scope"_a = "")
        .def("forget", &KVIndex::forget, "publisher"_a)
        .def("assign", &KVIndex::assign, "publisher"_a, "workers"_a, nb::kw_only(), "shared"_a)
        .def("held", &held, "model"_a, "extra"_a, "tokens"_a)
        .def("__len__", &KVIndex::num_blocks)
        .def("__bool__", [](const KVIndex& self) { return self.num_blocks() > 0; })
        .def_prop_ro("nbytes", &KVIndex::nbytes);
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
    nb::class_<Costs, Guesses>(m, "Costs")
        .def(nb::init<std::size_t>(), "max_keys"_a)
        .def("taken", &Costs::taken, "worker"_a)
        .def(
            "placed",
            [](Costs& self, std::size_t of_worker, std::size_t unheard, nb::handle request, WorkerLoad& worker) {
                const Lacking lacking = placed(self, {of_worker, unheard}, request, worker);
                self.take(worker, lacking.most);
                return lacking.least();
            },
            "of_worker"_a, "unheard"_a, "request"_a, "worker"_a);
    nb::class_<PyColumns>(m, "Columns")
        .def(nb::init<std::vector<nb::object>, nb::dict>(), "workers"_a, "rows"_a)
        .def("put", &PyColumns::put, "row"_a, "worker"_a)
        .def_prop_ro("tells_room", &PyColumns::tells_room)
        .def_prop_ro("load", &PyColumns::column<&WorkerLoad::load>, nb::rv_policy::automatic)
        .def_prop_ro("room", &PyColumns::column<&WorkerLoad::room>, nb::rv_policy::automatic)
        .def_prop_ro("slowness", &PyColumns::column<&WorkerLoad::slowness>, nb::rv_policy::automatic)
        .def(
            "least",
            [](PyColumns& self, const std::optional<Mask>& fit, std::size_t turn) {
                return self.least(self.fitting(fit), turn).row;
            },
            "fit"_a.none(), "turn"_a)
        .def(
            "lowest",
            [](PyColumns& self, const std::optional<Mask>& fit, std::size_t most) {
                self.least(self.fitting(fit), 0);
                return self.lowest(self.fitting(fit), most);
            },
            "fit"_a.none(), "most"_a)
        .def(
            "held", [](PyColumns& self, const Held& held) { return self.held(held); }, "held"_a)
        .def(
            "cached",
            [](PyColumns& self, Guesses& guesses, const Keys& keys, double key_tokens, double num_tokens,
               const Held* held) { return self.cached({keys, key_tokens, num_tokens, held}, guesses); },
            "guesses"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none())
        .def("cheapest", &cheapest, "costs"_a, "keys"_a, "key_tokens"_a, "num_tokens"_a, "held"_a.none(),
             "behind"_a.none(), "fit"_a.none(), "turn"_a, "num_scores"_a);
    nb::class_<PyPairLeg>(m, "PairLeg")
        .def("__init__", &make_pair_leg, "columns"_a, "fit"_a.none(), "costs"_a.none(), "policy"_a, "labels"_a,
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>());
    nb::class_<PyPairing>(m, "Pairing")
        .def(nb::init<const PyPairLeg&, const PyPairLeg&, double, double, const nb::dict&>(), "prefill"_a, "decode"_a,
             "alone"_a, "idle_alone"_a, "behind"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("choose", &PyPairing::choose, "keys"_a, "key_tokens"_a, "num_tokens"_a, "more_tokens"_a, "held"_a.none(),
             "most_load"_a, "turn"_a, "num_scores"_a);
}
