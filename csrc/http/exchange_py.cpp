// A connection to a worker, for Python: it sends a request in one write, reads the answer, and tells the request's
// listener of a state only when that is reached. Events of a stream pass to the client without Python while nobody
// has to look at them. `pdlink/_http.pyi` is its manual.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/native.h"
#include "http/answers.h"
#include "http/events.h"
#include "http/http_py.h"
#include "http/socket.h"

namespace pdlink::http {
namespace {

constexpr std::size_t kKeptNbytes = 64 * 1024;  // of memory for answers, between two of them
constexpr std::size_t kTellNbytes = 8 * 1024;   // of passed events, before the listener is told: some 35
constexpr double kBurstS = 2 * kRestMs * 1e-3;  // between two reads of a stream: an engine takes longer for a token
constexpr double kMaxWaitS = 24 * 3600.0;       // of one turn
constexpr std::string_view kLineEnd = "\r\n", kEventEnd = "\n\n";

class Exchange : public Socket {
  public:
    void ask(const nb::bytes& begin, const nb::bytes& lines, const nb::bytes& body, nb::object listener,
             nb::object uses);
    void feed(std::string_view bytes);
    void end(unsigned where);
    nb::tuple leave();
    void pass_to(Socket& to, unsigned marks);
    void pass_no_more();

    bool came(std::string_view bytes) override;
    void ended(int error) override;
    bool is_quick() const override { return to_ != nullptr; }
    bool rests() const override { return to_ != nullptr && !finishes_ && (bursts_ || begins_); }

    nb::object listener, uses;
    bool keeps = true, reused = false, heard = false, paused = false;
    double passed_s = 0;  // when the last event did

    // Of the collector.
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const Exchange* const one = nb::inst_ptr<Exchange>(self);
        Py_VISIT(one->listener.ptr());
        Py_VISIT(one->uses.ptr());
        Py_VISIT(one->headers_.ptr());
        Py_VISIT(one->client_.ptr());
        return 0;
    }
    static int clear(PyObject* self) {
        if (!nb::inst_ready(self)) return 0;
        Exchange* const one = nb::inst_ptr<Exchange>(self);
        one->listener.reset();
        one->uses.reset();
        one->headers_.reset();
        one->to_ = nullptr;
        one->client_.reset();
        return 0;
    }

  private:
    nb::object self() { return nb::find(this); }
    void hear(std::string_view bytes);
    bool pass(const Part& part);
    void tell_passed();
    void whole(std::string_view body, unsigned where);
    void fail(const char* why);

    Answers answers_;
    bool unusual_ = false;  // Python reads the present answer
    std::size_t most_ = 0;  // of a body that the listener hears whole; 0: in parts
    int status_ = 0;
    nb::object headers_;  // of the present answer
    std::string body_;    // as far as it came, for a listener that hears it whole

