// Source elements to float32 (exact), and codes to bytes: plain loops that the compiler vectorises.
#pragma once

#include "../vec.h"

namespace MINIFLOAT_ISA {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;  // also the mask of the exponent field
constexpr int kMantissaBits = 23;
constexpr int kBias = 127;

struct Bf16 {
    static constexpr int kBytes = 2;
    static float to_float(const uint8_t* p) {
        uint16_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
};

struct F16 {
    static constexpr int kBytes = 2;
    // By integer arithmetic: no dependence on F16C, nor on a processor flag that flushes subnormals.
    static float to_float(const uint8_t* p) {
        uint16_t half;
        __builtin_memcpy(&half, p, sizeof half);
        const uint32_t magnitude = half & 0x7fffu;
        const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
        const uint32_t rebias = (kBias - 15) << kMantissaBits;
        uint32_t bits = (magnitude << 13) + rebias;
        bits += magnitude >= 0x7c00u ? rebias : 0u;  // Inf and NaN: exponent 31 becomes 255
        const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
        bits = magnitude < 0x400u ? bit_cast<uint32_t>(subnormal) : bits;
        return bit_cast<float>(bits | sign);
    }
};

struct F32Source {
    static constexpr int kBytes = 4;
    static float to_float(const uint8_t* p) {
        float value;
        __builtin_memcpy(&value, p, sizeof value);
        return value;
    }
};

// Reads `count` elements; zeros follow up to the next multiple of `multiple`, whose end is returned.
template <class Source>
inline int load_chunk(const uint8_t* __restrict src, int count, int multiple, float* __restrict out) {
    for (int i = 0; i < count; ++i) out[i] = Source::to_float(src + static_cast<int64_t>(i) * Source::kBytes);
    const int padded = (count + multiple - 1) / multiple * multiple;
    for (int i = count; i < padded; ++i) out[i] = 0.0f;
    return padded;
}

inline void store_bytes(const int32_t* __restrict codes, int count, uint8_t* __restrict out) {
    for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(codes[i]);
}

// Two codes to a byte, the even one in the low nibble; `count` is even.
inline void store_nibbles(const int32_t* __restrict codes, int count, uint8_t* __restrict out) {
    for (int i = 0; i < count / 2; ++i) out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

}  // namespace MINIFLOAT_ISA
