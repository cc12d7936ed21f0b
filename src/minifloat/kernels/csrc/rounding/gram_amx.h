// Panels of a Gram product of bfloat16 for AMX: products of bfloat16, sums of float32. Inputs and sums below 2^-126
// count as zero.
#pragma once

#include "../linear/amx.h"
#include "gram_pairs.h"

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
        for (int pair = 0; pair < kTileRows; ++pair) {
            const GramPair columns = load_pair(from, pair);
            pairs[pair] = columns.low;
            pairs[kTileRows + pair] = columns.high;
        }
    }
};

}  // namespace MINIFLOAT_ISA

#endif
