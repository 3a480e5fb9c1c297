// A connection of a client, for Python: it reads plain requests (heads.h) and tells of each once it is whole. What is
// unusual its subclass gets as it came. `pdlink/_http.pyi` is its manual.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/native.h"
#include "http/heads.h"
#include "http/http_py.h"
#include "http/socket.h"

namespace pdlink::http {
namespace {

constexpr std::string_view kLineEnd = "\r\n", kHeadEnd = "\r\n\r\n";
constexpr std::size_t kMaxStartNbytes = 64;        // of the first line of a plain request
constexpr std::size_t kMaxHeadNbytes = 16 * 1024;  // of a head that comes in parts
constexpr std::size_t kMaxHeldNbytes = 1 << 20;    // of a body that comes in parts

bool has_head_end(std::string_view bytes, std::size_t from) {
    return bytes.find(kHeadEnd, from) != std::string_view::npos;
}

// Whether the rest of a head is waited for: of one that begins as HTTP does, and is not too long.
bool may_grow(std::string_view head) {
    if (head.size() > kMaxHeadNbytes || head.empty() || head.front() < 'A' || head.front() > 'Z') return false;
    const std::size_t end = head.find(kLineEnd);
    if (end == std::string_view::npos) return true;
    const std::string_view line = head.substr(0, end);
    return line.ends_with(" HTTP/1.1") || line.ends_with(" HTTP/1.0");
}

class Requests : public Socket {
  public:
    explicit Requests(nb::dict paths) : idle_since_s(now_s()), paths_(std::move(paths)) {}

    void feed(std::string_view bytes);
    void write(const nb::bytes& head, const nb::bytes& body);
    void done();
    void read_on();

    bool came(std::string_view bytes) override;
    void ended(int error) override;

    double idle_since_s;  // its last request ended, or the first bytes of the next one came
    bool busy = false;    // a request runs
    bool waits = false;   // for the rest of a request

    bool has_held() const { return !held_.empty(); }
    bool has_head() const { return awaited_nbytes_ != 0; }
    nb::bytes take_held() { return bytes_of(std::exchange(held_, {})); }

    // Of the collector.
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Requests>(self)->paths_.ptr());
        return 0;
    }

  private:
    nb::object self() { return nb::find(this); }
    void read(std::string_view bytes);
    void hold_bytes(std::string_view bytes, std::size_t awaited_nbytes);
    void hand_over(std::string_view bytes);

    nb::dict paths_;
    std::string held_;                // what came and is not a whole request, or waits for the one that runs
    std::size_t awaited_nbytes_ = 0;  // of the request that is held, with its head; 0 until that is whole
};

bool Requests::came(std::string_view bytes) {
    const nb::object mine = self();
    try {
        feed(bytes);
    } catch (...) {
        mine.attr("abort")();
        throw;
    }
    return true;
}

void Requests::ended(int error) {
    const nb::object mine = self();
    hold();
    mine.attr("broke")(error);
}

void Requests::feed(std::string_view bytes) {
    if (busy) {  // the next request waits for the end of this one
        held_.append(bytes);
        self().attr("pause")();
        return;
    }
    if (held_.empty()) {
        read(bytes);
        return;
    }
    const std::size_t before = held_.size();
    held_.append(bytes);
    if (held_.size() < awaited_nbytes_) return;
    if (awaited_nbytes_ == 0 && !has_head_end(held_, before - std::min<std::size_t>(before, 3)) && may_grow(held_))
        return;
    read(std::exchange(held_, {}));
}

// The next request begins with these bytes.
void Requests::read(std::string_view bytes) {
    awaited_nbytes_ = 0;
    const std::size_t line = bytes.substr(0, kMaxStartNbytes).find(kLineEnd);
    const std::size_t end = bytes.find(kHeadEnd, line == std::string_view::npos ? 0 : line);
    if (end == std::string_view::npos && may_grow(bytes)) {
        hold_bytes(bytes, 0);
        return;
    }
    if (line == std::string_view::npos || end == std::string_view::npos) {
        hand_over(bytes);
        return;
    }
    const std::size_t begin = line + kLineEnd.size(), head_nbytes = end + kHeadEnd.size();
    const nb::object path = paths_.attr("get")(bytes_of(bytes.substr(0, begin)));
    const nb::object found = path.is_none() ? path : request_of(bytes.substr(begin, head_nbytes - begin));
    if (found.is_none()) {
        hand_over(bytes);
        return;
    }
    const nb::object mine = self();
    const auto nbytes = nb::cast<std::uint64_t>(found[1]);
    if (nbytes > bytes.size() - head_nbytes) {
        if (nbytes > kMaxHeldNbytes || !nb::cast<bool>(mine.attr("admits")(found[0]))) {
            hand_over(bytes);
        } else {
            hold_bytes(bytes, head_nbytes + nbytes);
        }
        return;
    }
    held_.assign(bytes.substr(head_nbytes + nbytes));
    busy = true;
    waits = false;
    const nb::bytes body = bytes_of(bytes.substr(head_nbytes, nbytes));
    if (nb::cast<bool>(mine.attr("take")(path, found[0], body, found[2]))) return;
    busy = false;
    held_.clear();
    hand_over(bytes);
}

// The rest is waited for: of a head, or until there are so many bytes.
void Requests::hold_bytes(std::string_view bytes, std::size_t awaited_nbytes) {
    if (!waits) {
        waits = true;
        idle_since_s = now_s();
    }
    held_.assign(bytes);
    awaited_nbytes_ = awaited_nbytes;
}

void Requests::hand_over(std::string_view bytes) { self().attr("hand_over")(bytes_of(bytes)); }

void Requests::done() {
    busy = false;
    idle_since_s = now_s();
}

void Requests::read_on() {
    if (busy || held_.empty()) return;
    const std::string held = std::exchange(held_, {});
    read(held);
}

void Requests::write(const nb::bytes& head, const nb::bytes& body) {
    const std::size_t done = clogged ? 0 : send(view(head), view(body));
    if (done == head.size() + body.size()) return;
    std::string rest(view(head));
    rest.append(view(body));
    self().attr("send_rest")(bytes_of(std::string_view(rest).substr(done)));
}

}  // namespace

void add_requests(nb::module_& m) {
    PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Requests::traverse)}, {0, nullptr}};
    nb::class_<Requests, Socket>(m, "Requests", nb::type_slots(slots))
        .def(nb::init<nb::dict>(), "paths"_a)
        .def(
            "feed", [](Requests& self, const nb::bytes& data) { self.feed(view(data)); }, "data"_a)
        .def("write", &Requests::write, "head"_a, "body"_a = nb::bytes("", 0))
        .def("open_to_write", &Requests::open_to_write, "socket"_a)
        .def("done", &Requests::done)
        .def("read_on", &Requests::read_on)
        .def("take_held", &Requests::take_held)
        .def_prop_ro("has_held", &Requests::has_held)
        .def_prop_ro("has_head", &Requests::has_head)
        .def_rw("idle_since_s", &Requests::idle_since_s)
        .def_ro("busy", &Requests::busy)
        .def_prop_ro("native", [](nb::handle_t<Requests> self) {
            return nb::inst_ptr<Requests>(self)->is_open() ? nb::borrow(self) : nb::none();
        });
}

}  // namespace pdlink::http
