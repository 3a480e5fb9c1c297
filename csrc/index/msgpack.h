// MessagePack, read and written without a Python object for each part: lists of token ids and block names are read.
// Source: the specification, https://github.com/msgpack/msgpack/blob/master/spec.md
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "index/prefixes.h"

namespace pdlink::index::msgpack {

class Reader {
  public:
    explicit Reader(std::span<const std::uint8_t> data) : data_(data) {}

    std::size_t array() {
        const std::uint8_t tag = byte();
        if ((tag & 0xF0) == 0x90) return checked(tag & 0x0F);
        if (tag == 0xDC) return checked(number(2));
        if (tag == 0xDD) return checked(number(4));
        throw std::invalid_argument("MessagePack: expected an array");
    }
    // Whether an array of two comes next; it is read up to its first element then.
    bool pair() {
        if (data_.empty() || data_.front() != 0x92) return false;
        byte();
        return true;
    }
    // An integer as it is, negative ones as two's complement; of a byte string its last eight bytes.
    std::uint64_t name() {
        const std::uint8_t tag = byte();
        if (tag < 0x80) return tag;
        if (tag >= 0xE0) return static_cast<std::uint64_t>(static_cast<std::int8_t>(tag));
        switch (tag) {
            case 0xCC:
                return number(1);
            case 0xCD:
                return number(2);
            case 0xCE:
                return number(4);
            case 0xCF:
                return number(8);
            case 0xD0:
                return static_cast<std::uint64_t>(static_cast<std::int8_t>(number(1)));
            case 0xD1:
                return static_cast<std::uint64_t>(static_cast<std::int16_t>(number(2)));
            case 0xD2:
                return static_cast<std::uint64_t>(static_cast<std::int32_t>(number(4)));
            case 0xD3:
                return number(8);
            case 0xC4:
                return tail(number(1));
            case 0xC5:
                return tail(number(2));
            case 0xC6:
                return tail(number(4));
            default:
                throw std::invalid_argument("MessagePack: expected an integer or bytes");
        }
    }

  private:
    std::uint8_t byte() {
        if (data_.empty()) throw std::invalid_argument("MessagePack: the data end too early");
        const std::uint8_t first = data_.front();
        data_ = data_.subspan(1);
        return first;
    }
    std::uint64_t number(std::size_t nbytes) {
        std::uint64_t value = 0;
        while (nbytes--) value = value << 8 | byte();
        return value;
    }
    std::uint64_t tail(std::size_t nbytes) {
        if (nbytes > data_.size()) throw std::invalid_argument("MessagePack: the data end too early");
        data_ = data_.subspan(nbytes - std::min<std::size_t>(nbytes, 8));
        return number(std::min<std::size_t>(nbytes, 8));
    }
    std::size_t checked(std::size_t length) const {  // each element takes a byte at least
        if (length > data_.size()) throw std::invalid_argument("MessagePack: the data end too early");
        return length;
    }
    std::span<const std::uint8_t> data_;
};

class Writer {
  public:
    void map(std::size_t size) { put(0xDE, size, 2); }
    void array(std::size_t size) { put(0xDC, size, 2); }
    void text(std::string_view text) {
        put(0xDB, text.size(), 4);
        data_ += text;
    }
    void number(std::size_t value) { put(0xCF, value, 8); }
    void number(double value) { put(0xCB, std::bit_cast<std::uint64_t>(value), 8); }

    const std::string& data() const { return data_; }

  private:
    void put(std::uint8_t tag, std::uint64_t value, std::size_t nbytes) {
        data_ += static_cast<char>(tag);
        while (nbytes--) data_ += static_cast<char>(value >> 8 * nbytes);
    }
    std::string data_;
};

inline Id id(std::span<const std::uint8_t> data) { return Reader(data).name(); }

inline std::vector<Id> ids(std::span<const std::uint8_t> data) {
    Reader reader(data);
    std::vector<Id> found(reader.array());
    for (Id& each : found) each = reader.name();
    return found;
}

// SGLang with EAGLE tells pairs: each token with the next one.
inline std::vector<std::uint32_t> tokens(std::span<const std::uint8_t> data) {
    Reader reader(data);
    std::vector<std::uint32_t> found(reader.array());
    for (std::uint32_t& each : found) {
        const bool pair = reader.pair();
        const std::uint64_t token = reader.name();
        if (pair) reader.name();
        if (token > UINT32_MAX) throw std::invalid_argument("token id: above 4294967295");
        each = static_cast<std::uint32_t>(token);
    }
    return found;
}

}  // namespace pdlink::index::msgpack
