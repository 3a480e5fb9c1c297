// Division by a number that is fixed for a whole launch, without the instruction.
#pragma once

#include <cstdint>

#include "cuda/access.h"

namespace pdlink::cuda {

// n / divisor for 0 <= n < 2^31, as one multiplication and a shift (Granlund and Montgomery 1994). With
// m = floor(2^(31+L) / d) + 1 and L = ceil(log2 d), n * m exceeds n * 2^(31+L) / d by at most n < 2^31 <= 2^(31+L) /
// d, so the quotient is never rounded up past the next integer.
class Divider {
  public:
    Divider() = default;
    // divisor: 1 .. 2^31
    explicit Divider(std::uint32_t divisor) : divisor_(divisor) {
        std::uint32_t log = 0;
        while (std::uint64_t{1} << log < divisor) ++log;
        shift_ = 31 + log;
        multiplier_ = static_cast<std::uint32_t>((std::uint64_t{1} << shift_) / divisor + 1);
    }

    PDLINK_HD std::uint32_t divisor() const { return divisor_; }
    PDLINK_HD std::uint32_t divide(std::uint32_t n) const {
        return static_cast<std::uint32_t>(std::uint64_t{n} * multiplier_ >> shift_);
    }
    // For any n >= 0. The slow way is only taken by numbers that few caches reach.
    PDLINK_HD std::int64_t divide_any(std::int64_t n) const {
        if (divisor_ == 1) return n;
        return n < (std::int64_t{1} << 31) ? divide(static_cast<std::uint32_t>(n)) : n / divisor_;
    }

  private:
    std::uint32_t divisor_ = 1;
    std::uint32_t multiplier_ = (std::uint32_t{1} << 31) + 1;
    std::uint32_t shift_ = 31;
};

}  // namespace pdlink::cuda
