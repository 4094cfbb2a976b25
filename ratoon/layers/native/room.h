// Memory of the calling thread that is kept from call to call: new memory would cost more than a small call.
#pragma once
#include <stddef.h>
#include <stdlib.h>

typedef struct {
    void *memory;
    size_t size;
} room;

// From a cache line on; what was in it is lost when it grows. NULL: there is no memory.
static inline void *at_least(room *room, size_t size) {
    if (room->size < size) {
        size = (size + 63) / 64 * 64;
        free(room->memory);
        room->memory = aligned_alloc(64, size);
        room->size = room->memory ? size : 0;
    }
    return room->memory;
}
