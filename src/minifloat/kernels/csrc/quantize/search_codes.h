// Search of coded scales (NVFP4): for every block, the code near that of amax with the smallest squared error. Lanes
// are blocks, so that the sums of errors need no shuffles.
#pragma once

#include "../intrinsics.h"
#include "search.h"

namespace MINIFLOAT_ISA {

// Codes relative to that of amax: NVFP4_SEARCH_OFFSETS of numerics/scale_search.py, in its order, because the first of
// equal errors wins.
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

// Squared distances of magnitudes to the nearest value of an element format. kClips: some magnitude may round to more
// than the largest value.
struct RoundedErrors {
    const Format& fmt;

    template <bool kClips>
    F32 error(F32 y) const {
        const I32 magnitude = bit_cast<I32>(y);
        const auto r = round_magnitude<F32, I32>(kClips ? min(magnitude, broadcast(fmt.max_value)) : magnitude, fmt);
        const F32 difference = y - r.value;
        return difference * difference;
    }
};

#if defined(__AVX512F__)
// The same for formats whose midpoints between values are multiples of 1/4 below 8 (E2M1): a table has the value that is
// nearest to all numbers of an interval [i / 4, (i + 1) / 4). Both neighbours of a midpoint have the same error.
class TabledErrors {
  public:
    static bool covers(const Format& fmt) {
        const bool half_steps = fmt.min_normal == bit_cast<int32_t>(1.0f) && fmt.mantissa_shift == kMantissaBits - 1;
        return half_steps && fmt.saturation < bit_cast<int32_t>(2 * kWidth / kIntervals);
    }

    explicit TabledErrors(const Format& fmt) {
        for (int i = 0; i < 2 * kWidth; ++i) {
            const int32_t middle = bit_cast<int32_t>((static_cast<float>(i) + 0.5f) / kIntervals);
            values_[i / kWidth][i % kWidth] = round_magnitude<float, int32_t>(min(middle, fmt.max_value), fmt).value;
        }
    }

    template <bool kClips>
    F32 error(F32 y) const {
        // Rounded towards zero, the low bits of the sum are the number of the interval.
        constexpr int kTruncate = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
        __m512 sum = _mm512_add_round_ps(bit_cast<__m512>(y), _mm512_set1_ps(kAnchor), kTruncate);
        if (kClips) sum = _mm512_min_ps(sum, _mm512_set1_ps(kAnchor + (2 * kWidth - 1) / kIntervals));
        const F32 value = bit_cast<F32>(_mm512_permutex2var_ps(bit_cast<__m512>(values_[0]), _mm512_castps_si512(sum),
                                                               bit_cast<__m512>(values_[1])));
        const F32 difference = y - value;
        return difference * difference;
    }

  private:
    static constexpr float kIntervals = 4.0f;  // per unit
    static constexpr float kAnchor = static_cast<float>(1 << kMantissaBits) / kIntervals;
    F32 values_[2];
};
#endif

// All lanes of a vector, for shuffles with constant indices.
template <int... kLane>
struct Lanes {
    static I32 numbers() { return I32{kLane...}; }

    // Exchanges the lanes of `a` whose number has the bit kStep with the other lanes of `b`.
    template <int kStep>
    static void exchange(F32& a, F32& b) {
#if defined(__clang__)
        const F32 low = __builtin_shufflevector(a, b, (kLane & kStep ? kWidth + kLane - kStep : kLane)...);
        const F32 high = __builtin_shufflevector(a, b, (kLane & kStep ? kWidth + kLane : kLane + kStep)...);
#else
        const F32 low = __builtin_shuffle(a, b, I32{(kLane & kStep ? kWidth + kLane - kStep : kLane)...});
        const F32 high = __builtin_shuffle(a, b, I32{(kLane & kStep ? kWidth + kLane : kLane + kStep)...});
#endif
        a = low;
        b = high;
    }
};
#if MINIFLOAT_VECTOR_BYTES == 64
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> AllLanes;
#elif MINIFLOAT_VECTOR_BYTES == 32
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7> AllLanes;
#else
typedef Lanes<0, 1, 2, 3> AllLanes;
#endif

template <int kStep>
inline void transpose(F32* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i)
        if (!(i & kStep)) AllLanes::exchange<kStep>(rows[i], rows[i + kStep]);
    if constexpr (kStep > 1) transpose<kStep / 2>(rows);
}

