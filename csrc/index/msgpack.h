// MessagePack, read and written without a Python object for each part: lists of token ids and block names are read.
// Source: the specification, https://github.com/msgpack/msgpack/blob/master/spec.md
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "index/prefixes.h"

namespace pdlink::index::msgpack {

using Raw = std::span<const std::uint8_t>;  // a whole value, most often

// By its first byte, how many more bytes a value has; kOther where that is not enough to know.
constexpr std::uint8_t kOther = 0xFF;
constexpr std::array<std::uint8_t, 256> kMore = [] {
    std::array<std::uint8_t, 256> more;
    more.fill(kOther);
    std::fill(more.begin(), more.begin() + 0x80, 0);  // small integers
    std::fill(more.begin() + 0xE0, more.end(), 0);
    for (std::uint8_t nbytes = 0; nbytes < 32; ++nbytes) more[0xA0 + nbytes] = nbytes;  // texts
    more[0xC0] = more[0xC2] = more[0xC3] = 0;                                           // null, false, true
    more[0xCA] = 4, more[0xCB] = 8;                                                     // floats
    for (std::uint8_t power = 0; power < 4; ++power) more[0xCC + power] = more[0xD0 + power] = 1 << power;
    for (std::uint8_t power = 0; power < 5; ++power) more[0xD4 + power] = 1 + (1 << power);  // extensions
    return more;
}();

class Reader {
  public:
    explicit Reader(Raw data) : data_(data) {}

    std::size_t left() const { return data_.size(); }
    bool at_array() const { return !data_.empty() && (data_[0] >> 4 == 0x9 || data_[0] == 0xDC || data_[0] == 0xDD); }
    bool at_integer() const {
        return !data_.empty() && (data_[0] < 0x80 || data_[0] >= 0xE0 || (data_[0] >= 0xCC && data_[0] <= 0xD3));
    }
    bool at_text() const {
        return !data_.empty() && (data_[0] >> 5 == 0x5 || (data_[0] >= 0xD9 && data_[0] <= 0xDB));
    }
    bool at_number() const { return at_integer() || (!data_.empty() && (data_[0] == 0xCA || data_[0] == 0xCB)); }
    std::size_t array() {
        const std::uint8_t tag = byte();
        if ((tag & 0xF0) == 0x90) return checked(tag & 0x0F);
        if (tag == 0xDC) return checked(number(2));
        if (tag == 0xDD) return checked(number(4));
        throw std::invalid_argument("MessagePack: expected an array");
    }
    std::size_t map() {
        const std::uint8_t tag = byte();
        if ((tag & 0xF0) == 0x80) return checked(tag & 0x0F);
        if (tag == 0xDE) return checked(number(2));
        if (tag == 0xDF) return checked(number(4));
        throw std::invalid_argument("MessagePack: expected a map");
    }
    std::string_view text() {
        const std::uint8_t tag = byte();
        std::size_t nbytes = tag & 0x1F;
        if (tag >= 0xD9 && tag <= 0xDB) {
            nbytes = number(std::size_t{1} << (tag - 0xD9));
        } else if ((tag & 0xE0) != 0xA0) {
            throw std::invalid_argument("MessagePack: expected text");
        }
        const Raw found = take(nbytes);
        return {reinterpret_cast<const char*>(found.data()), found.size()};
    }
    // Whether null comes next, which is read then.
    bool null() {
        if (data_.empty() || data_.front() != 0xC0) return false;
        byte();
        return true;
    }
    // Any value. Its parts are counted, so depth costs nothing.
    Raw any() {
        const Raw before = data_;
        for (std::uint64_t num = 1; num; --num) {
            const std::uint8_t tag = byte();
            const std::uint8_t more = kMore[tag];
            if (more < kOther) {
                take(more);
            } else if (tag >> 4 == 0x9 || tag == 0xDC || tag == 0xDD) {
                num += again().array();
            } else if (tag >> 4 == 0x8 || tag == 0xDE || tag == 0xDF) {
                num += std::uint64_t{2} * again().map();
            } else if (tag >= 0xC4 && tag <= 0xC6) {
                take(number(std::size_t{1} << (tag - 0xC4)));
            } else if (tag >= 0xC7 && tag <= 0xC9) {
                take(number(std::size_t{1} << (tag - 0xC7)) + 1);
            } else if (tag >= 0xD9 && tag <= 0xDB) {
                take(number(std::size_t{1} << (tag - 0xD9)));
            } else {
                throw std::invalid_argument("MessagePack: no value begins so");
            }
        }
        return before.first(before.size() - data_.size());
    }
    // Whether an array of two comes next; it is read up to its first element then.
    bool pair() {
        if (data_.empty() || data_.front() != 0x92) return false;
        byte();
        return true;
    }
    std::uint64_t integer() {
        if (!at_integer()) throw std::invalid_argument("MessagePack: expected an integer");
        return name();
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
    Reader& again() {  // the byte that was read comes next
        data_ = {data_.data() - 1, data_.size() + 1};
        return *this;
    }
    Raw take(std::uint64_t nbytes) {
        if (nbytes > data_.size()) throw std::invalid_argument("MessagePack: the data end too early");
        const Raw found = data_.first(nbytes);
        data_ = data_.subspan(nbytes);
        return found;
    }
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
        const Raw whole = take(nbytes);
        return Reader(whole.last(std::min<std::size_t>(nbytes, 8))).number(std::min<std::size_t>(nbytes, 8));
    }
    std::size_t checked(std::size_t length) const {  // each element takes a byte at least
        if (length > data_.size()) throw std::invalid_argument("MessagePack: the data end too early");
        return length;
    }
    Raw data_;
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

inline std::vector<Id> ids(Reader& reader) {
    std::vector<Id> found(reader.array());
    for (Id& each : found) each = reader.name();
    return found;
}

// SGLang with EAGLE tells pairs: each token with the next one.
inline std::vector<std::uint32_t> tokens(Reader& reader) {
    std::vector<std::uint32_t> found(reader.array());
    for (std::uint32_t& each : found) {
        const bool pair = reader.pair();
        const std::uint64_t token = reader.integer();
        if (pair) reader.name();
        if (token > UINT32_MAX) throw std::invalid_argument("a token id: expected 0 to 4294967295");
        each = static_cast<std::uint32_t>(token);
    }
    return found;
}

}  // namespace pdlink::index::msgpack
