// Search of coded scales (NVFP4): for every block, the code near that of amax with the smallest squared error.
#pragma once

#include "search.h"

namespace MINIFLOAT_ISA {

// Codes relative to that of amax: NVFP4_SEARCH_OFFSETS of numerics/scale.py, in its order, because the first of equal
// errors wins.
constexpr int kCodeCandidates = 9;
constexpr int32_t kCodeOffsets[kCodeCandidates] = {0, 1, -1, 2, -2, 3, 4, 5, 6};

// Values of scale codes, none of them of zero or NaN.
struct ScaleCodes {
    const Format fmt;
    const float smallest;      // the value of code 1
    const int32_t subnormals;  // codes below this one are multiples of `smallest`
    const int32_t rebias;      // added to the bits of a normal code
    const int32_t largest;     // the code of the largest finite value

    explicit ScaleCodes(const minifloat_format& f)
        : fmt(f),
          smallest(bit_cast<float>(fmt.min_normal - (f.mantissa_bits << kMantissaBits))),
          subnormals(1 << f.mantissa_bits),
          rebias(fmt.min_normal - (1 << kMantissaBits)),
          largest((fmt.max_value - rebias) >> fmt.mantissa_shift) {}

    F32 value(I32 code) const {
        const F32 normal = bit_cast<F32>((code << fmt.mantissa_shift) + rebias);
        const F32 subnormal = __builtin_convertvector(code, F32) * smallest;
        return code < subnormals ? subnormal : normal;
    }
};

// Sum of the squared errors of the elements kFirst, kFirst + kStep, ... of kWidth blocks, added in the order in which
// the upper half of a block is folded onto its lower half. `x`: magnitudes; lane l of x[i] is element i of block l.
template <int kFirst, int kStep>
inline F32 sum_of_errors(const F32 (&x)[kLanes], F32 inverse, const Format& element) {
    if constexpr (kStep == kLanes)
        return squared_error(bit_cast<I32>(x[kFirst] * inverse), element, 0);
    else
        return sum_of_errors<kFirst, 2 * kStep>(x, inverse, element) +
               sum_of_errors<kFirst + kStep, 2 * kStep>(x, inverse, element);
}

// Replaces the code of every block of kLanes columns by that with the smallest error. Lanes are blocks, so that the
// sums need no shuffles; lanes beyond the last block repeat it.
inline void search_codes(const float* __restrict w, int blocks, const minifloat_quantize_rows_args& a,
                         const Format& element, BlockScales& s) {
    const ScaleCodes codes(a.scale);
    for (int begin = 0; begin < blocks; begin += kWidth) {
        F32 x[kLanes];
        I32 first;
        for (int lane = 0; lane < kWidth; ++lane) {
            const int b = min(begin + lane, blocks - 1);
            first[lane] = s.code[b] & (codes.fmt.sign - 1);
            for (int i = 0; i < kLanes; ++i) x[i][lane] = w[b * kLanes + i];
        }
        for (int i = 0; i < kLanes; ++i) x[i] = bit_cast<F32>(bit_cast<I32>(x[i] * a.divisor) & kMagnitude);
        I32 best_code = first;
        F32 best = broadcast(0.0f);
        for (int c = 0; c < kCodeCandidates; ++c) {
            const I32 code = min(max(first + kCodeOffsets[c], broadcast(1)), broadcast(codes.largest));
            const F32 value = codes.value(code);
            const F32 error = sum_of_errors<0, 1>(x, 1.0f / value, element) * (value * value);
            const I32 better = c == 0 ? broadcast(-1) : error < best;
            best_code = better ? code : best_code;
            best = better ? error : best;
        }
        const F32 scale = codes.value(best_code) / a.divisor;
        for (int lane = 0; lane < min(kWidth, blocks - begin); ++lane) {
            s.code[begin + lane] = best_code[lane];
            s.scale[begin + lane] = scale[lane];
        }
    }
}

}  // namespace MINIFLOAT_ISA
