// Shared by the AVX512_BF16 paths: the division of x into tiles of rows, and products of weights that are decoded in
// registers. VDPBF16PS rounds to nearest even and has no subnormal numbers: bf16 inputs and sums below 2^-126 count as
// zero.
#pragma once

#include "bf16_x.h"
#include "convert.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

// Rows of x of a tile. With two vectors of sums each, two vectors of W and one of x, they fill the registers.
constexpr int kDotRows = 12;
constexpr int kUnitPairs = kHalfCols / 2;

// Tiles of at most `most` rows that hold the rows evenly; the last may have fewer rows.
inline Tiling dot_tiling(int64_t m, int most = kDotRows) {
    Tiling t = {};
    t.pairs = ceil_div(m, most);
    t.tiles = 1;
    t.rows = static_cast<int>(ceil_div(m, t.pairs));
    t.planes = 1;
    return t;
}

inline int rows_of(const Tiling& t, int64_t m, int64_t tile) {
    return static_cast<int>(min<int64_t>(t.rows, m - tile * t.rows));
}

// A pair of columns of a row of x in all lanes.
inline __m512bh broadcast_pair(const uint8_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return bit_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// With few rows, sums of alternate pairs hide the latency of the dot product.
constexpr int chains_of(int rows) { return rows <= 3 ? 2 : 1; }

// Sums of kRows rows of x and the panel, [row][tile of W][chain].
template <int kRows, int kChains_ = chains_of(kRows)>
struct DotSums {
    static constexpr int kChains = kChains_;
    __m512 v[kRows][2][kChains];

    void clear() {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < 2; ++t)
                for (int c = 0; c < kChains; ++c) v[r][t][c] = _mm512_setzero_ps();
    }
    // With one chain: goes on with sums [kRows][kPanelRows] in memory.
    void load(const float* sums) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < 2; ++t) v[r][t][0] = _mm512_load_ps(sums + r * kPanelRows + t * kTileRows);
    }
    void multiply(float factor) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < 2; ++t)
                for (int c = 0; c < kChains; ++c) v[r][t][c] = _mm512_mul_ps(v[r][t][c], _mm512_set1_ps(factor));
    }
    __m512 total(int r, int t) const {
        return kChains == 1 ? v[r][t][0] : _mm512_add_ps(v[r][t][0], v[r][t][kChains - 1]);
    }
};

// Adds the products of 32 columns, half a step, which are decoded in registers. watch.line(p) is called for every line
// that is read, in the order of memory, and watch.keep(tile, pair, w) for every decoded vector.
template <int kRows, class Format, class Watch, int kChains>
inline __attribute__((always_inline)) void add_half(const Format& format, const uint8_t* step, int32_t scale_bytes,
                                                    int half, const uint8_t* x, DotSums<kRows, kChains>& sums,
                                                    const Watch& watch) {
    constexpr int kVectors = kUnitPairs / Format::kPairs, kGroupVectors = kVectors / Format::kGroups;
    constexpr int kTile = kVectors * kVectorBytes;
    const uint8_t* data = step + scale_bytes + half * 2 * kTile;
    for (int g = 0; g < Format::kGroups; ++g) {
        const typename Format::Scales scales = format.scales(step, half, g);
#pragma GCC unroll 2
        for (int i = 0; i < kGroupVectors; ++i, x += Format::kPairs * 4) {
            const int v = g * kGroupVectors + i;
            for (int t = 0; t < 2; ++t) watch.line(data + (2 * v + t) * kVectorBytes);
            __m512i pairs[2][Format::kPairs];
            format.template pairs<kRows>(data + v * kVectorBytes, data + kTile + v * kVectorBytes, scales, pairs);
#pragma GCC unroll 4
            for (int p = 0; p < Format::kPairs; ++p) {
                for (int t = 0; t < 2; ++t) watch.keep(t, v * Format::kPairs + p, pairs[t][p]);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    const __m512bh factor = broadcast_pair(x + r * kVectorBytes + p * 4);
                    for (int t = 0; t < 2; ++t) {
                        __m512& sum = sums.v[r][t][p % kChains];
                        sum = _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(pairs[t][p]), factor);
                    }
                }
            }
        }
    }
}

}  // namespace MINIFLOAT_ISA

#endif