    Socket* to_ = nullptr;  // `client_`, to which events pass
    nb::object client_;
    unsigned marks_ = 0;          // of events that do not
    std::string passed_;          // events of which the listener was not told
    bool passed_finish_ = false;  // one of them has a finish_reason
    bool bursts_ = false;         // what came last are events that came soon after those before them
    bool begins_ = false;         // what came last are the first events, which the others of a burst follow at once
    bool passes_ = false;         // of this answer some pass
    bool finishes_ = false;       // what follows is the end, for which the client does not wait longer
    std::string chunk_;
    bool told_ = false;  // Python was told something of what came last
};

void Exchange::ask(const nb::bytes& begin, const nb::bytes& lines, const nb::bytes& body, nb::object to,
                   nb::object used_by) {
    listener = std::move(to);
    uses = std::move(used_by);
    heard = false;
    most_ = nb::cast<std::size_t>(listener.attr("most_nbytes"));
    std::array<char, 24> digits;
    const auto [stop, error] = std::to_chars(digits.data(), digits.data() + digits.size(), body.size());
    std::string head;
    head.reserve(begin.size() + lines.size() + 64);
    head.append(view(begin)).append(view(lines)).append("Content-Length: ");
    head.append(digits.data(), error == std::errc{} ? static_cast<std::size_t>(stop - digits.data()) : 0);
    head.append("\r\n\r\n");
    const std::size_t nbytes = head.size() + body.size(), done = clogged ? 0 : send(head, view(body));
    if (done == nbytes) return;
    head.append(view(body));
    self().attr("send_rest")(bytes_of(std::string_view(head).substr(done)));
}

bool Exchange::came(std::string_view bytes) {
    const nb::object mine = self();  // a listener may drop it
    told_ = bursts_ = begins_ = false;
    try {
        feed(bytes);
    } catch (...) {
        keeps = false;
        mine.attr("abort")();
        throw;
    }
    return told_;
}

void Exchange::ended(int error) {
    const nb::object mine = self();
    hold();
    mine.attr("broke")(error);
}

void Exchange::feed(std::string_view bytes) {
    if (!listener.is_valid()) {  // nobody has asked
        told_ = true;
        keeps = false;
        self().attr("abort")();
        return;
    }
    heard = true;
    hear(bytes);
}

void Exchange::hear(std::string_view bytes) {
    std::optional<Part> part;
    nb::object told;  // holds the bytes of an unusual answer
    if (!unusual_ && !(part = answers_.feed(bytes))) unusual_ = true;
    if (unusual_) {
        told = self().attr("unusual")(bytes_of(bytes));
        part = Part{{}, view(nb::borrow<nb::bytes>(told[1])), nb::cast<unsigned>(told[2])};
    }
    const nb::object mine = listener;
    const bool begins = unusual_ ? !told[0].is_none() : part->head.has_value();
    const unsigned where = part->where;
    const bool over = (where & (kEnd | kBad)) != 0;
    if (begins) {
        status_ = unusual_ ? nb::cast<int>(told[0][0]) : part->head->status;
        headers_ = unusual_ ? nb::object(told[0][1]) : headers_of(*part->head);
        if (most_ == 0) {
            told_ = true;
            mine.attr("on_head")(status_, headers_);
            if (!listener.is(mine)) return;  // it has left
            most_ = nb::cast<std::size_t>(mine.attr("most_nbytes"));
        }
    }
    if (most_ != 0) {
        whole(part->body, where);
        return;
    }
    if (!over && (part->body.empty() || pass(*part))) return;
    told_ = true;
    pass_no_more();
    if (!listener.is(mine)) return;
    if ((where & kEnd) != 0) {
        const nb::bytes last = bytes_of(part->body);  // the connection may be asked again in `end`
        end(where);
        mine.attr("on_end")(last);
        return;
    }
    if (!part->body.empty()) {
        mine.attr("on_data")(bytes_of(part->body));
        if (to_ != nullptr) finishes_ = marks_of(part->body, kFinish) != 0;  // from now on events pass
    }
    if (listener.is(mine) && (where & kBad) != 0) fail("bad");
}

void Exchange::pass_to(Socket& to, unsigned marks) {
    to_ = &to;
    client_ = nb::find(to);
    marks_ = marks;
    finishes_ = false;
    begins_ = !std::exchange(passes_, true);
}

// All or nothing of what came at once: an event before an error is a part of the answer to judge.
bool Exchange::pass(const Part& part) {
    if (to_ == nullptr || to_->clogged || !to_->is_open()) return false;
    if (!part.body.ends_with(kEventEnd)) return false;
    const unsigned marks = marks_of(part.body, marks_ | kFinish);
    if ((marks & marks_) != 0) return false;
    passed_finish_ = passed_finish_ || (marks & kFinish) != 0;
    std::array<char, 16> digits;
    const auto [stop, error] = std::to_chars(digits.data(), digits.data() + digits.size(), part.body.size(), 16);
    chunk_.assign(digits.data(), error == std::errc{} ? static_cast<std::size_t>(stop - digits.data()) : 0);
    chunk_.append(kLineEnd).append(part.body).append(kLineEnd);
    const std::size_t done = to_->send(chunk_);
    passed_.append(part.body);
    const double before_s = std::exchange(passed_s, now_s());
    finishes_ = finishes_ || (marks & kFinish) != 0;
    bursts_ = passed_s - before_s < kBurstS;
    if (done < chunk_.size()) client_.attr("send_rest")(bytes_of(std::string_view(chunk_).substr(done)));
    if (done < chunk_.size() || passed_.size() >= kTellNbytes) tell_passed();  // the client may be behind
    return true;
}

void Exchange::tell_passed() {
    if (passed_.empty()) return;
    told_ = true;
    const nb::bytes passed = bytes_of(std::exchange(passed_, {}));
    const bool finished = std::exchange(passed_finish_, false);
    if (listener.is_valid()) listener.attr("on_passed")(passed, passed_s, finished);
}

void Exchange::pass_no_more() {
    to_ = nullptr;
    client_.reset();
    tell_passed();
}

void Exchange::whole(std::string_view body, unsigned where) {
    if (body_.size() + body.size() > most_) {
        fail("too_long");
    } else if ((where & kEnd) != 0) {
        told_ = true;
        const nb::object mine = listener, headers = std::exchange(headers_, nb::object());
        nb::bytes all = body_.empty() ? bytes_of(body) : bytes_of(body_.append(body));
        const int status = status_;
        end(where);
        mine.attr("on_whole")(status, headers, all);
    } else if ((where & kBad) != 0) {
        fail("bad");
    } else {
        body_.append(body);
    }
}

void Exchange::end(unsigned where) {
    pass_no_more();
    passes_ = false;
    if ((where & kMore) != 0) keeps = false;
    if (body_.capacity() > kKeptNbytes) body_ = {};
    body_.clear();
    const nb::object mine = self();
    if (std::exchange(unusual_, false)) mine.attr("usual")();
    if (paused) mine.attr("resume")();
    listener.reset();
    headers_.reset();
    const nb::object freed = std::exchange(uses, nb::object());
    if (!freed.is_valid()) return;
    try {
        freed.attr("freed")(mine);
    } catch (nb::python_error& error) {  // of another request, say: this one's listener hears its end all the same
        if (!error.matches(PyExc_Exception)) throw;
        mine.attr("fault")(error.value());
    }
}

// The answer is over without its end: its body as far as it came, and its head.
nb::tuple Exchange::leave() {
    const nb::tuple found = nb::make_tuple(status_, headers_.is_valid() ? headers_ : nb::none(), bytes_of(body_));
    end(kMore);
    return found;
}

void Exchange::fail(const char* why) {
    told_ = true;
    self().attr(why)(most_);
}

// Python goes on when somebody was told something, and not for events that pass.
bool turn(SocketPoller& self, std::optional<double> wait_s) {
    double left_s = std::clamp(wait_s.value_or(0.0), 0.0, kMaxWaitS);
    const double until_s = now_s() + left_s;
    while (true) {
        SocketPoller::Ready ready;
        // Rounded up, or a loop would come too early for its timer, again and again.
        const int most_ms = self.end_rests(wait_s ? static_cast<int>(std::ceil(left_s * 1e3)) : -1);
        {
            const nb::gil_scoped_release released;
            ready = self.wait(most_ms);
        }
        const auto [told, others] = self.turn(ready);
        if (told || others || ready.num < 0) return others;
        left_s = until_s - now_s();
        if (wait_s && left_s <= 0) return false;
    }
}

}  // namespace

