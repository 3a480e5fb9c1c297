// Events about KV in MessagePack, as engines publish them: those of vLLM 0.32 and SGLang 0.5.23, which are maps, and
// of older SGLang, which are arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "index/msgpack.h"

namespace pdlink::index {

// One event. Its fields are judged when they are asked for: each throws std::invalid_argument, which names the field,
// for a value of another kind. Other fields are passed over.
class Event {
  public:
    enum class Kind { kStored, kRemoved, kCleared };
    // Of kStored in the order of arrays; kRemoved has four of them.
    enum Field : std::size_t {
        kIds,
        kParent,
        kTokens,
        kBlockTokens,
        kLora,
        kMedium,
        kLoraName,
        kExtraKeys,
        kGroup,
        kSpec,
        kModel,
        kScope,
        kSalt,
        kLocality,
        kNumFields
    };

    explicit Event(msgpack::Reader& from);

    Kind kind() const { return kind_; }
    // Throws unless it is there.
    void need(Field field) const;
    // Whether it is there and not null.
    bool has(Field field) const { return !values_[field].empty() && values_[field].front() != 0xC0; }
    std::vector<Id> ids() const;
    std::vector<std::uint32_t> tokens() const;
    std::optional<Id> parent() const;
    std::uint64_t block_tokens() const;
    std::optional<std::uint64_t> group() const;
    std::optional<std::string_view> text(Field field) const;
    // Its array, to be read; nothing if it is null.
    std::optional<msgpack::Reader> extra_keys() const;
    unsigned medium() const;  // the quickest first

  private:
    template <class Read>
    auto read(Field field, Read&& read) const;
    void tag(std::string_view name);

    Kind kind_{};
    std::array<msgpack::Raw, kNumFields> values_{};  // empty for one that is not there
};

// Those of one batch, in order. The bytes must outlive it.
class Events {
  public:
    // Throws std::invalid_argument, as `next` does, for other bytes.
    explicit Events(msgpack::Raw batch);

    // Nothing at the end.
    std::optional<Event> next();
    std::size_t nbytes_left() const { return reader_.left(); }

  private:
    msgpack::Reader reader_;
    std::size_t num_ = 0, num_after_ = 0;  // events, and what else the batch has behind them
};

}  // namespace pdlink::index
