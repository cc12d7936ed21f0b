// Rounding to a format of at most 8 bits: nearest, ties to even, clamped to the largest value.
//
// One formula for normal and subnormal results. Let E be the power of two below |z|, at least the format's smallest
// normal. Adding 2**(23 - mantissa_bits) * E makes the float32 adder round |z| to the format's step in that binade:
// subtracting it again gives the rounded value, and the low bits of the sum are the number of steps, which is the code
// but for the exponent.
#pragma once

#include "../../native/api.h"
#include "load.h"

namespace MINIFLOAT_ISA {

struct Format {
    int32_t min_normal;  // bits of the smallest normal value
    int32_t max_value;   // bits of the largest finite value
    int32_t saturation;  // bits of max plus half its step: larger magnitudes are clamped, not just rounded
    int32_t magic;       // added to the bits of E
    int mantissa_shift;  // number of float32 mantissa bits that are dropped
    int sign_shift;      // from bit 31 to the code's sign bit
    int32_t sign;        // the code's sign bit
    int emax;            // exponent of the largest finite value

    explicit Format(const minifloat_format& f)
        : min_normal((f.emin + kBias) << kMantissaBits),
          max_value(bit_cast<int32_t>(f.max)),
          magic((kMantissaBits - f.mantissa_bits) << kMantissaBits),
          mantissa_shift(kMantissaBits - f.mantissa_bits),
          sign_shift(32 - f.bits),
          sign(1 << (f.bits - 1)),
          emax((max_value >> kMantissaBits) - kBias) {
        const int32_t half_step = (emax - f.mantissa_bits - 1 + kBias) << kMantissaBits;
        saturation = bit_cast<int32_t>(f.max + bit_cast<float>(half_step));
    }
};

// `F` and `I` are float and int32_t, or F32 and I32.
template <class F, class I>
struct Rounded {
    F value;  // magnitude, exactly representable
    I code;   // without sign, in the low kMantissaBits bits; higher bits are undefined
};

// `magnitude`: the bits of |z|, already at most the bits of `fmt.max` shifted by `exponent_offset`, where
// `exponent_offset` (in units of the exponent field) rounds to the format scaled by that power of two.
template <class F, class I>
inline Rounded<F, I> round_magnitude(I magnitude, const Format& fmt, int32_t exponent_offset = 0) {
    const I exponent = max(magnitude & kInfinity, I{} + (fmt.min_normal + exponent_offset));
    const F anchor = bit_cast<F>(exponent + fmt.magic);
    const F sum = bit_cast<F>(magnitude) + anchor;
    const I exponent_code = (exponent - (fmt.min_normal + exponent_offset)) >> fmt.mantissa_shift;
    return {sum - anchor, bit_cast<I>(sum) + exponent_code};
}

// Error statistics. Within a chunk they are kept in kLanes lanes of float32, between chunks in double: a chunk is so
// short that the rounding of its sums stays below 1e-5 relative.
struct Sums {
    double signal[kLanes] = {}, noise[kLanes] = {};
    int64_t saturated = 0, flushed = 0;
};

inline void add_lanes(const F32 (&parts)[kParts], double factor, double* __restrict total) {
    float lane[kLanes];
    __builtin_memcpy(lane, parts, sizeof lane);
    for (int i = 0; i < kLanes; ++i) total[i] += factor * static_cast<double>(lane[i]);
}

// Casts one row of elements, cut into blocks.
//
// w: `count` floats, a multiple of kLanes; codes: as many. Block b covers the columns from b * block_cols on.
// unit: a power of two; w times unit is near 1, so that squares neither overflow nor underflow.
// kPowerOfTwo: multiplying by `inverses` divides by `scales` exactly. kClips: some element may saturate.
template <bool kPowerOfTwo, bool kClips>
inline void encode_chunk(const float* __restrict w, int count, int block_cols, const float* __restrict scales,
                         const float* __restrict inverses, float unit, const Format& fmt, int32_t* __restrict codes,
                         Sums& sums) {
    F32 signal[kParts] = {}, noise[kParts] = {};
    I32 saturated[kParts] = {}, flushed[kParts] = {};
    const float largest_float = bit_cast<float>(kInfinity - 1);
    for (int begin = 0, block = 0; begin < count; begin += block_cols, ++block) {
        const int end = min(begin + block_cols, count);
        const F32 factor = broadcast(kPowerOfTwo ? inverses[block] : scales[block]);
        // Overflows only if the scale is so far above the weights that all of them become zeros.
        const F32 unit_scale = broadcast(min(scales[block] * unit, largest_float));
        for (int i = begin; i < end; i += kLanes) {
            for (int part = 0; part < kParts; ++part) {
                const F32 x = load(w + i + part * kWidth);
                const F32 z = kPowerOfTwo ? x * factor : x / factor;
                const I32 z_bits = bit_cast<I32>(z);
                const I32 magnitude = z_bits & kMagnitude;
                const auto r = round_magnitude<F32, I32>(min(magnitude, broadcast(fmt.max_value)), fmt);
                store(codes + i + part * kWidth, r.code | ((z_bits >> fmt.sign_shift) & fmt.sign));

                const I32 x_magnitude = bit_cast<I32>(x) & kMagnitude;
                const F32 reduced = bit_cast<F32>(x_magnitude) * unit;
                const F32 error = reduced - r.value * unit_scale;
                signal[part] += reduced * reduced;
                noise[part] += error * error;
                if (kClips) saturated[part] -= magnitude > fmt.saturation;
                flushed[part] -= (r.value == 0.0f) & (x_magnitude != 0);
            }
        }
    }
    const double unit_squared = static_cast<double>(unit) * unit;
    add_lanes(signal, 1.0 / unit_squared, sums.signal);
    add_lanes(noise, 1.0 / unit_squared, sums.noise);
    sums.saturated += sum_lanes<int32_t>(saturated);
    sums.flushed += sum_lanes<int32_t>(flushed);
}

}  // namespace MINIFLOAT_ISA
