// Panels of a Gram product of bfloat16 for AMX: products of bfloat16, sums of float32.
//
// A tile holds 16 columns of 32 rows, as pairs of rows: of x a pair after the other for each column, of y a column
// after the other for each pair. TDPBF16PS has no subnormal numbers: inputs and sums below 2^-126 count as zero.
#pragma once

#include "../linear/amx.h"
#include "gram.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {

struct GramAmx {
    static constexpr int kLeft = 2 * kTileRows;  // two tiles of x and two of y give four products
    static constexpr int kRight = 2 * kTileRows;
    static constexpr int kBytes = 2;
    static constexpr int kPackRows = 2 * kTileRows;
    static constexpr int64_t kSlabRows = 2048;
    static constexpr int64_t kDepth = 512;  // a panel of y of 32 KiB, two thirds of the L1 cache, which x bypasses
    static constexpr int kStepBytes = 2 * kTileBytes;

    struct Scope {
        Tiles tiles{linear_tiles(kTileRows)};
    };

    static void pack_left(const GramPatch& from, int32_t, uint8_t* out) {
        alignas(64) __m512i pairs[2 * kTileRows];
        interleave(from, pairs);
        for (int tile = 0; tile < 2; ++tile) {
            __m512i* rows = pairs + tile * kTileRows;
            transpose_tile(rows);
            for (int i = 0; i < kTileRows; ++i)
                _mm512_store_si512(out + (tile * kTileRows + i) * kVectorBytes, rows[i]);
        }
    }

    static void pack_right(const GramPatch& from, int32_t, uint8_t* out) {
        alignas(64) __m512i pairs[2 * kTileRows];
        interleave(from, pairs);
        for (int i = 0; i < 2 * kTileRows; ++i) _mm512_store_si512(out + i * kVectorBytes, pairs[i]);
    }

    // sums[i][j] += left[t][i] * right[t][j]; the first call for a block replaces `sums`.
    static void multiply(const uint8_t* left, const uint8_t* right, int64_t depth, bool first, float* sums) {
        constexpr int kStride = kRight * static_cast<int>(sizeof(float));
        float* const lower = sums + kTileRows * kRight;
        if (first) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, kStride);
            _tile_loadd(1, sums + kTileRows, kStride);
            _tile_loadd(2, lower, kStride);
            _tile_loadd(3, lower + kTileRows, kStride);
        }
        for (int64_t t = 0; t < depth; t += kBandRows, left += kStepBytes, right += kStepBytes) {
            _tile_stream_loadd(4, left, kVectorBytes);
            _tile_loadd(6, right, kVectorBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right + kTileBytes, kVectorBytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_stream_loadd(5, left + kTileBytes, kVectorBytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, kStride);
        _tile_stored(1, sums + kTileRows, kStride);
        _tile_stored(2, lower, kStride);
        _tile_stored(3, lower + kTileRows, kStride);
        publish();
    }

    static void transpose(const float* sums, float* out) {
        for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 2; ++j) {
                __m512i rows[kTileRows];
                for (int r = 0; r < kTileRows; ++r)
                    rows[r] = _mm512_loadu_si512(sums + (i * kTileRows + r) * kRight + j * kTileRows);
                transpose_tile(rows);
                for (int r = 0; r < kTileRows; ++r)
                    _mm512_storeu_si512(out + (j * kTileRows + r) * kLeft + i * kTileRows, rows[r]);
            }
    }

  private:
    // The pairs of 32 rows: for 16 pairs of rows columns 0 .. 15, then for the same pairs columns 16 .. 31.
    static void interleave(const GramPatch& from, __m512i* pairs) {
        const auto index = [](int first) {
            alignas(64) int16_t columns[32];
            for (int c = 0; c < 16; ++c) {
                columns[2 * c] = static_cast<int16_t>(first + c);
                columns[2 * c + 1] = static_cast<int16_t>(first + c + 32);  // of the second row
            }
            return _mm512_load_si512(columns);
        };
        const __m512i low = index(0), high = index(16);
        const uint32_t mask = from.cols >= 32 ? ~0u : (1u << from.cols) - 1;
        for (int pair = 0; pair < kTileRows; ++pair) {
            __m512i row[2];
            for (int k = 0; k < 2; ++k) {
                const int64_t t = 2 * pair + k;
                row[k] = t < from.rows ? _mm512_maskz_loadu_epi16(mask, from.data + t * from.stride)
                                       : _mm512_setzero_si512();
            }
            pairs[pair] = _mm512_permutex2var_epi16(row[0], low, row[1]);
            pairs[kTileRows + pair] = _mm512_permutex2var_epi16(row[0], high, row[1]);
        }
    }

    // Transposes 16 x 16 numbers of 32 bits.
    static void transpose_tile(__m512i* rows) {
        __m512i a[kTileRows], b[kTileRows];
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
};

}  // namespace MINIFLOAT_ISA

#endif
