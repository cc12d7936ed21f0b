// Decodes steps of packed weights to int8, for the paths with rounded inputs. A group is the kInt8Cols columns of a row
// of a step; its unit is the smallest power of two with which no integer exceeds 127 (for E4M3 that of the largest
// element, for E2M1 that of 6 times the largest scale of the blocks that are not zeros). Integers are rounded to
// nearest, ties to even, those of NVFP4 away from zero, and stored kInt8Offset above: [vector of 4 columns][tile of 16
// rows][row][4 columns].
#pragma once

#include "avx512.h"
#include "decode.h"
#include "e2m1_bytes.h"
#include "int8_x.h"

#if defined(MINIFLOAT_INT8)

namespace MINIFLOAT_ISA {

constexpr int kInt8Vectors = kInt8Cols / 4;
constexpr int64_t kInt8GroupBytes = kPanelRows * kInt8Cols;
constexpr float kE2M1Max = 6.0f;
constexpr float kSmallestUnit = 0x1p-100f;  // relative to the largest scale of the row

// value / 2^shift, rounded to nearest even.
constexpr int shifted_even(int value, int shift) {
    if (shift <= 0) return value << -shift;
    const int down = value >> shift, rest = value - (down << shift), half = 1 << (shift - 1);
    return down + (rest > half || (rest == half && down % 2 == 1));
}

struct OffsetTable {
    alignas(64) uint8_t bytes[128];
};

// kInt8Offset plus the integer of an E4M3 magnitude relative to the largest exponent.
constexpr OffsetTable make_e4m3_integers() {
    OffsetTable t = {};
    for (int code = 0; code < 128; ++code)
        t.bytes[code] = static_cast<uint8_t>(kInt8Offset + shifted_even(8 + (code & 7), 15 - (code >> 3) - 3));
    return t;
}

// The same of the code of E2M1 in the low nibble, whose scale is 2^-(high nibble) of the largest: 0 .. 7.
constexpr OffsetTable make_e2m1_integers() {
    OffsetTable t = {};
    for (int i = 0; i < 128; ++i) {
        const int magnitude = shifted_even(e2m1_twice(i & 7), (i >> 4) - 3);
        t.bytes[i] = static_cast<uint8_t>(kInt8Offset + (i & 8 ? -magnitude : magnitude));
    }
    return t;
}

constexpr OffsetTable kE4m3Integers = make_e4m3_integers(), kE2m1Integers = make_e2m1_integers();

inline __m512i lookup(const OffsetTable& table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table.bytes), index, _mm512_load_si512(table.bytes + 64));
}

// Twice the elements of E2M1, so that VPMULHRSW with a factor of 8 bits of fraction gives integers. Ties are rounded up;
// below zero the smallest part more makes this away from zero.
struct alignas(64) WordValues {
    int16_t words[32];
};
constexpr WordValues make_nvfp4_values() {
    WordValues t = {};
    for (int i = 0; i < 32; ++i) t.words[i] = static_cast<int16_t>(e2m1_twice(i & 15) * 128 - (i & 8 && i & 7 ? 1 : 0));
    return t;
}
constexpr WordValues kNvfp4Values = make_nvfp4_values();

inline __m512i rounded_away(__m512 value) {
    const __m512 sign = _mm512_and_ps(value, _mm512_set1_ps(-0.0f));
    return _mm512_cvttps_epi32(_mm512_add_ps(value, _mm512_or_ps(sign, _mm512_set1_ps(0.5f))));
}

// 2^e of 16 exponents.
inline __m512 powers(__m512i e) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(kBias)), kMantissaBits));
}
inline __m512i sixteen_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m512i four_times(__m512i dwords) { return _mm512_mullo_epi32(dwords, _mm512_set1_epi32(0x01010101)); }