void add_exchange(nb::module_& m) {
    nb::class_<SocketPoller>(m, "SocketPoller")
        .def(nb::init<int>(), "loop"_a = -1)
        .def_prop_ro("fd", &SocketPoller::fd)
        .def("turn", &turn, "wait_s"_a.none() = 0.0);
    PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Exchange::traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(&Exchange::clear)},
                           {0, nullptr}};
    nb::class_<Socket>(m, "Socket")
        .def("open", &Socket::open, "poller"_a, "socket"_a)
        .def("close", &Socket::close)
        .def_prop_ro("is_open", &Socket::is_open)
        .def("hold", &Socket::hold)
        .def("go_on", &Socket::go_on)
        .def_rw("clogged", &Socket::clogged);
    nb::class_<Exchange, Socket>(m, "Exchange", nb::type_slots(slots))
        .def(nb::init<>())
        .def("ask", &Exchange::ask, "begin"_a, "lines"_a, "body"_a, "listener"_a, "uses"_a)
        .def(
            "feed", [](Exchange& self, const nb::bytes& data) { self.feed(view(data)); }, "data"_a)
        .def("end", &Exchange::end, "where"_a)
        .def("leave_off", &Exchange::leave)
        .def("pass_to", &Exchange::pass_to, "to"_a, "marks"_a)
        .def("pass_no_more", &Exchange::pass_no_more)
        .def_prop_ro("listener",
                     [](const Exchange& self) { return self.listener.is_valid() ? self.listener : nb::none(); })
        .def_rw("keeps", &Exchange::keeps)
        .def_rw("reused", &Exchange::reused)
        .def_rw("paused", &Exchange::paused)
        .def_ro("heard", &Exchange::heard)
        .def_ro("passed_s", &Exchange::passed_s);
}

}  // namespace pdlink::http
