// Storing of sums of several panels into y, for the paths that keep them as tiles of rows.
#pragma once

#include "convert.h"

namespace MINIFLOAT_ISA {

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
