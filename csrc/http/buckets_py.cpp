// The numbers of one series of a histogram, for Python: four of a request's were a tenth of its calls.
// `pdlink/_http.pyi` is its manual.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "http/http_py.h"

namespace pdlink::http {
namespace {

constexpr std::size_t kMaxSamples = 100'000;

double unix_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

class Buckets {
  public:
    explicit Buckets(const nb::sequence& bounds) {
        for (const nb::handle bound : bounds) bounds_.push_back(nb::cast<double>(bound));
        counts_.resize(bounds_.size() + 1);
    }

    void observe(double number, const nb::object& exemplar) {
        const auto bucket =
            static_cast<std::size_t>(std::ranges::lower_bound(bounds_, number) - bounds_.begin());  // NaN: the first
        ++counts_[bucket];
        sum_ += number;
        if (!exemplar.is_none() && PyObject_IsTrue(exemplar.ptr()) == 1)
            exemplars_[nb::int_(bucket)] = nb::make_tuple(exemplar, number, unix_s());
        if (keeps && samples_.size() < kMaxSamples) samples_.push_back(number);
    }

    nb::list numbers() const {
        nb::list found;
        for (const std::uint64_t count : counts_) found.append(static_cast<double>(count));
        found.append(sum_);
        return found;
    }

    nb::list take_samples() {
        nb::list found;
        for (const double number : std::exchange(samples_, {})) found.append(number);
        return found;
    }

    nb::dict exemplars() const { return exemplars_; }

    bool keeps = false;

  private:
    std::vector<double> bounds_;
    std::vector<std::uint64_t> counts_;  // the last one is of numbers above all bounds
    double sum_ = 0;
    std::vector<double> samples_;
    nb::dict exemplars_;  // by bucket
};

}  // namespace

void add_buckets(nb::module_& m) {
    nb::class_<Buckets>(m, "Buckets")
        .def(nb::init<const nb::sequence&>(), "bounds"_a)
        .def("observe", &Buckets::observe, "number"_a, "exemplar"_a.none() = nb::none())
        .def("take_samples", &Buckets::take_samples)
        .def_prop_ro("numbers", &Buckets::numbers)
        .def_prop_ro("exemplars", &Buckets::exemplars)
        .def_rw("keeps", &Buckets::keeps);
}

}  // namespace pdlink::http
