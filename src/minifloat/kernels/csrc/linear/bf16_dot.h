// Shared by the AVX512_BF16 paths: the division of x into tiles of rows, and storing of sums into y.
//
// VDPBF16PS multiplies a pair of columns of x, broadcast, with the same pair of 16 rows of W and adds both products to
// 16 sums. It rounds to nearest even and has no subnormal numbers: bf16 inputs and sums below 2^-126 count as zero.
#pragma once

#include "bf16_x.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

// Rows of x of a tile. With two vectors of sums each, two vectors of W and one of x, they fill the registers.
constexpr int kDotRows = 12;
constexpr int kUnitPairs = kHalfCols / 2;

// Tiles that hold the rows evenly; the last may have fewer rows.
inline Tiling dot_tiling(int64_t m) {
    Tiling t = {};
    t.pairs = ceil_div(m, kDotRows);
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

template <class Row>
inline void store_dots_as(const Weight& w, const Output& y, int64_t row, int rows, int64_t first, int64_t last,
                          const Finish& finish, const float* sums, int64_t panel_floats) {
    for (int r = 0; r < rows; ++r) {
        uint8_t* out = y.data + (row + r) * y.stride + first * kPanelRows * Row::kBytes;
        int64_t left = w.rows - first * kPanelRows;
        for (int64_t p = 0; p < last - first; ++p)
            for (int n = 0; n < kPanelRows && left > 0; n += kWidth, left -= kWidth, out += kWidth * Row::kBytes) {
                const int64_t col = p * kPanelRows + n;
                const F32 value = load(sums + p * panel_floats + r * kPanelRows + n) * load(finish.scale + col) +
                                  load(finish.bias + col);
                if (left >= kWidth) {
                    Row::store(out, value);
                } else {
                    store_some<Row>(out, value, left);
                }
            }
    }
}

// Stores the columns of y of panels first .. last - 1 for `rows` rows from `row` on. `sums` are those of the first panel,
// [rows][kPanelRows]; the sums of the next panel follow after `panel_floats`.
inline void store_dots(const Weight& w, const Output& y, int64_t row, int rows, int64_t first, int64_t last,
                       const Finish& finish, const float* sums, int64_t panel_floats) {
    const auto store = [&](auto type) {
        store_dots_as<decltype(type)>(w, y, row, rows, first, last, finish, sums, panel_floats);
    };
    if (y.dtype == MINIFLOAT_BF16) store(Bf16Row());
    if (y.dtype == MINIFLOAT_F16) store(F16Row());
    if (y.dtype == MINIFLOAT_F32) store(F32Row());
}

}  // namespace MINIFLOAT_ISA

#endif
