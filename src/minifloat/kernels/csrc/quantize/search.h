// The E8M0 scale with the smallest squared error in its block, among the powers of two around FLOOR.
#pragma once

#include "scales.h"

namespace MINIFLOAT_ISA {

// Relative to FLOOR, in the order of SEARCH_OFFSETS of numerics/scale.py: an earlier one wins a tie.
constexpr int kCandidates = 4;
constexpr int32_t kOffsets[kCandidates] = {0, 1, -1, -2};

// Squared error of y, rounded to the element format scaled by 2**offset.
inline F32 squared_error(I32 magnitude, const Format& fmt, int32_t offset) {
    const int32_t shift = offset * (1 << kMantissaBits);
    const auto r = round_magnitude<F32, I32>(min(magnitude, broadcast(fmt.max_value + shift)), fmt, shift);
    const F32 difference = bit_cast<F32>(magnitude) - r.value;
    return difference * difference;
}

// Replaces the FLOOR codes of the blocks by the best candidates.
//
// kVectors: columns of a block / kLanes, so that the first level of the summation tree (upper half onto lower half)
// adds whole vectors; 1 or 2. The errors are those of y = w / FLOOR scale, which is exact and of moderate size.
template <int kVectors>
inline void search_scales(const float* __restrict w, int blocks, const Format& fmt, BlockScales& s) {
    float errors[kCandidates][kMaxBlocks];
    for (int b = 0; b < blocks; ++b) {
        const float* __restrict block = w + b * kVectors * kLanes;
        F32 sum[kCandidates][kParts];
        for (int part = 0; part < kParts; ++part) {
            for (int v = 0; v < kVectors; ++v) {
                const F32 y = load(block + v * kLanes + part * kWidth) * s.inverse[b];
                const I32 magnitude = bit_cast<I32>(y) & kMagnitude;
                for (int c = 0; c < kCandidates; ++c) {
                    const F32 error = squared_error(magnitude, fmt, kOffsets[c]);
                    sum[c][part] = v == 0 ? error : sum[c][part] + error;
                }
            }
        }
        for (int c = 0; c < kCandidates; ++c) errors[c][b] = sum_lanes<float>(sum[c]);
    }
    for (int b = 0; b < blocks; ++b) {
        const int32_t floor_code = s.code[b];
        int32_t best_code = floor_code;
        float best = errors[0][b];
        for (int c = 1; c < kCandidates; ++c) {
            const int32_t code = floor_code + kOffsets[c];
            const bool better = (errors[c][b] < best) & (code >= 0) & (code <= kMaxE8M0);
            best_code = better ? code : best_code;
            best = better ? errors[c][b] : best;
        }
        set_e8m0(s, b, best_code);
    }
}

}  // namespace MINIFLOAT_ISA
