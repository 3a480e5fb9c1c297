// Every kernel by name, once: nvcc makes __global__ functions of the list, the C++ compiler a table of loops.
#pragma once

#include "cuda/reshape.h"
#include "cuda/runs.h"

// X(name, what becomes of a unit)
#define PDLINK_MOVES(X)             \
    X(copy16, Copy<16>)             \
    X(copy8, Copy<8>)               \
    X(copy4, Copy<4>)               \
    X(copy2, Copy<2>)               \
    X(copy1, Copy<1>)               \
    X(quantize16, QuantizeWide)     \
    X(quantize1, QuantizeNarrow)    \
    X(dequantize16, DequantizeWide) \
    X(dequantize1, DequantizeNarrow)
