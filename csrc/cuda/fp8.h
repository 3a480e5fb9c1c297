// bfloat16 <-> float8 e4m3fn with a scale, the same bits on a CPU and on every GPU.
//
// Quantising multiplies by the reciprocal of the scale (in float32, rounded once), rounds to nearest even and
// saturates: what is beyond ±448, infinity too, becomes ±448, because e4m3fn has no infinity and torch's plain cast
// would make NaN of it. NaN becomes 0x7f whatever its sign, and 0x7fff on the way back: that is what the hardware
// does. Dequantising multiplies by the scale in float32 and rounds to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/access.h"

namespace pdlink::cuda {

PDLINK_HD float as_float(std::uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

PDLINK_HD std::uint32_t as_bits(float f) {
    std::uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

PDLINK_HD std::uint32_t fp8_of(float f) {
    const std::uint32_t bits = as_bits(f);
    const std::uint32_t sign = bits >> 24 & 0x80;
    std::uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
    if (magnitude < 0x3c800000)                       // below 2^-6 the steps are 2^-9: so are those of floats at 2^14
        return sign | (as_bits(as_float(magnitude) + 16384.0f) - as_bits(16384.0f));
    magnitude += 0x7ffff + (magnitude >> 20 & 1);    // to nearest even in the 20 bits that go
    return sign | ((magnitude >> 20) - (120 << 3));  // exponent bias 127 -> 7
}

PDLINK_HD float float_of_fp8(std::uint32_t byte) {
    const std::uint32_t magnitude = byte & 0x7f;
    float f = as_float((magnitude << 20) + (120u << 23));
    if (magnitude < 8) f = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9
    if (magnitude == 0x7f) f = as_float(0x7fffffff);
    return as_float(as_bits(f) | (byte & 0x80) << 24);
}

PDLINK_HD std::uint32_t bf16_of(float f) {
    const std::uint32_t bits = as_bits(f);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

PDLINK_HD float float_of_bf16(std::uint32_t half) { return as_float(half << 16); }

// Two bf16, the first in the low half, to two fp8 likewise.
PDLINK_HD std::uint32_t quantize_pair(std::uint32_t pair, float reciprocal) {
    const float low = float_of_bf16(pair & 0xffff) * reciprocal, high = float_of_bf16(pair >> 16) * reciprocal;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
#else
    return fp8_of(low) | fp8_of(high) << 8;
#endif
}

// The reverse.
PDLINK_HD std::uint32_t dequantize_pair(std::uint32_t pair, float scale) {
#if defined(__CUDA_ARCH__)
    float low, high;
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b32 both; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {l, h}, both;"
        " cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "h"(static_cast<std::uint16_t>(pair)));
#else
    low = float_of_fp8(pair & 0xff), high = float_of_fp8(pair >> 8 & 0xff);
#endif
    std::uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high * scale), "f"(low * scale));
    return out;
#else
    const float low = float_of_fp8(pair & 0xff) * scale, high = float_of_fp8(pair >> 8 & 0xff) * scale;
    return bf16_of(low) | bf16_of(high) << 16;
#endif
}

}  // namespace pdlink::cuda
