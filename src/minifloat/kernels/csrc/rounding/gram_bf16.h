// Panels of a Gram product of bfloat16 for AVX512_BF16: dot products of pairs of rows, sums of float32. VDPBF16PS adds
// the products of a pair one after the other, rounding each sum to nearest even; inputs and sums below 2^-126 count as
// zero.
#pragma once

#include "gram_pairs.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

struct GramBf16 {
    // 24 vectors of sums, the two of y that a pair of rows adds to them, and an element of x.
    static constexpr int kLeft = 12;
    static constexpr int kVectors = 2;
    static constexpr int kRight = kVectors * 16;
    static constexpr int kBytes = 2;
    static constexpr int kPackRows = 32;
    static constexpr int64_t kSlabRows = 2048;
    static constexpr int64_t kDepth = 512;  // a panel of y of 32 KiB
    static constexpr int kPairs = kPackRows / 2;

    struct Scope {
        Scope() {}
    };

    static void pack_left(const GramPatch& from, int32_t, uint8_t* out) {
        for (int pair = 0; pair < kPairs; ++pair)
            _mm512_mask_storeu_epi32(out + pair * kLeft * 4, (1 << kLeft) - 1, load_pair(from, pair).low);
    }

    static void pack_right(const GramPatch& from, int32_t, uint8_t* out) {
        for (int pair = 0; pair < kPairs; ++pair, out += kRight * 4) {
            const GramPair columns = load_pair(from, pair);
            _mm512_store_si512(out, columns.low);
            _mm512_store_si512(out + 64, columns.high);
        }
    }

    // sums[i][j] += left[t][i] * right[t][j]; the first call for a block replaces `sums`.
    static void multiply(const uint8_t* left, const uint8_t* right, int64_t depth, bool first, float* sums) {
        __m512 total[kLeft][kVectors];
#pragma GCC unroll 16
        for (int i = 0; i < kLeft; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                _mm_prefetch(reinterpret_cast<const char*>(sums + i * kRight + v * 16), _MM_HINT_T0);
                total[i][v] = _mm512_setzero_ps();
            }
        for (int64_t t = 0; t < depth; t += 2, left += kLeft * 4, right += kRight * 4) {
            __m512bh columns[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                columns[v] = bit_cast<__m512bh>(_mm512_load_si512(right + v * 64));
#pragma GCC unroll 16
            for (int i = 0; i < kLeft; ++i) {
                int32_t pair;
                __builtin_memcpy(&pair, left + i * 4, sizeof pair);
                const __m512bh factor = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) total[i][v] = _mm512_dpbf16_ps(total[i][v], columns[v], factor);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLeft; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                float* to = sums + i * kRight + v * 16;
                _mm512_store_ps(to, first ? total[i][v] : _mm512_add_ps(_mm512_load_ps(to), total[i][v]));
            }
    }

    static void transpose(const float* sums, float* out) {
        for (int v = 0; v < kVectors; ++v) {
            __m512i rows[16];
            for (int i = 0; i < 16; ++i)
                rows[i] = i < kLeft ? _mm512_load_si512(sums + i * kRight + v * 16) : _mm512_setzero_si512();
            transpose_tile(rows);
            for (int j = 0; j < 16; ++j)
                _mm512_mask_storeu_epi32(out + (v * 16 + j) * kLeft, (1 << kLeft) - 1, rows[j]);
        }
    }
};

}  // namespace MINIFLOAT_ISA

#endif
