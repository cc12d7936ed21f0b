// From file to file: reads a weight a slab at a time, hashes it, casts it and writes the codes, all while the slab is in
// the cache.
#pragma once

#include "../api.h"

namespace minifloat {

// The functions of one instruction set that work on a slab in memory.
struct SlabFunctions {
    void (*quantize_rows)(minifloat_quantize_rows_args&);
    void (*amax)(minifloat_amax_args&);
    void (*blake3_update)(minifloat_blake3&, const uint8_t*, int64_t);
};

int32_t stream(minifloat_stream_args& args, const SlabFunctions& functions);

}  // namespace minifloat
