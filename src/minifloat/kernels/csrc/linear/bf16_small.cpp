// AVX512_BF16 for up to kDotRows rows of x: weights are decoded in registers, and the sums of a panel stay in registers from
// its first column to its last.
#include "bf16_dot.h"
#include "bf16_tiles.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

// Prefetches lines in the order of memory, as the hardware prefetcher expects.
struct InOrder {
    void line(const uint8_t* p) const { prefetch_ahead(p); }
    void keep(int, int, __m512i) const {}
};

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
            add_half<kRows>(format, step, w.scale_bytes, static_cast<int>(unit & 1), x, sums, InOrder());
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
    const int rows = static_cast<int>(x.m);
    return with_format(w, first, [&](const auto& format) {
        alignas(64) float sums[kDotRows * kPanelRows];
        for (int64_t p = first; p < last; ++p) {
            multiply_rows<kDotRows>(rows, format, w, p, prepared, rows * int64_t{kVectorBytes}, sums);
            store_dots(w, y, 0, rows, p, p + 1, Finish(w, y, p, p + 1, format.kFactor), sums, 0);
        }
        return true;
    });
}

}  // namespace

extern const Path kBf16SmallPath = {"bf16 small", prepared_bytes, prepare, multiply};

}  // namespace MINIFLOAT_ISA

#endif
