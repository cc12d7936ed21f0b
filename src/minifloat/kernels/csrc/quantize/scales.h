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
    if (a.scaling != MINIFLOAT_SCALE_FLOAT32_RCEIL) return;
    const int32_t mantissa_mask = (1 << kMantissaBits) - 1;
    for (int b = 0; b < blocks; ++b)
        s.scale[b] = bit_cast<float>((bit_cast<int32_t>(s.scale[b]) + mantissa_mask) & ~mantissa_mask);
}

inline bool stores_float32(int scaling) {
    return scaling == MINIFLOAT_SCALE_FLOAT32 || scaling == MINIFLOAT_SCALE_FLOAT32_RCEIL;
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

// SEARCH starts from FLOOR and CODED_SEARCH from CODED; the elements refine both.
inline void choose_scales(BlockScales& s, int blocks, const minifloat_quantize_rows_args& a, const Format& element) {
    if (stores_float32(a.scaling))
        float32_scales(s, blocks, a);
    else if (a.scaling == MINIFLOAT_SCALE_CODED || a.scaling == MINIFLOAT_SCALE_CODED_SEARCH)
        coded_scales(s, blocks, a);
    else
        e8m0_scales(s, blocks, a.scaling, element);
}

// Scale search: for every block, the power of two near the FLOOR scale with the smallest squared error.

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

// Search of coded scales (NVFP4): for every block, the code near that of amax with the smallest squared error. Lanes
// are blocks, so that the sums of errors need no shuffles.

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