// Tile `t` of a step, by its elements and scales in float32: for groups with so small elements or so different scales
// that the decoders below have no place for them.
inline void decode_int8_any(const Weight& w, int64_t p, int64_t s, int t, uint8_t* codes, float* units) {
    const int8_t* order = column_order(w);
    alignas(64) float values[kStepCols * kPanelRows];
    Weight unscaled = w;
    if (w.grid == MINIFLOAT_GRID_BLOCK) unscaled.grid = MINIFLOAT_GRID_ROW;
    decode_step(unscaled, p, s, values);
    const float* tile = values + t * kTileRows;
    __m512 bound = _mm512_setzero_ps();
    for (int k = 0; k < kStepCols; k += kE4M3Cols) {
        __m512 largest = _mm512_setzero_ps();
        for (int c = 0; c < kE4M3Cols; ++c)
            largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_load_ps(tile + (k + c) * kPanelRows)));
        if (w.element == MINIFLOAT_E2M1) {
            const __mmask16 present = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
            const __m512 scale = _mm512_abs_ps(scales_of(w, p, s, k, t * kTileRows));
            largest = _mm512_maskz_mul_ps(present, _mm512_set1_ps(kE2M1Max), scale);
        }
        bound = _mm512_max_ps(bound, largest);
    }
    // The exponent of bound / 127, rounded up.
    const __m512 least = _mm512_max_ps(_mm512_div_ps(bound, _mm512_set1_ps(kInt8Max)), _mm512_set1_ps(kSmallestUnit));
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(least), _mm512_set1_epi32((1 << kMantissaBits) - 1));
    const __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(up, kMantissaBits), _mm512_set1_epi32(kBias));
    _mm512_store_ps(units, powers(exponent));
    const __m512 inverse = powers(_mm512_sub_epi32(_mm512_setzero_si512(), exponent));
    for (int v = 0; v < kInt8Vectors; ++v) {
        __m512i word = _mm512_setzero_si512();
        for (int c = 0; c < 4; ++c) {
            const int col = v / 2 * 8 + order[v % 2 * 4 + c];
            const __m512 value = _mm512_mul_ps(_mm512_load_ps(tile + col * kPanelRows), inverse);
            const __m512i q = w.grid == MINIFLOAT_GRID_E4M3 ? rounded_away(value) : _mm512_cvtps_epi32(value);
            word = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_and_si512(q, _mm512_set1_epi32(0xff)), 8 * c));
        }
        _mm512_store_si512(codes + v * 2 * kVectorBytes, _mm512_xor_si512(word, _mm512_set1_epi8(-kInt8Offset)));
    }
}

// The decoders of a tile of a step, one per format. They return false where decode_int8_any() has to decode it.

// `step`: 8 vectors of 4 columns for each half and tile. `distances`: null, or those of E8M0, [half][row].
inline bool decode_int8_e4m3(const uint8_t* data, const uint8_t* distances, int t, uint8_t* codes, float* units) {
    constexpr int kHalfVectors = kInt8Vectors / 2;
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    const __m512i by_row = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m512i from_row = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i swap_bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    __m512i below[2], largest[2], any = _mm512_setzero_si512(), top = _mm512_setzero_si512();
    for (int h = 0; h < 2; ++h) {
        const uint8_t* in = data + (h * 2 + t) * kHalfVectors * kVectorBytes;
        largest[h] = _mm512_setzero_si512();
        for (int v = 0; v < kHalfVectors; ++v)
            largest[h] = _mm512_max_epu8(largest[h],
                                         _mm512_and_si512(_mm512_load_si512(in + v * kVectorBytes), magnitude));
        any = _mm512_or_si512(any, largest[h]);
        below[h] = _mm512_setzero_si512();
        if (distances != nullptr) {
            constexpr int kMost = 15;
            const __m512i d = _mm512_min_epi32(sixteen_bytes(distances + h * kPanelRows + t * kTileRows),
                                               _mm512_set1_epi32(kMost));
            below[h] = _mm512_shuffle_epi8(four_times(_mm512_slli_epi32(d, kE4M3MantissaBits)), from_row);
        }
        top = _mm512_max_epu8(top, _mm512_subs_epu8(largest[h], below[h]));
    }
    // The largest of the four columns of each row, in all of them.
    top = _mm512_max_epu8(top, _mm512_shuffle_epi8(top, swap_bytes));
    top = _mm512_max_epu8(top, _mm512_shuffle_epi32(top, _MM_PERM_BADC));
    // The table has no subnormal numbers; next to these exponents they are rounded to zero.
    constexpr int kLeast = 8 << kE4M3MantissaBits;
    const __m512i least = _mm512_set1_epi8(kLeast), exponent_bits = _mm512_set1_epi8(0x78);
    const __mmask64 small = _mm512_cmplt_epu8_mask(top, least);
    if (__builtin_expect(small != 0, 0)) {
        __m512i row = _mm512_max_epu8(any, _mm512_shuffle_epi8(any, swap_bytes));
        row = _mm512_max_epu8(row, _mm512_shuffle_epi32(row, _MM_PERM_BADC));
        if (_mm512_mask_test_epi8_mask(small, row, row) != 0) return false;
        top = _mm512_max_epu8(top, least);  // rows of zeros
    }
    const __m512i shift = _mm512_sub_epi8(exponent_bits, _mm512_and_si512(top, exponent_bits));
    for (int h = 0; h < 2; ++h) {
        const uint8_t* in = data + (h * 2 + t) * kHalfVectors * kVectorBytes;
        for (int v = 0; v < kHalfVectors; ++v) {
            const __m512i code = _mm512_load_si512(in + v * kVectorBytes);
            __m512i index = _mm512_add_epi8(code, shift);
            if (distances != nullptr)
                index = _mm512_add_epi8(_mm512_subs_epu8(_mm512_and_si512(code, magnitude), below[h]), shift);
            const __m512i integer = lookup(kE4m3Integers, index);
            const __m512i biased = _mm512_mask_sub_epi8(integer, _mm512_movepi8_mask(code), _mm512_setzero_si512(), integer);
            _mm512_store_si512(codes + (h * kHalfVectors + v) * 2 * kVectorBytes, _mm512_shuffle_epi8(biased, by_row));
        }
    }
    // A code is (8 + mantissa) * 2^(exponent - 10), and its integer times 2^(3 - 15) at the largest exponent.
    const __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(_mm512_shuffle_epi8(top, by_row), kE4M3MantissaBits),
                                              _mm512_set1_epi32(15));
    _mm512_store_ps(units, powers(_mm512_sub_epi32(exponent, _mm512_set1_epi32(13))));
    return true;
}

