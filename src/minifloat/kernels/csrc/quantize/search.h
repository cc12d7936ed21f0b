// Scale search: for every block, the power of two near the FLOOR scale with the smallest squared error.
#pragma once

#include "scales.h"

namespace MINIFLOAT_ISA {

// Exponents relative to FLOOR: SEARCH_OFFSETS of numerics/scale_search.py, in its order, because the first of equal
// sums wins. Offset -2 needs no trial, for E2M1: with y the elements over the FLOOR scale and a >= 4 the largest, a
// alone loses at least 2.5**2 = 6.25 under -2, and the 31 others, which gain only below 1.5, at most 31 * 0.25**2 =
// 1.94. Formats with more values gain less; where FLOOR is clamped to code 0, negative offsets have no code.
constexpr int kCandidates = 3;
constexpr int32_t kOffsets[kCandidates] = {0, 1, -1};

// Squared error of y when it is rounded to the element format times 2**offset.
inline F32 squared_error(I32 magnitude, const Format& fmt, int32_t offset) {
    const int32_t shift = offset * (1 << kMantissaBits);
    const auto r = round_magnitude<F32, I32>(min(magnitude, broadcast(fmt.max_value + shift)), fmt, shift);
    const F32 difference = bit_cast<F32>(magnitude) - r.value;
    return difference * difference;
}

// Replaces the FLOOR code of every block by that of the offset with the smallest sum of squared errors.
//
// kVectors is the number of columns of a block / kLanes, 1 or 2, so that the first level of the summation tree (upper
// half onto lower half) adds whole vectors. Errors are those of y = w / FLOOR scale, whose squares do not overflow; y
// is exact, or so small that its square is zero.
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
            const bool better = (errors[c][b] < best) & (code >= 0);  // never above kMaxE8M0: FLOOR subtracts emax
            best_code = better ? code : best_code;
            best = better ? errors[c][b] : best;
        }
        set_e8m0(s, b, best_code);
    }
}

}  // namespace MINIFLOAT_ISA
