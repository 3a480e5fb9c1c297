#include "index/kv_index.h"

#include <algorithm>
#include <cstring>

namespace pdlink::index {
namespace {

using msgpack::Raw;
using msgpack::Reader;

constexpr std::size_t kTurnNbytes = 1 << 16;
constexpr std::uint64_t kMaxBlockTokens = 1 << 20;

// Kinds of KV of which a prefix needs all blocks. Those of sliding windows and recurrent states say little.
bool keeps_whole(const std::optional<std::string_view>& spec) {
    return !spec || spec == "full_attention" || spec == "mla_attention";
}

// Of a root that ends with one more name: a text, or another value in MessagePack. Its bit of kMedia, which no prefix
// has, keeps names apart from tokens.
Key named(Key root, bool text, const void* data, std::size_t nbytes) {
    std::vector<std::uint32_t> words(2 + (nbytes + 3) / 4);
    words[0] = text;
    words[1] = static_cast<std::uint32_t>(nbytes);
    if (nbytes) std::memcpy(&words[2], data, nbytes);
    return follow(root, words) | 1;
}

Key named(Key root, std::string_view text) { return named(root, true, text.data(), text.size()); }

// The extra keys of a block that has no others than the name of its LoRA: its tokens say what is in it.
bool is_usual(Raw keys, const std::optional<std::string_view>& lora) {
    Reader reader(keys);
    if (reader.null()) return true;
    if (!reader.at_array() || reader.array() != 1) return false;
    if (reader.null()) return !lora;
    return reader.at_text() && lora == reader.text();
}

}  // namespace

bool KVIndex::apply(Holder publisher, std::string_view model, std::string_view scope, Events& events) {
    if (publisher >= groups_.size()) groups_.resize(publisher + 1);
    const std::size_t before = events.nbytes_left();
    while (before - events.nbytes_left() < kTurnNbytes) {
        const std::optional<Event> event = events.next();
        if (!event) return false;
        if (event->kind() == Event::Kind::kStored) {
            stored(publisher, model, scope, *event);
        } else if (event->kind() == Event::Kind::kCleared) {
            forget(publisher);
        } else {
            event->need(Event::kIds);
            const Key medium = Key{1} << event->medium();
            const auto group = event->group();
            if (!groups_[publisher].known || group != groups_[publisher].number) continue;
            const std::vector<Id> ids = event->ids();
            for (Prefixes& prefixes : by_size_) prefixes.removed(publisher, medium, ids);
        }
    }
    return true;
}

void KVIndex::stored(Holder publisher, std::string_view model, std::string_view scope, const Event& event) {
    for (const Event::Field field : {Event::kIds, Event::kParent, Event::kTokens}) event.need(field);
    const std::uint64_t block_tokens = event.block_tokens();
    const auto group = event.group();
    const auto lora = event.text(Event::kLoraName), spec = event.text(Event::kSpec), salt = event.text(Event::kSalt),
               of_model = event.text(Event::kModel), of_scope = event.text(Event::kScope);
    auto extra = event.extra_keys();
    const Key medium = Key{1} << event.medium();

    const bool scoped = !scope.empty() && of_scope && !of_scope->empty();
    if (scoped ? *of_scope != scope : of_model && *of_model != model) return;
    if (!keeps_whole(spec) || block_tokens < 1 || block_tokens > kMaxBlockTokens) return;
    Group& counts = groups_[publisher];
    if (!counts.known) counts = {true, group};
    if (group != counts.number) return;

    Key root = named(0, model);
    if (!extra) {
        for (const auto& name : {lora, salt})
            if (name && !name->empty()) root = named(root, *name);
    } else if (std::size_t num = extra->array()) {
        const Raw first = extra->any();
        // Images and the like: their tokens do not say what is in them.
        if (event.has(Event::kParent) && !is_usual(first, lora)) return;
        while (--num)
            if (!is_usual(extra->any(), lora)) return;
        if (Reader names(first); names.at_array())
            for (std::size_t left = names.array(); left; --left) {
                const bool text = names.at_text();
                if (text) {
                    root = named(root, names.text());
                } else {
                    const Raw value = names.any();
                    root = named(root, false, value.data(), value.size());
                }
            }
    }
    Prefixes* const prefixes = of_size(block_tokens);
    if (!prefixes) return;
    // Not before: what concerns nobody here may have other names and tokens than ours.
    const std::vector<Id> ids = event.ids();
    const std::vector<std::uint32_t> tokens = event.tokens();
    const std::optional<Id> parent = event.parent();
    prefixes->stored(publisher, medium, ids, parent ? &*parent : nullptr, root, tokens);
}

Prefixes* KVIndex::of_size(std::size_t block_tokens) {
    for (Prefixes& prefixes : by_size_)
        if (prefixes.block_tokens() == block_tokens) return &prefixes;
    if (by_size_.size() == max_sizes_) return nullptr;
    return &by_size_.emplace_back(block_tokens, max_blocks_);
}

void KVIndex::forget(Holder publisher) {
    if (publisher < groups_.size()) groups_[publisher] = {};
    for (Prefixes& prefixes : by_size_) prefixes.cleared(publisher);
    std::erase_if(by_size_, [](const Prefixes& prefixes) { return prefixes.num_blocks() == 0; });
}

Held KVIndex::held(std::string_view model, std::span<const std::string_view> extra,
                   std::span<const std::uint32_t> tokens) {
    Key root = named(0, model);
    for (const std::string_view name : extra) root = named(root, name);
    return publishers_.held(by_size_, root, tokens);
}

std::size_t KVIndex::num_blocks() const {
    std::size_t sum = 0;
    for (const Prefixes& prefixes : by_size_) sum += prefixes.num_blocks();
    return sum;
}

std::size_t KVIndex::nbytes() const {
    std::size_t sum = 0;
    for (const Prefixes& prefixes : by_size_) sum += prefixes.nbytes();
    return sum;
}

}  // namespace pdlink::index
