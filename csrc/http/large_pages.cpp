#include "http/large_pages.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace pdlink::http {
namespace {

constexpr std::size_t kLargeNbytes = 2 << 20;

// As CPython's, which its stable interface leaves out.
struct ArenaAllocator {
    void* context;
    void* (*alloc)(void* context, std::size_t nbytes);
    void (*free)(void* context, void* memory, std::size_t nbytes);
};

std::uintptr_t up(std::uintptr_t address) { return (address + kLargeNbytes - 1) / kLargeNbytes * kLargeNbytes; }

// A large page at a time; null if there is no memory.
char* large_page() {
    void* const found = ::mmap(nullptr, 2 * kLargeNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    char* const begin = static_cast<char*>(found);
    char* const page =
        begin + (up(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin));
    const auto before = static_cast<std::size_t>(page - begin);
    if (before != 0) ::munmap(begin, before);
    ::munmap(page + kLargeNbytes, kLargeNbytes - before);
    ::madvise(page, kLargeNbytes, MADV_HUGEPAGE);
    return page;
}

// The system gives nobody such pages. A move would get them all the same.
bool refused() {
    std::string said;
    std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), said);
    return said.find("[never]") != std::string::npos;
}

// Called with the GIL held. Never destroyed: Python frees arenas until the very end.
struct Arenas {
    ArenaAllocator usual{};                // has the arenas of before, and of other sizes
    std::size_t nbytes = 0;                // of an arena, all of which have one size
    std::vector<void*> spare;              // of those taken from large pages
    std::unordered_set<const void*> used;  // the others of these

    void* take(std::size_t wanted) {
        if (nbytes == 0) nbytes = wanted;
        if (wanted != nbytes || kLargeNbytes % nbytes != 0) return usual.alloc(usual.context, wanted);
        if (spare.empty()) {
            char* const page = large_page();
            if (page == nullptr) return nullptr;
            for (std::size_t at = kLargeNbytes; at > 0; at -= nbytes) spare.push_back(page + at - nbytes);
        }
        void* const found = spare.back();
        spare.pop_back();
        used.insert(found);
        return found;
    }

    void give_back(void* arena, std::size_t size) {
        if (used.erase(arena) == 0) return usual.free(usual.context, arena, size);
        ::madvise(arena, size, MADV_DONTNEED);
        spare.push_back(arena);
    }
};

}  // namespace

void take_arenas_from_large_pages() {
    using Access = void (*)(ArenaAllocator*);
    const auto get = reinterpret_cast<Access>(::dlsym(RTLD_DEFAULT, "PyObject_GetArenaAllocator"));
    const auto set = reinterpret_cast<Access>(::dlsym(RTLD_DEFAULT, "PyObject_SetArenaAllocator"));
    static Arenas* arenas = nullptr;
    if (get == nullptr || set == nullptr || arenas != nullptr || refused()) return;
    arenas = new Arenas;
    get(&arenas->usual);
    ArenaAllocator mine{
        arenas, [](void* self, std::size_t nbytes) { return static_cast<Arenas*>(self)->take(nbytes); },
        [](void* self, void* arena, std::size_t nbytes) { static_cast<Arenas*>(self)->give_back(arena, nbytes); }};
    set(&mine);
}

void move_heap_to_large_pages() {
    if (refused()) return;
    std::ifstream maps("/proc/self/maps");
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> found;  // first, as a move changes the maps
    for (std::string line; std::getline(maps, line);) {
        unsigned long begin = 0, end = 0;
        char rights[5] = {}, name[8] = {};
        const int read = std::sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %*s %7s", &begin, &end, rights, name);
        const bool is_heap = read == 3 || (read == 4 && std::string_view(name) == "[heap]");
        if (is_heap && std::string_view(rights) == "rw-p" && up(begin) + kLargeNbytes <= end)
            found.emplace_back(up(begin), end / kLargeNbytes * kLargeNbytes);
    }
    for (const auto& [begin, end] : found) {
        // Page by page: one that cannot be had leaves the others. One that has a single small page in use is made
        // whole.
        for (std::uintptr_t at = begin; at < end; at += kLargeNbytes)
            ::madvise(reinterpret_cast<void*>(at), kLargeNbytes, MADV_COLLAPSE);
    }
}

}  // namespace pdlink::http