// Columns 0 4 1 5 2 6 3 7.
inline bool decode_int8_mxfp4(const uint8_t* data, const uint8_t* distances, int t, uint8_t* codes, float* units) {
    constexpr int kHalfVectors = kInt8Vectors / 4, kMost = 7;
    const __m512i nibble = _mm512_set1_epi8(15), magnitudes = _mm512_set1_epi8(0x77);
    __m512i distance[2], least = _mm512_set1_epi32(kMaxDistance);
    __mmask16 present[2];
    for (int h = 0; h < 2; ++h) {
        const uint8_t* in = data + (h * 2 + t) * kHalfVectors * kVectorBytes;
        __m512i any = _mm512_setzero_si512();
        for (int v = 0; v < kHalfVectors; ++v) any = _mm512_or_si512(any, _mm512_load_si512(in + v * kVectorBytes));
        present[h] = _mm512_test_epi32_mask(any, magnitudes);
        distance[h] = sixteen_bytes(distances + h * kPanelRows + t * kTileRows);
        least = _mm512_mask_min_epi32(least, present[h], least, distance[h]);
    }
    __mmask16 far = _mm512_cmpgt_epi32_mask(least, _mm512_set1_epi32(90));  // the unit would be too small
    for (int h = 0; h < 2; ++h) {
        distance[h] = _mm512_sub_epi32(distance[h], least);
        far |= _mm512_mask_cmpgt_epi32_mask(present[h], distance[h], _mm512_set1_epi32(kMost));
    }
    if (__builtin_expect(far != 0, 0)) return false;
    for (int h = 0; h < 2; ++h) {
        const uint8_t* in = data + (h * 2 + t) * kHalfVectors * kVectorBytes;
        const __m512i in_range = _mm512_maskz_mov_epi32(present[h], distance[h]);
        const __m512i offset = _mm512_slli_epi32(four_times(in_range), 4);
        constexpr int kAndOr = 0xea;  // (a & b) | c
        for (int v = 0; v < kHalfVectors; ++v) {
            const __m512i pair = _mm512_load_si512(in + v * kVectorBytes);
            const __m512i low = _mm512_ternarylogic_epi32(pair, nibble, offset, kAndOr);
            const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(pair, 4), nibble, offset, kAndOr);
            uint8_t* out = codes + (h * kHalfVectors + v) * 4 * kVectorBytes;
            _mm512_store_si512(out, lookup(kE2m1Integers, low));
            _mm512_store_si512(out + 2 * kVectorBytes, lookup(kE2m1Integers, high));
        }
    }
    _mm512_store_ps(units, powers(_mm512_sub_epi32(_mm512_set1_epi32(-4), least)));
    return true;
}

