// Faults on purpose, which tools/sanitize.py does first: a run in which they are not reported could not report
// others.
#include <limits>
#include <thread>

extern "C" int heap_overflow(int at) {
    char* volatile bytes = new char[8]();  // volatile: only AddressSanitizer shall know how long it is
    const int found = bytes[at];
    delete[] bytes;
    return found;
}

extern "C" int signed_overflow(int by) { return std::numeric_limits<int>::max() + by; }

extern "C" int data_race(int by) {
    int sum = 0;
    const auto add = [&] {
        for (int i = 0; i < 1000; ++i) sum += by;
    };
    std::thread one(add), other(add);
    one.join();
    other.join();
    return sum;
}
