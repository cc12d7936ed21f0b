// Pairs of rows of bfloat16, the operands of dot products of two (VDPBF16PS, TDPBF16PS), and the transposition of sums.
#pragma once

#include "../vec.h"
#include "gram.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

// Rows 2 p and 2 p + 1 of 32 columns, column after column: columns 0 .. 15 and 16 .. 31.
struct GramPair {
    __m512i low, high;
};

// Reads pair `pair` of a patch of up to 32 columns; zeros stand for rows and columns that do not exist.
inline GramPair load_pair(const GramPatch& from, int pair) {
    const auto index = [](int first) {
        alignas(64) int16_t columns[32];
        for (int c = 0; c < 16; ++c) {
            columns[2 * c] = static_cast<int16_t>(first + c);
            columns[2 * c + 1] = static_cast<int16_t>(first + c + 32);  // of the second row
        }
        return _mm512_load_si512(columns);
    };
    const uint32_t mask = from.cols >= 32 ? ~0u : (1u << from.cols) - 1;
    __m512i row[2];
    for (int k = 0; k < 2; ++k) {
        const int64_t t = 2 * pair + k;
        row[k] = t < from.rows ? _mm512_maskz_loadu_epi16(mask, from.data + t * from.stride) : _mm512_setzero_si512();
    }
    return {_mm512_permutex2var_epi16(row[0], index(0), row[1]), _mm512_permutex2var_epi16(row[0], index(16), row[1])};
}

// Transposes 16 x 16 numbers of 32 bits.
inline void transpose_tile(__m512i* rows) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; ++k) {
            b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + 2 + k]);
            b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + 2 + k]);
        }
    // b[4 g + c] now has in lane l of 128 bits the rows 4 g .. 4 g + 3 of column 4 l + c.
    for (int c = 0; c < 4; ++c) {
        const __m512i even01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);  // columns c, 8 + c
        const __m512i odd01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);   // columns 4 + c, 12 + c
        const __m512i even23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        rows[8 + c] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        rows[4 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        rows[12 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
}

}  // namespace MINIFLOAT_ISA

#endif
