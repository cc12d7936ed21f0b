// Decodes a step of a packed weight to float32, as the fallback of every path.
#pragma once

#include "convert.h"

namespace MINIFLOAT_ISA {

// Decodes floats of kBits bits (without the sign) in the low bits of each lane, of which the lowest kMantissa are the
// mantissa. Subnormals are converted as integers: as float32 operands they would be slow.
template <int kBits, int kMantissa, int kFormatBias>
inline F32 small_float(U32 code) {
    const U32 magnitude = code & ((1u << kBits) - 1);
    const U32 normal = (magnitude << (kMantissaBits - kMantissa)) + (uint32_t{kBias - kFormatBias} << kMantissaBits);
    constexpr float kUnit = 1.0f / (uint32_t{1} << (kMantissa + kFormatBias - 1));
    const U32 subnormal = bit_cast<U32>(__builtin_convertvector(bit_cast<I32>(magnitude), F32) * kUnit);
    const U32 is_small = bit_cast<U32>(bit_cast<I32>(magnitude) < (1 << kMantissa));
    return bit_cast<F32>(select(is_small, subnormal, normal) | (code >> kBits & 1) << 31);
}

inline F32 decode_e4m3(U32 code) { return small_float<7, 3, 7>(code); }
inline F32 decode_e2m1(U32 code) { return small_float<3, 1, 1>(code); }

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

inline U32 widen(const uint8_t* p) { return __builtin_convertvector(load_as<Bytes>(p), U32); }

// A part of a vector of layout.h: kWidth rows, MINIFLOAT_VECTOR_BYTES bytes. unpack() returns its columns, one vector
// each, divided by kFactor.
struct E4M3Part {
    static constexpr int kCols = 4;
#if defined(__F16C__)
    // Sign, exponent and mantissa in the places of float16 are the value with another bias, subnormals included.
    static constexpr float kFactor = 0x1p8f;
#if defined(__AVX512F__)
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        const __m512i pairs = _mm512_permutexvar_epi64(order, load_as<__m512i>(p));
        const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 1), mask);
        const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(pairs, 1), mask);
        cols[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
        cols[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
        cols[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
        cols[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    }
#else
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
        const __m256i pairs = _mm256_permute4x64_epi64(load_as<__m256i>(p), 0xd8);
        const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), mask);
        const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(pairs, 1), mask);
        cols[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
        cols[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
        cols[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
        cols[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
    }
#endif
#else
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        for (int i = 0; i < 2; ++i) {
            const U32 pairs = __builtin_convertvector(load_as<U16>(p + i * sizeof(U16)), U32);
            cols[2 * i] = decode_e4m3(pairs & 0xffu);
            cols[2 * i + 1] = decode_e4m3(pairs >> 8);
        }
    }
#endif
};

struct E2M1Part {
    static constexpr int kCols = 8;
    static constexpr float kFactor = 1.0f;
    static constexpr int nibble(int col) { return col % 2 * 4 + col / 2; }
#if defined(__AVX512F__)
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        const U32 words = load_as<U32>(p);
        for (int i = 0; i < kCols; ++i)
            cols[i] = _mm512_permutexvar_ps(bit_cast<__m512i>(words >> (4 * nibble(i))), values);
    }
#elif defined(__AVX2__)
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
        const U32 words = load_as<U32>(p);
        for (int i = 0; i < kCols; ++i) {
            const U32 sign = words << (28 - 4 * nibble(i)) & 0x80000000u;
            const __m256i index = bit_cast<__m256i>(words >> (4 * nibble(i)));
            cols[i] = bit_cast<F32>(bit_cast<U32>(_mm256_permutevar8x32_ps(magnitudes, index)) | sign);
        }
    }
#else
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const U32 words = load_as<U32>(p);
        for (int i = 0; i < kCols; ++i) cols[i] = decode_e2m1(words >> (4 * nibble(i)));
    }
#endif
};

struct Bf16Part {
    static constexpr int kCols = 2;
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const U32 words = load_as<U32>(p);
        cols[0] = bit_cast<F32>(words << 16);
        cols[1] = bit_cast<F32>(words & 0xffff0000u);
    }
};

// The inline or block scales of panel `p`, rows n .. n + kWidth - 1, for the columns that share a scale with column
// `col` of step `s`.
inline F32 scales_of(const Weight& w, int64_t p, int64_t s, int col, int n) {
    const uint8_t* inlined = w.panel(p) + s * w.step_bytes + n;
    if (w.grid == MINIFLOAT_GRID_E8M0)
        return bit_cast<F32>((uint32_t{kBias} - widen(inlined + col / kE8M0Cols * kPanelRows)) << kMantissaBits);
    if (w.grid == MINIFLOAT_GRID_E4M3) return decode_e4m3(widen(inlined + col / kE4M3Cols * kPanelRows));
    if (w.grid == MINIFLOAT_GRID_BLOCK) {
        const float* scales = w.block_scale(p, min((s * kStepCols + col) / w.block_cols, w.groups - 1));
        return w.block_lanes == 1 ? broadcast(*scales) : load(scales + n);
    }
    return broadcast(1.0f);
}

template <class Part>
inline void decode_step_as(const Weight& w, int64_t p, int64_t s, float* out) {
    constexpr int kVectorCols = Part::kCols;
    const uint8_t* data = w.panel(p) + s * w.step_bytes + w.scale_bytes;
    for (int half = 0; half < kStepCols; half += kHalfCols) {
        for (int tile = 0; tile < kPanelRows; tile += kTileRows) {
            for (int quarter = half; quarter < half + kHalfCols; quarter += kE4M3Cols) {
                F32 scales[kParts];
                for (int i = 0; i < kParts; ++i)
                    scales[i] = scales_of(w, p, s, quarter, tile + i * kWidth) * Part::kFactor;
                for (int k = quarter; k < quarter + kE4M3Cols; k += kVectorCols, data += kVectorBytes) {
                    for (int i = 0; i < kParts; ++i) {
                        F32 cols[kVectorCols];
                        Part::unpack(data + i * MINIFLOAT_VECTOR_BYTES, cols);
                        for (int c = 0; c < kVectorCols; ++c)
                            store_as(out + (k + c) * kPanelRows + tile + i * kWidth, cols[c] * scales[i]);
                    }
                }
            }
        }
    }
}

// Decodes step `s` of panel `p` times its inline or block scales, without row scales: [kStepCols, kPanelRows].
inline void decode_step(const Weight& w, int64_t p, int64_t s, float* out) {
    if (w.element == MINIFLOAT_E4M3) decode_step_as<E4M3Part>(w, p, s, out);
    if (w.element == MINIFLOAT_E2M1) decode_step_as<E2M1Part>(w, p, s, out);
    if (w.element == MINIFLOAT_WEIGHT_BF16) decode_step_as<Bf16Part>(w, p, s, out);
}

}  // namespace MINIFLOAT_ISA
