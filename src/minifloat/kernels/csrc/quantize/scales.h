// Computes the scales of blocks from their amax, with the operations of numerics/scale_rules.py.
#pragma once

#include "encode.h"

namespace MINIFLOAT_ISA {

// Maximum number of blocks whose scales are chosen together: the blocks of one chunk of columns.
constexpr int kMaxBlocks = 64;
constexpr int kMaxE8M0 = 2 * kBias;  // E8M0 has the exponent field and bias of float32; 255 is NaN

struct BlockScales {
    int32_t amax[kMaxBlocks];   // bits of a float32 magnitude
    int32_t code[kMaxBlocks];   // coded scale in the low byte; not stored for float32 scales
    float scale[kMaxBlocks];    // multiplies to dequantize
    float inverse[kMaxBlocks];  // exact reciprocal, only of E8M0
};

inline float power_of_two(int32_t e8m0) {
    const int32_t subnormal = 1 << (kMantissaBits - 1);  // 2**-127
    return bit_cast<float>(e8m0 == 0 ? subnormal : e8m0 << kMantissaBits);
}

inline void set_e8m0(BlockScales& s, int block, int32_t code) {
    s.code[block] = code;
    s.scale[block] = power_of_two(code);
    s.inverse[block] = power_of_two(kMaxE8M0 - code);
}

// `amax`: bits of a finite float32 magnitude.
inline float float32_scale(int32_t amax, float element_max, float zero_scale) {
    const float smallest = bit_cast<float>(1 << kMantissaBits);
    const float scale = max(bit_cast<float>(amax) / element_max, smallest);
    return amax == 0 ? zero_scale : scale;
}

inline void float32_scales(BlockScales& s, int blocks, const minifloat_quantize_rows_args& a) {
    const float element_max = a.element.max, zero_scale = a.zero_scale;
    for (int b = 0; b < blocks; ++b) s.scale[b] = float32_scale(s.amax[b], element_max, zero_scale);
}

inline void coded_scales(BlockScales& s, int blocks, const minifloat_quantize_rows_args& a) {
    const Format fmt(a.scale);
    const float smallest = bit_cast<float>(fmt.min_normal - (a.scale.mantissa_bits << kMantissaBits));
    const float element_max = a.element.max, zero_scale = a.zero_scale, divisor = a.divisor;
    for (int b = 0; b < blocks; ++b) {
        const float exact = divisor * (bit_cast<float>(s.amax[b]) / element_max);
        const float value = s.amax[b] == 0 ? zero_scale : exact;
        const int32_t magnitude = min(bit_cast<int32_t>(value), fmt.max_value);
        const auto r = round_magnitude<float, int32_t>(magnitude, fmt);
        const bool is_zero = r.value == 0.0f;  // only a block of zeros may have a zero scale
        s.code[b] = is_zero ? 1 : r.code;
        s.scale[b] = (is_zero ? smallest : r.value) / divisor;
    }
}

inline void e8m0_scales(BlockScales& s, int blocks, int scaling, const Format& element) {
    const float element_max = bit_cast<float>(element.max_value);
    const int32_t mantissa_mask = (1 << kMantissaBits) - 1;
    const int32_t half = 1 << (element.mantissa_shift - 1);
    for (int b = 0; b < blocks; ++b) {
        int32_t code;
        if (scaling == MINIFLOAT_SCALE_RCEIL) {
            const int32_t bits = bit_cast<int32_t>(bit_cast<float>(s.amax[b]) / element_max);
            code = (bits >> kMantissaBits) + ((bits & mantissa_mask) != 0);
        } else {
            const int32_t bits = min(s.amax[b], kInfinity) + (scaling == MINIFLOAT_SCALE_EVEN ? half : 0);
            code = (bits >> kMantissaBits) - element.emax;
        }
        set_e8m0(s, b, min(max(code, 0), kMaxE8M0));
    }
}

// SEARCH starts from FLOOR (search.h) and CODED_SEARCH from CODED (search_codes.h); the elements refine both.
inline void choose_scales(BlockScales& s, int blocks, const minifloat_quantize_rows_args& a, const Format& element) {
    if (a.scaling == MINIFLOAT_SCALE_FLOAT32)
        float32_scales(s, blocks, a);
    else if (a.scaling == MINIFLOAT_SCALE_CODED || a.scaling == MINIFLOAT_SCALE_CODED_SEARCH)
        coded_scales(s, blocks, a);
    else
        e8m0_scales(s, blocks, a.scaling, element);
}

}  // namespace MINIFLOAT_ISA
