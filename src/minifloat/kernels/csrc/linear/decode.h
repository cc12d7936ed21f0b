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

#if defined(__AVX2__) && !defined(__AVX512F__)
// Half a vector of layout.h as two vectors of 16-bit words: columns k0 and k1, then k2 and k3, of eight rows in order.
inline __m256i pairs_in_order(const uint8_t* p) { return _mm256_permute4x64_epi64(load_as<__m256i>(p), 0xd8); }
#endif

// A part of a vector of layout.h: kWidth rows, MINIFLOAT_VECTOR_BYTES bytes. unpack() returns its columns, one vector
// each, divided by kFactor.
struct E4M3Part {
    static constexpr int kCols = 4;
#if defined(__F16C__) || defined(__aarch64__)
    // Sign, exponent and mantissa in the places of float16 are the value with another bias, subnormals included.
    static constexpr float kFactor = 0x1p8f;
    static constexpr int16_t kMask = static_cast<int16_t>(0xbf80);
#if defined(__AVX512F__)
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m512i mask = _mm512_set1_epi16(kMask);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        const __m512i pairs = _mm512_permutexvar_epi64(order, load_as<__m512i>(p));
        const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 1), mask);
        const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(pairs, 1), mask);
        cols[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
        cols[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
        cols[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
        cols[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    }
    static F32 values(const uint8_t* codes) {
        const __m256i words = _mm256_cvtepi8_epi16(load_as<__m128i>(codes));
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(kMask)));
    }
#elif defined(__F16C__)
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m256i mask = _mm256_set1_epi16(kMask);
        const __m256i pairs = pairs_in_order(p);
        const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), mask);
        const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(pairs, 1), mask);
        cols[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
        cols[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
        cols[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
        cols[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
    }
    static F32 values(const uint8_t* codes) {
        const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(kMask)));
    }
#else
    static float16x8_t halves(int16x8_t high) {
        return vreinterpretq_f16_s16(vandq_s16(vshrq_n_s16(high, 1), vdupq_n_s16(kMask)));
    }
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const int16x8_t pairs = vreinterpretq_s16_u8(vld1q_u8(p));
        const float16x8_t even = halves(vshlq_n_s16(pairs, 8)), odd = halves(pairs);
        cols[0] = vcvt_f32_f16(vget_low_f16(even));
        cols[1] = vcvt_f32_f16(vget_low_f16(odd));
        cols[2] = vcvt_high_f32_f16(even);
        cols[3] = vcvt_high_f32_f16(odd);
    }
    static F32 values(const uint8_t* codes) {
        const int8x8_t four = vreinterpret_s8_u32(vdup_n_u32(load_as<uint32_t>(codes)));
        return vcvt_f32_f16(vget_low_f16(halves(vshll_n_s8(four, 8))));
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
    static F32 values(const uint8_t* codes) { return decode_e4m3(widen(codes)); }
#endif
};

struct E2M1Part {
    static constexpr int kCols = 8;
    static constexpr int nibble(int col) { return col % 2 * 4 + col / 2; }
#if defined(__AVX512F__)
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        const U32 words = load_as<U32>(p);
        for (int i = 0; i < kCols; ++i)
            cols[i] = _mm512_permutexvar_ps(bit_cast<__m512i>(words >> (4 * nibble(i))), values);
    }
#elif defined(__AVX2__)
    // Bytes of twice the values by table.
    static constexpr float kFactor = 0.5f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        const __m256i low = _mm256_set1_epi8(0xf);
        const __m256i codes = load_as<__m256i>(p);
        // Bytes of the words, from the lowest: k0 k4 k1 k5 and k2 k6 k3 k7.
        const __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
        const __m256i second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
        const auto top_byte = [](__m256i words) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 24)); };
        cols[0] = top_byte(_mm256_slli_epi32(first, 24));
        cols[1] = top_byte(_mm256_slli_epi32(first, 8));
        cols[2] = top_byte(_mm256_slli_epi32(second, 24));
        cols[3] = top_byte(_mm256_slli_epi32(second, 8));
        cols[4] = top_byte(_mm256_slli_epi32(first, 16));
        cols[5] = top_byte(first);
        cols[6] = top_byte(_mm256_slli_epi32(second, 16));
        cols[7] = top_byte(second);
    }
#elif defined(__aarch64__)
    // The high bytes of float16, whose low bytes are zero, by table; then the bytes of two columns by table.
    static constexpr float kFactor = 1.0f;
    static uint8x16_t high_bytes(uint8x16_t codes) {
        const uint8x16_t table = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,  //
                                  0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};
        return vqtbl1q_u8(table, codes);
    }
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        constexpr uint8_t kNone = 0xff;
        const uint8x16_t even = {kNone, 0, kNone, 4, kNone, 8, kNone, 12, kNone, 1, kNone, 5, kNone, 9, kNone, 13};
        const uint8x16_t odd = {kNone, 2, kNone, 6, kNone, 10, kNone, 14, kNone, 3, kNone, 7, kNone, 11, kNone, 15};
        const uint8x16_t codes = vld1q_u8(p);
        // Bytes of the words, from the lowest: k0 k4 k1 k5 and k2 k6 k3 k7.
        const uint8x16_t first = high_bytes(vandq_u8(codes, vdupq_n_u8(0xf)));
        const uint8x16_t second = high_bytes(vshrq_n_u8(codes, 4));
        const auto two = [&](uint8x16_t bytes, uint8x16_t order, F32& a, F32& b) {
            const float16x8_t halves = vreinterpretq_f16_u8(vqtbl1q_u8(bytes, order));
            a = vcvt_f32_f16(vget_low_f16(halves));
            b = vcvt_high_f32_f16(halves);
        };
        two(first, even, cols[0], cols[4]);
        two(first, odd, cols[1], cols[5]);
        two(second, even, cols[2], cols[6]);
        two(second, odd, cols[3], cols[7]);
    }
#else
    static constexpr float kFactor = 1.0f;
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

struct F16Part {
    static constexpr int kCols = 2;
    static constexpr float kFactor = 1.0f;
    static F32 values(U32 low_halves) {
        const U16 halves = __builtin_convertvector(low_halves, U16);
        uint8_t bytes[sizeof halves];
        store_as(bytes, halves);
        return F16Row::load(bytes);
    }
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const U32 words = load_as<U32>(p);
        cols[0] = values(words & 0xffffu);
        cols[1] = values(words >> 16);
    }
};

struct F32Part {
    static constexpr int kCols = 1;
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) { cols[0] = load_as<F32>(p); }
};

// The inline or block scales of panel `p`, rows n .. n + kWidth - 1, for the columns that share a scale with column
// `col` of step `s`.
inline F32 scales_of(const Weight& w, int64_t p, int64_t s, int col, int n) {
    const uint8_t* inlined = w.panel(p) + s * w.step_bytes + n;
    if (w.grid == MINIFLOAT_GRID_E8M0)
        return bit_cast<F32>((uint32_t{kBias} - widen(inlined + col / kE8M0Cols * kPanelRows)) << kMantissaBits);
    if (w.grid == MINIFLOAT_GRID_E4M3) return E4M3Part::values(inlined + col / kE4M3Cols * kPanelRows) * E4M3Part::kFactor;
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
    if (w.element == MINIFLOAT_WEIGHT_F16) decode_step_as<F16Part>(w, p, s, out);
    if (w.element == MINIFLOAT_WEIGHT_F32) decode_step_as<F32Part>(w, p, s, out);
}

}  // namespace MINIFLOAT_ISA
