// How the name of a gate comes from Python, and gets there.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "common/gate.h"

namespace pdlink {

namespace nb = nanobind;

// A gate in an invitation: descriptor in its process, device, inode, nonce.
using PyGate = std::tuple<int, std::uint64_t, std::uint64_t, nb::bytes>;

inline PyGate py_gate(const GateName& gate) {
    return {gate.fd, gate.device, gate.inode, nb::bytes(gate.nonce.data(), gate.nonce.size())};
}

// Throws std::invalid_argument.
inline GateName gate_name(const PyGate& gate) {
    const auto& [fd, device, inode, said] = gate;
    GateName name{fd, device, inode, {}};
    if (said.size() != name.nonce.size()) throw std::invalid_argument("a gate's nonce has 16 bytes");
    std::memcpy(name.nonce.data(), said.data(), said.size());
    return name;
}

}  // namespace pdlink
