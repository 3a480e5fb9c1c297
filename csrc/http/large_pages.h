// Memory of this process in pages of 2 MiB, where the system has such for who asks. A request touches some hundred
// places, and each place in a page of its own is looked up in page tables, under a hypervisor in two of them.
#pragma once

namespace pdlink::http {

// From now on Python takes the memory for its small objects from such pages. Python does not give the arenas that it
// has already another place.
void take_arenas_from_large_pages();

// Moves what is in the heap now into such pages.
void move_heap_to_large_pages();

}  // namespace pdlink::http
