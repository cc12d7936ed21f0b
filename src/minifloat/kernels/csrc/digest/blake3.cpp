#include "blake3.h"

namespace MINIFLOAT_ISA {

// dispatch.cpp declares these two functions for every instruction set.
void blake3_update(minifloat_blake3& state, const uint8_t* data, int64_t bytes) { add_bytes(state, data, bytes); }

void blake3_finish(const minifloat_blake3& state, uint8_t* digest) {
    uint32_t value[kWords];
    finish(state, value);
    __builtin_memcpy(digest, value, sizeof value);
}

}  // namespace MINIFLOAT_ISA
