// Reading source elements and writing codes: plain loops that the compiler vectorises, and amax, which needs no
// conversion.
#pragma once

#include "../vec.h"

namespace MINIFLOAT_ISA {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;  // also the mask of the exponent field
constexpr int kMantissaBits = 23;
constexpr int kBias = 127;

// The largest magnitude of `count` floats of the width of T, as its bits: without sign they are ordered as integers.
template <class Vector, class T>
inline T largest_magnitude(const uint8_t* src, int64_t count) {
    constexpr int kCount = sizeof(Vector) / sizeof(T);
    constexpr T kMask = static_cast<T>(~(T(1) << (8 * sizeof(T) - 1)));
    Vector largest = {};
    int64_t i = 0;
    for (; i + kCount <= count; i += kCount) {
        Vector v;
        __builtin_memcpy(&v, src + i * sizeof(T), sizeof v);
        largest = max(largest, v & kMask);
    }
    if (i < count) {
        Vector v = {};
        __builtin_memcpy(&v, src + i * sizeof(T), (count - i) * sizeof(T));
        largest = max(largest, v & kMask);
    }
    return fold<kCount, T>(largest, Max());
}

// A source dtype: exact conversion to float32, and amax as the bits of a float32.
struct Bf16 {
    static constexpr int kBytes = 2;
    static float to_float(const uint8_t* p) {
        uint16_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    static int32_t amax_bits(const uint8_t* src, int64_t count) {
        return largest_magnitude<I16, int16_t>(src, count) << 16;
    }
};

struct F16 {
    static constexpr int kBytes = 2;
    static float to_float(const uint8_t* p) {
        uint16_t half;
        __builtin_memcpy(&half, p, sizeof half);
        return from_half(half);
    }
    static int32_t amax_bits(const uint8_t* src, int64_t count) {
        return bit_cast<int32_t>(from_half(static_cast<uint16_t>(largest_magnitude<I16, int16_t>(src, count))));
    }
    // By integer arithmetic, which needs no F16C.
    static float from_half(uint16_t half) {
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

struct Float32 {
    static constexpr int kBytes = 4;
    static float to_float(const uint8_t* p) {
        float value;
        __builtin_memcpy(&value, p, sizeof value);
        return value;
    }
    static int32_t amax_bits(const uint8_t* src, int64_t count) { return largest_magnitude<I32, int32_t>(src, count); }
};

template <class Source>
inline int64_t count_nonfinite(const uint8_t* src, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i)
        total += (bit_cast<int32_t>(Source::to_float(src + i * Source::kBytes)) & kMagnitude) >= kInfinity;
    return total;
}

// Reads `count` elements; zeros follow up to the next multiple of `multiple`.
template <class Source>
inline void load_chunk(const uint8_t* __restrict src, int count, int multiple, float* __restrict out) {
    for (int i = 0; i < count; ++i) out[i] = Source::to_float(src + static_cast<int64_t>(i) * Source::kBytes);
    const int padded = (count + multiple - 1) / multiple * multiple;
    for (int i = count; i < padded; ++i) out[i] = 0.0f;
}

// The low byte of each code.
inline void store_bytes(const int32_t* __restrict codes, int count, uint8_t* __restrict out) {
    for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(codes[i]);
}

// Two codes of four bits to a byte, the even one in the low nibble; `count` is even, bits 4 to 7 of a code are zero.
inline void store_nibbles(const int32_t* __restrict codes, int count, uint8_t* __restrict out) {
    for (int i = 0; i < count / 2; ++i) {
        const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
        out[i] = static_cast<uint8_t>(low | high << 4);
    }
}

}  // namespace MINIFLOAT_ISA