// Columns 0 2 1 3 4 6 5 7. Twice an element times the mantissa of its scale, shifted by the distance of the exponents.
inline bool decode_int8_nvfp4(const uint8_t* data, const uint8_t* scales, int t, uint8_t* codes, float* units) {
    constexpr int kQuarters = 4, kQuarterVectors = kE4M3Cols / 8, kFraction = 8;
    const __m512i mantissa = _mm512_set1_epi32(7), one = _mm512_set1_epi32(1);
    const auto quarter_data = [&](int q) {
        return data + ((q / 2 * 2 + t) * 2 + q % 2) * kQuarterVectors * kVectorBytes;
    };
    __m512i scale[kQuarters], top = _mm512_setzero_si512(), signs = _mm512_setzero_si512();
    for (int q = 0; q < kQuarters; ++q) {
        const uint8_t* in = quarter_data(q);
        const __m512i any = _mm512_or_si512(_mm512_load_si512(in), _mm512_load_si512(in + kVectorBytes));
        scale[q] = sixteen_bytes(scales + q * kPanelRows + t * kTileRows);
        signs = _mm512_or_si512(signs, scale[q]);
        top = _mm512_mask_max_epi32(top, _mm512_test_epi32_mask(any, _mm512_set1_epi8(0x77)), top, scale[q]);
    }
    if (__builtin_expect(_mm512_test_epi32_mask(signs, _mm512_set1_epi32(0x80)) != 0, 0)) return false;
    const auto exponent_of = [&](__m512i code) { return _mm512_max_epi32(_mm512_srli_epi32(code, 3), one); };
    const auto significand_of = [&](__m512i code) {
        const __mmask16 normal = _mm512_cmpgt_epi32_mask(code, mantissa);
        const __m512i bits = _mm512_and_si512(code, mantissa);
        return _mm512_mask_add_epi32(bits, normal, bits, _mm512_set1_epi32(8));
    };
    // 12 times a mantissa up to 10 fits; a larger one is halved.
    constexpr int kMostSignificand = 10;
    const __mmask16 halved = _mm512_cmpgt_epi32_mask(significand_of(top), _mm512_set1_epi32(kMostSignificand));
    const __m512i largest = _mm512_mask_add_epi32(exponent_of(top), halved, exponent_of(top), one);
    const __m512i values = _mm512_load_si512(kNvfp4Values.words);
    const __m512i even = _mm512_set1_epi16(0xff), sign = _mm512_set1_epi8(-kInt8Offset);
    for (int q = 0; q < kQuarters; ++q) {
        const uint8_t* in = quarter_data(q);
        // A block of zeros may have a larger scale; any factor does for it.
        const __m512i down = _mm512_max_epi32(_mm512_sub_epi32(largest, exponent_of(scale[q])), _mm512_setzero_si512());
        const __m512i factor32 = _mm512_srlv_epi32(_mm512_slli_epi32(significand_of(scale[q]), kFraction), down);
        const __m512i factor = _mm512_or_si512(factor32, _mm512_slli_epi32(factor32, 16));
        for (int v = 0; v < kQuarterVectors; ++v) {
            const __m512i nibbles = _mm512_load_si512(in + v * kVectorBytes);
            uint8_t* out = codes + (q * kQuarterVectors + v) * 4 * kVectorBytes;
            const auto integers = [&](__m512i shifted) {
                return _mm512_mulhrs_epi16(_mm512_permutexvar_epi16(shifted, values), factor);
            };
            constexpr int kSelect = 0xca;  // a ? b : c
            const auto four = [&](__m512i first, __m512i second) {
                const __m512i both = _mm512_ternarylogic_epi32(even, integers(first),
                                                               _mm512_slli_epi16(integers(second), 8), kSelect);
                return _mm512_xor_si512(both, sign);
            };
            _mm512_store_si512(out, four(nibbles, _mm512_srli_epi16(nibbles, 4)));
            _mm512_store_si512(out + 2 * kVectorBytes,
                               four(_mm512_srli_epi16(nibbles, 8), _mm512_srli_epi16(nibbles, 12)));
        }
    }
    // Twice an element, and mantissas in eighths: 2^-(1 + 10).
    _mm512_store_ps(units, powers(_mm512_sub_epi32(largest, _mm512_set1_epi32(11))));
    return true;
}

// Decodes step `s` of panel `p`: `codes` [kInt8GroupBytes], and the factors of the sums of the group's rows.
inline void decode_int8(const Weight& w, int64_t p, int64_t s, uint8_t* codes, float* scales) {
    const uint8_t* step = w.panel(p) + s * w.step_bytes;
    const uint8_t* data = step + w.scale_bytes;
    for (int t = 0; t < 2; ++t, codes += kVectorBytes, scales += kTileRows) {
        bool decoded;
        if (w.element == MINIFLOAT_E4M3) {
            decoded = decode_int8_e4m3(data, w.grid == MINIFLOAT_GRID_E8M0 ? step : nullptr, t, codes, scales);
        } else if (w.grid == MINIFLOAT_GRID_E8M0) {
            decoded = decode_int8_mxfp4(data, step, t, codes, scales);
        } else {
            decoded = decode_int8_nvfp4(data, step, t, codes, scales);
        }
        if (!decoded) decode_int8_any(w, p, s, t, codes, scales);
        if (w.grid == MINIFLOAT_GRID_BLOCK) {
            const float* block = w.block_scale(p, min(s * kStepCols / w.block_cols, w.groups - 1));
            const __m512 factor = w.block_lanes == 1 ? _mm512_set1_ps(*block) : _mm512_loadu_ps(block + t * kTileRows);
            _mm512_store_ps(scales, _mm512_mul_ps(_mm512_load_ps(scales), factor));
        }
    }
}

}  // namespace MINIFLOAT_ISA

#endif
