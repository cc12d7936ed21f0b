// AVX512_BF16 for few rows of x: weights are decoded in registers, and up to kDotRows rows of x share the decoding. The
// sums of a panel stay in registers from its first column to its last. More rows form several tiles, for which a panel is
// decoded again, from the L2 cache.
#include "bf16_dot.h"
#include "bf16_tiles.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

// With few rows, sums of alternate pairs hide the latency of the dot product.
constexpr int chains_of(int rows) { return rows <= 3 ? 2 : 1; }

// Sums of kRows rows of x and the panel, [row][tile of W][chain].
template <int kRows>
struct DotSums {
    static constexpr int kChains = chains_of(kRows);
    __m512 v[kRows][2][kChains];

    void clear() {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < 2; ++t)
                for (int c = 0; c < kChains; ++c) v[r][t][c] = _mm512_setzero_ps();
    }
    __m512 total(int r, int t) const {
        return kChains == 1 ? v[r][t][0] : _mm512_add_ps(v[r][t][0], v[r][t][kChains - 1]);
    }
};

// Adds the products of 32 columns, half a step.
template <int kRows, class Format>
inline __attribute__((always_inline)) void add_half(const Format& format, const uint8_t* step, int32_t scale_bytes,
                                                    int half, const uint8_t* x, DotSums<kRows>& sums) {
    constexpr int kVectors = kUnitPairs / Format::kPairs, kGroupVectors = kVectors / Format::kGroups;
    constexpr int kTile = kVectors * kVectorBytes;
    const uint8_t* data = step + scale_bytes + half * 2 * kTile;
    for (int g = 0; g < Format::kGroups; ++g) {
        const typename Format::Scales scales = format.scales(step, half, g);
#pragma GCC unroll 2
        for (int i = 0; i < kGroupVectors; ++i, x += Format::kPairs * 4) {
            const int v = g * kGroupVectors + i;
            // In the order of memory, as the hardware prefetcher expects.
            for (int t = 0; t < 2; ++t) prefetch_ahead(data + (2 * v + t) * kVectorBytes);
            __m512i pairs[2][Format::kPairs];
            format.pairs(data + v * kVectorBytes, data + kTile + v * kVectorBytes, scales, pairs);
#pragma GCC unroll 4
            for (int p = 0; p < Format::kPairs; ++p)
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
                    const __m512bh factor = broadcast_pair(x + r * kVectorBytes + p * 4);
                    for (int t = 0; t < 2; ++t) {
                        __m512& sum = sums.v[r][t][p % DotSums<kRows>::kChains];
                        sum = _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(pairs[t][p]), factor);
                    }
                }
        }
    }
}

// out [kRows][kPanelRows] = kRows rows of x times a panel. Not inlined: next to other loops the compiler spills registers.
template <int kRows, class Format>
__attribute__((noinline)) void multiply_panel(const Format& format, const Weight& w, int64_t p, const uint8_t* x,
                                              int64_t unit_bytes, float* out) {
    DotSums<kRows> sums;
    sums.clear();
    const uint8_t* step = w.panel(p);
    const int64_t units = units_of(w), group_units = w.groups == 1 ? units : w.block_cols / kHalfCols;
    int64_t unit = 0;
    for (int64_t g = 0; g < (Format::kBlocks ? w.groups : 1); ++g) {
        // The last group takes the columns of padding too.
        const int64_t end = Format::kBlocks && g + 1 < w.groups ? unit + group_units : units;
        for (; unit < end; ++unit, x += unit_bytes) {
            add_half<kRows>(format, step, w.scale_bytes, static_cast<int>(unit & 1), x, sums);
            if (unit & 1) step += w.step_bytes;
        }
        const float* scales = Format::kBlocks ? w.block_scale(p, g) : nullptr;
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
            __m512 scale = _mm512_set1_ps(1.0f);
            if (Format::kBlocks)
                scale = w.block_lanes == 1 ? _mm512_set1_ps(*scales) : _mm512_loadu_ps(scales + t * kTileRows);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* to = out + r * kPanelRows + t * kTileRows;
                const __m512 total = sums.total(r, t);
                if (!Format::kBlocks) {
                    _mm512_store_ps(to, total);
                } else if (g == 0) {
                    _mm512_store_ps(to, _mm512_mul_ps(total, scale));
                } else {
                    _mm512_store_ps(to, _mm512_fmadd_ps(total, scale, _mm512_load_ps(to)));
                }
            }
        }
        if (Format::kBlocks) sums.clear();
    }
}

template <int kRows, class Format>
void multiply_rows(int rows, const Format& format, const Weight& w, int64_t p, const uint8_t* x, int64_t unit_bytes,
                   float* out) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<kRows - 1>(rows, format, w, p, x, unit_bytes, out);
    }
    multiply_panel<kRows>(format, w, p, x, unit_bytes, out);
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return packed_x_bytes(w, dot_tiling(m)); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    pack_x(w, x, dot_tiling(x.m), units_of(w), prepared, part, parts);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const Tiling t = dot_tiling(x.m);
    const int64_t tile_bytes = units_of(w) * t.unit_bytes();
    return with_format(w, first, [&](const auto& format) {
        alignas(64) float sums[kDotRows * kPanelRows];
        for (int64_t p = first; p < last; ++p) {
            const Finish finish(w, y, p, p + 1, format.kFactor);
            for (int64_t tile = 0; tile < t.pairs; ++tile) {
                const int rows = rows_of(t, x.m, tile);
                multiply_rows<kDotRows>(rows, format, w, p, prepared + tile * tile_bytes, t.unit_bytes(), sums);
                store_dots(w, y, tile * t.rows, rows, p, p + 1, finish, sums, 0);
            }
        }
        return true;
    });
}

}  // namespace

extern const Path kBf16SmallPath = {"bf16 small", prepared_bytes, prepare, multiply};

}  // namespace MINIFLOAT_ISA

#endif
