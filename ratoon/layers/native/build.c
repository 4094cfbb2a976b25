// What a library was built from (sources.py).
#include "kernels.h"

#ifndef RATOON_SOURCES
#define RATOON_SOURCES unknown
#endif
#define QUOTED(name) #name
#define AS_STRING(name) QUOTED(name)

const char *ratoon_sources(void) { return AS_STRING(RATOON_SOURCES); }
