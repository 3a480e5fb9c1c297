// Which accesses to the same bytes are in an order: part of the test double in fake_driver.cpp.
//
// Two accesses to the same bytes, one of them a write, must be in an order: "Operations within a stream are ordered",
// those of two streams by an event that one waits for (CUDA C++ Programming Guide 13.0, Asynchronous Concurrent
// Execution), or because the host has seen the first end before it asks for the second. Whichever of the two runs
// first, the double notes each pair without an order, and every test ends with none. It does not see what the host
// reads and writes itself, nor other processes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fake {

// What has to be over before something begins: by stream, how many of its operations.
using Clock = std::map<void*, std::uint64_t>;

inline void join(Clock& clock, const Clock& other) {
    for (const auto& [stream, count] : other) clock[stream] = std::max(clock[stream], count);
}

struct Span {
    std::uint64_t begin, end;
};

// Sorted, neighbours joined.
inline std::vector<Span> sorted(std::vector<Span> spans) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> joined;
    for (const Span& one : spans)
        if (!joined.empty() && one.begin <= joined.back().end)
            joined.back().end = std::max(joined.back().end, one.end);
        else
            joined.push_back(one);
    return joined;
}

inline bool meet(const std::vector<Span>& a, const std::vector<Span>& b) {
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i].end <= b[j].begin)
            ++i;
        else if (b[j].end <= a[i].begin)
            ++j;
        else
            return true;
    }
    return false;
}

struct Run {
    std::uint64_t src, dst, nbytes;
};
// Which operations are in an order, and what is wrong.
class Order {
  public:
    void run(const char* what, void* stream, const std::vector<Run>& runs) {
        Operation one{what, stream, ++counts_[stream], {}, {}};
        for (const Run& run : runs) {
            one.reads.push_back({run.src, run.src + run.nbytes});
            one.writes.push_back({run.dst, run.dst + run.nbytes});
        }
        one.reads = sorted(std::move(one.reads)), one.writes = sorted(std::move(one.writes));
        Clock& before = before_[stream];
        join(before, seen_);
        std::erase_if(running_, [this](const Operation& old) { return old.number <= seen_[old.stream]; });
        for (const Operation& old : running_)
            if (old.number > before[old.stream] && old.stream != stream && conflict(one, old))
                faults.push_back(one.what + " is in no order with " + old.what + " of the same bytes");
        before[stream] = one.number;
        running_.push_back(std::move(one));
    }
    Clock now(void* stream) {
        join(before_[stream], seen_);
        return before_[stream];
    }
    void wait(void* stream, const Clock& clock) { join(before_[stream], clock); }
    void see(const Clock& clock) { join(seen_, clock); }
    void see(void* stream) { see(now(stream)); }
    // Nothing may use these bytes any more.
    void end(const char* what, std::uint64_t address, std::uint64_t nbytes) {
        const std::vector<Span> gone{{address, address + nbytes}};
        for (const Operation& old : running_)
            if (old.number > seen_[old.stream] && (meet(old.reads, gone) || meet(old.writes, gone)))
                faults.push_back(std::string(what) + " of memory that " + old.what + " uses");
        forget(address, nbytes);
    }
    // Other memory may be at these addresses soon.
    void forget(std::uint64_t address, std::uint64_t nbytes) {
        const std::vector<Span> gone{{address, address + nbytes}};
        std::erase_if(running_,
                      [&](const Operation& old) { return meet(old.reads, gone) || meet(old.writes, gone); });
    }
    void forget() { running_.clear(); }
    std::vector<std::string> faults;

  private:
    struct Operation {
        std::string what;
        void* stream;
        std::uint64_t number;  // in its stream, from 1
        std::vector<Span> reads, writes;
    };
    static bool conflict(const Operation& a, const Operation& b) {
        return meet(a.writes, b.writes) || meet(a.writes, b.reads) || meet(a.reads, b.writes);
    }
    std::map<void*, std::uint64_t> counts_;
    std::map<void*, Clock> before_;  // what is before the next operation of a stream
    Clock seen_;                     // to be over, by the host
    std::vector<Operation> running_;
};

}  // namespace fake
