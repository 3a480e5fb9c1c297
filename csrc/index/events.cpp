#include "index/events.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pdlink::index {
namespace {

using msgpack::Raw;
using msgpack::Reader;

constexpr std::array<std::string_view, Event::kNumFields> kNames = {
    "block_hashes", "parent_block_hash", "token_ids",          "block_size", "lora_id", "medium",     "lora_name",
    "extra_keys",   "group_idx",         "kv_cache_spec_kind", "model",      "scope",   "cache_salt", "locality"};
constexpr std::array kOfRemoved = {Event::kIds, Event::kMedium, Event::kGroup, Event::kLocality};

[[noreturn]] void refuse(std::string_view name, std::string_view what) {
    throw std::invalid_argument(std::string(name) + ": " + std::string(what));
}

// GPU is 0, memory of the host 1, disks and what nobody knows 2, memory of another host or of several 3: as vLLM,
// SGLang and their connectors call them.
unsigned medium_of(const std::optional<std::string_view>& name) {
    if (!name || name == "GPU") return 0;
    if (name == "CPU" || name == "CPU_PINNED" || name == "cpu") return 1;
    return name == "EXTERNAL" ? 3 : 2;
}

}  // namespace

Event::Event(Reader& from) {
    if (from.at_array()) {
        std::size_t num = from.array();
        if (num == 0) refuse("an event", "it is empty, expected its type");
        tag(from.text());
        for (std::size_t at = 0; --num; ++at) {
            const Raw value = from.any();
            if (kind_ == Kind::kStored && at < kNumFields) values_[at] = value;
            if (kind_ == Kind::kRemoved && at < kOfRemoved.size()) values_[kOfRemoved[at]] = value;
        }
    } else {
        bool known = false;
        for (std::size_t num = from.map(); num; --num) {
            const std::string_view name = from.text();
            if (name == "type") {
                tag(from.text());
                known = true;
                continue;
            }
            const Raw value = from.any();
            const auto at = std::ranges::find(kNames, name);
            if (at != kNames.end()) values_[static_cast<std::size_t>(at - kNames.begin())] = value;
        }
        if (!known) refuse("type", "missing");
    }
}

void Event::tag(std::string_view name) {
    if (name == "BlockStored") {
        kind_ = Kind::kStored;
    } else if (name == "BlockRemoved") {
        kind_ = Kind::kRemoved;
    } else if (name == "AllBlocksCleared") {
        kind_ = Kind::kCleared;
    } else {
        refuse("type", "expected BlockStored, BlockRemoved or AllBlocksCleared");
    }
}

void Event::need(Field field) const {
    if (values_[field].empty()) refuse(kNames[field], "missing");
}

template <class Read>
auto Event::read(Field field, Read&& read) const {
    need(field);
    try {
        Reader reader(values_[field]);
        return read(reader);
    } catch (const std::invalid_argument& error) {
        refuse(kNames[field], error.what());
    }
}

std::vector<Id> Event::ids() const { return read(kIds, msgpack::ids); }

std::vector<std::uint32_t> Event::tokens() const { return read(kTokens, msgpack::tokens); }

std::optional<Id> Event::parent() const {
    return read(kParent, [](Reader& reader) { return reader.null() ? std::nullopt : std::optional(reader.name()); });
}

std::uint64_t Event::block_tokens() const {
    return read(kBlockTokens, [](Reader& reader) { return reader.integer(); });
}

std::optional<std::uint64_t> Event::group() const {
    if (!has(kGroup)) return std::nullopt;
    return read(kGroup, [](Reader& reader) { return reader.integer(); });
}

std::optional<std::string_view> Event::text(Field field) const {
    if (!has(field)) return std::nullopt;
    return read(field, [](Reader& reader) { return reader.text(); });
}

std::optional<Reader> Event::extra_keys() const {
    if (!has(kExtraKeys)) return std::nullopt;
    return read(kExtraKeys, [](Reader& reader) {
        if (!reader.at_array()) throw std::invalid_argument("MessagePack: expected an array");
        return reader;
    });
}

unsigned Event::medium() const {
    const auto name = text(kMedium), locality = text(kLocality);
    return locality == "REMOTE" ? 3 : medium_of(name);
}

Events::Events(Raw batch) : reader_(batch) {
    const std::size_t num = reader_.array();
    if (num < 2) refuse("a batch", "expected a time and events");
    if (!reader_.at_number()) refuse("ts", "expected a number");
    reader_.any();
    num_ = reader_.array();
    num_after_ = num - 2;
}

std::optional<Event> Events::next() {
    if (num_ > 0) {
        --num_;
        return Event(reader_);
    }
    for (; num_after_ > 0; --num_after_) reader_.any();
    if (reader_.left()) refuse("a batch", "more follows it");
    return std::nullopt;
}

}  // namespace pdlink::index
