// AVX512_BF16 for up to kDotRows rows of x: weights are decoded in registers, and the sums of a panel stay in registers
// from its first column to its last. The batch-invariant path is the same with one chain of sums for every number of
// rows.
#include "bf16_dot.h"
#include "bf16_tiles.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int kPairedRows = 3;

// Prefetches lines in the order of memory, as the hardware prefetcher expects.
struct InOrder {
    void line(const uint8_t* p) const { prefetch_ahead(p); }
    void keep(int, int, __m512i) const {}
};

// out [kPanels][kRows][kPanelRows] = kRows rows of x times panels that follow each other. Not inlined: next to other loops
// the compiler spills registers.
template <int kRows, int kChains, int kPanels, class Format>
__attribute__((noinline)) void multiply_panels(const Format& format, const Weight& w, int64_t p, const uint8_t* x,
                                               int64_t unit_bytes, float* out) {
    DotSums<kRows, kChains> sums[kPanels];
#pragma GCC unroll 2
    for (int i = 0; i < kPanels; ++i) sums[i].clear();
    const uint8_t* step = w.panel(p);
    const int64_t units = units_of(w), group_units = w.groups == 1 ? units : w.block_cols / kHalfCols;
    int64_t unit = 0;
    for (int64_t g = 0; g < (Format::kBlocks ? w.groups : 1); ++g) {
        // The last group takes the columns of padding too.
        const int64_t end = Format::kBlocks && g + 1 < w.groups ? unit + group_units : units;
        for (; unit < end; ++unit, x += unit_bytes) {
#pragma GCC unroll 2
            for (int i = 0; i < kPanels; ++i)
                add_half<kRows>(format, step + i * w.panel_bytes, w.scale_bytes, static_cast<int>(unit & 1), x, sums[i],
                                InOrder());
            if (unit & 1) step += w.step_bytes;
        }
#pragma GCC unroll 4
        for (int i = 0; i < 2 * kPanels; ++i) {
            const int panel = i / 2, t = i % 2;
            const float* scales = Format::kBlocks ? w.block_scale(p + panel, g) : nullptr;
            __m512 scale = _mm512_set1_ps(1.0f);
            if (Format::kBlocks)
                scale = w.block_lanes == 1 ? _mm512_set1_ps(*scales) : _mm512_loadu_ps(scales + t * kTileRows);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* to = out + (panel * kRows + r) * kPanelRows + t * kTileRows;
                const __m512 total = sums[panel].total(r, t);
                if (!Format::kBlocks) {
                    _mm512_store_ps(to, total);
                } else if (g == 0) {
                    _mm512_store_ps(to, _mm512_mul_ps(total, scale));
                } else {
                    _mm512_store_ps(to, _mm512_fmadd_ps(total, scale, _mm512_load_ps(to)));
                }
            }
        }
        if (Format::kBlocks)
#pragma GCC unroll 2
            for (int i = 0; i < kPanels; ++i) sums[i].clear();
    }
}

template <int kRows, bool kInvariant, int kPanels, class Format>
void multiply_rows(int rows, const Format& format, const Weight& w, int64_t p, const uint8_t* x, int64_t unit_bytes,
                   float* out) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<kRows - 1, kInvariant, kPanels>(rows, format, w, p, x, unit_bytes, out);
    }
    multiply_panels<kRows, kInvariant ? 1 : chains_of(kRows), kPanels>(format, w, p, x, unit_bytes, out);
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return packed_x_bytes(w, dot_tiling(m)); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    pack_x(w, x, dot_tiling(x.m), units_of(w), prepared, part, parts);
}

template <int kMostRows, bool kInvariant, int kPanels, class Format>
void multiply_tiles(const Format& format, const Weight& w, const Input& x, const uint8_t* prepared, const Output& y,
                    int64_t p) {
    const Tiling t = dot_tiling(x.m);
    const Finish finish(w, y, p, p + kPanels, format.kFactor);
    alignas(64) float sums[kPanels * kMostRows * kPanelRows];
    for (int64_t tile = 0; tile < t.pairs; ++tile, prepared += units_of(w) * t.unit_bytes()) {
        const int rows = rows_of(t, x.m, tile);
        multiply_rows<kMostRows, kInvariant, kPanels>(rows, format, w, p, prepared, t.unit_bytes(), sums);
        store_dots(w, y, tile * t.rows, rows, p, p + kPanels, finish, sums, int64_t{rows} * kPanelRows);
    }
}

template <bool kInvariant>
bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    return with_format(w, first, [&](const auto& format) {
        int64_t p = first;
        // With few rows and one chain of sums, two panels hide the latency of the dot product.
        if (kInvariant && x.m <= kPairedRows)
            for (; p + 2 <= last; p += 2) multiply_tiles<kPairedRows, kInvariant, 2>(format, w, x, prepared, y, p);
        for (; p < last; ++p) multiply_tiles<kDotRows, kInvariant, 1>(format, w, x, prepared, y, p);
        return true;
    });
}

}  // namespace

extern const Path kBf16SmallPath = {"bf16 small", prepared_bytes, prepare, multiply<false>};
extern const Path kBf16InvariantPath = {"bf16 invariant", prepared_bytes, prepare, multiply<true>, 2};

}  // namespace MINIFLOAT_ISA

#endif
