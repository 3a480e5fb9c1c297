// Every kernel by name, once: nvcc makes __global__ functions of the list, the C++ compiler a table of loops.
#pragma once

#include "cuda/reshape.h"

// X(bytes of a unit)
#define PDLINK_UNITS(X) X(16) X(8) X(4) X(2) X(1)