// Element i of kWidth blocks: lane l of x[i] is element i of block l.
inline void load_blocks(const float* __restrict w, F32 (&x)[kLanes]) {
    for (int part = 0; part < kParts; ++part) {
        F32* rows = x + part * kWidth;
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) rows[lane] = load(w + lane * kLanes + part * kWidth);
        transpose<kWidth / 2>(rows);
    }
}

// Sum of the squared errors of the elements kFirst, kFirst + kStep, ... of kWidth blocks, added in the order in which
// the upper half of a block is folded onto its lower half. `x`: magnitudes, as of load_blocks().
template <bool kClips, int kFirst, int kStep, class Errors>
inline F32 sum_of_errors(const F32 (&x)[kLanes], F32 inverse, const Errors& errors) {
    if constexpr (kStep == kLanes)
        return errors.template error<kClips>(x[kFirst] * inverse);
    else
        return sum_of_errors<kClips, kFirst, 2 * kStep>(x, inverse, errors) +
               sum_of_errors<kClips, kFirst + kStep, 2 * kStep>(x, inverse, errors);
}

// Whether some block may have an element that rounds to more than the largest value under the code of amax. A normal
// code is off by at most half of its last bit, too little to reach half a step above the largest element.
inline bool may_clip(I32 first, const ScaleCodes& codes) {
    const I32 may = (first < codes.subnormals) | (first == codes.largest);
    return fold<kWidth, int32_t>(-may, Max()) != 0;
}

// Replaces the code of every block of kLanes columns by that with the smallest error. Lanes beyond the last block
// compute with zeros, and nothing reads their results: `w` and `s` have room for kMaxBlocks blocks.
template <class Errors>
inline void search_codes(const float* __restrict w, int blocks, float divisor, const ScaleCodes& codes,
                         const Errors& errors, BlockScales& s) {
    static_assert(kMaxBlocks % kWidth == 0, "whole vectors of blocks");
    for (int begin = 0; begin < blocks; begin += kWidth) {
        F32 x[kLanes];
        load_blocks(w + begin * kLanes, x);
        const I32 kept = (AllLanes::numbers() < blocks - begin) & kMagnitude;
        for (int i = 0; i < kLanes; ++i) x[i] = bit_cast<F32>(bit_cast<I32>(x[i] * divisor) & kept);
        I32 first;
        __builtin_memcpy(&first, s.code + begin, sizeof first);
        first &= codes.fmt.sign - 1;
        const bool clips = may_clip(first, codes);
        I32 best_code = first;
        F32 best = broadcast(0.0f);
        for (int c = 0; c < kCodeCandidates; ++c) {
            const I32 code = min(max(first + kCodeOffsets[c], broadcast(1)), broadcast(codes.largest));
            const F32 value = codes.value(code), inverse = 1.0f / value;
            const F32 sum = clips || kCodeOffsets[c] < 0 ? sum_of_errors<true, 0, 1>(x, inverse, errors)
                                                         : sum_of_errors<false, 0, 1>(x, inverse, errors);
            const F32 error = sum * (value * value);
            const I32 better = c == 0 ? broadcast(-1) : error < best;
            best_code = better ? code : best_code;
            best = better ? error : best;
        }
        const F32 scale = codes.value(best_code) / divisor;
        store(s.code + begin, best_code);
        __builtin_memcpy(s.scale + begin, &scale, sizeof scale);
    }
}

inline void search_codes(const float* __restrict w, int blocks, const minifloat_quantize_rows_args& a,
                         const Format& element, BlockScales& s) {
    const ScaleCodes codes(a.scale);
#if defined(__AVX512F__)
    if (TabledErrors::covers(element)) return search_codes(w, blocks, a.divisor, codes, TabledErrors(element), s);
#endif
    search_codes(w, blocks, a.divisor, codes, RoundedErrors{element}, s);
}

}  // namespace MINIFLOAT_ISA
