// The layout of a packed weight in memory: the order in which the kernels read it, from its first byte to its last.
//
// A weight [N, K] is cut into panels of 32 rows, and a panel into steps of 64 columns; the last panel and step are
// padded with zeros. Panels follow each other, and so do the steps of a panel:
//
//   Header | row scales, float [panels * 32] | block scales, float [panels, groups, lanes] | normal, uint16_t [panels,
//   steps], of E4M3 | steps, page aligned
//
//   E4M3 step   [inline scales] 2 halves of 32 columns, 2 tiles of 16 rows, 8 vectors of 4 columns: 2048 bytes
//   E2M1 step   [inline scales] 2 halves of 32 columns, 2 tiles of 16 rows, 4 vectors of 8 columns: 1024 bytes
//   BF16 step                   2 halves of 32 columns, 2 tiles of 16 rows, 16 vectors of 2 columns: 4096 bytes
//   F16 step                    the same
//   F32 step                    2 halves of 32 columns, 2 tiles of 16 rows, 32 vectors of 1 column: 8192 bytes
//
// A vector is 64 bytes and holds 16 rows:
//   E4M3   four 16-byte lanes of 4 rows each: (k0 k1) of the rows, then (k2 k3) of the rows, so that unpacking bytes to
//          16 bits within lanes gives two rows of a VNNI tile (row r of it: the pair k = 2r, 2r + 1 of 16 rows of W)
//   E2M1   a 32-bit word per row, nibbles from low to high: k0 k2 k4 k6 k1 k3 k5 k7; shifted right by 4 i, the low
//          nibbles of its 16-bit halves are the pair k = 2i, 2i + 1
//   BF16   a 32-bit word per row: the pair k = 2i, 2i + 1; this is a row of a VNNI tile already
//   F16    the same
//   F32    a word per row
//
// Bit 8 h + v of `normal` tells that vectors v of both tiles of half h hold neither zeros nor subnormal numbers.
//
// Inline scales come first in a step: E8M0 64 bytes, [half][row]; E4M3 128 bytes, [quarter of 16 columns][row].
//   E8M0   stored as the distance in powers of two below the largest scale of the row (among blocks that are not all
//          zeros); the row scale is that largest scale. A block more than kMaxDistance below it is stored as zeros: its
//          contribution to a sum is 100 powers of two below the rounding of float32.
//   E4M3   the codes of the checkpoint; the row scale is the tensor's.
// A row with a NaN has a NaN row scale, which makes all its results NaN. Its codes are all finite: a NaN element is
// stored as zero, a NaN inline scale as distance or code zero.
//
// Source: Intel Architecture Instruction Set Extensions Programming Reference, TDPBF16PS, for the tiles.
#pragma once

#include <stdint.h>

#include "../../native/api.h"
#include "../vec.h"

namespace MINIFLOAT_ISA {

constexpr int kPanelRows = 32;
constexpr int kTileRows = 16;
constexpr int kStepCols = 64;
constexpr int kHalfCols = 32;
constexpr int kVectorBytes = 64;
constexpr int kE8M0Cols = 32;
constexpr int kE4M3Cols = 16;
constexpr int kMaxDistance = 125;  // the smallest E2M1 value, 2^-1, stays a normal number of bf16 below 2^0

struct Header {
    uint32_t magic, version;
    int32_t element, grid;
    int64_t rows, cols;
    int64_t block_cols;   // of GRID_BLOCK: a multiple of kHalfCols, or >= cols
    int32_t block_lanes;  // 1: a block scale is one float; kPanelRows: one for every row of the panel
    int32_t reserved;
    int64_t row_scales, block_scales, steps;  // offsets in bytes from the header
    int64_t bytes;                            // of all
};
static_assert(sizeof(Header) == 80, "no padding");

constexpr uint32_t kMagic = 0x4b504d46;
constexpr uint32_t kLayoutVersion = 2;
constexpr int64_t kStepsAlignment = 4096;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// A packed weight, as kernels see it.
struct Weight {
    int32_t element, grid;
    int64_t rows, cols;
    int64_t panels, steps;  // steps of a panel
    int32_t scale_bytes;    // inline scales at the head of a step
    int32_t step_bytes;     // with them
    int64_t panel_bytes;
    int64_t block_cols, groups;  // of GRID_BLOCK; else one group
    int32_t block_lanes;
    const float* row_scales;    // [panels * kPanelRows]
    const float* block_scales;  // [panels, groups, block_lanes]
    const uint8_t* data;

    const uint8_t* panel(int64_t p) const { return data + p * panel_bytes; }
    // [steps], of E4M3.
    const uint16_t* normal(int64_t p) const { return reinterpret_cast<const uint16_t*>(data) - (panels - p) * steps; }
    const float* row_scale(int64_t p) const { return row_scales + p * kPanelRows; }
    const float* block_scale(int64_t p, int64_t group) const {
        return block_scales + (p * groups + group) * block_lanes;
    }
};

inline bool is_quantized(int32_t element) { return element < MINIFLOAT_WEIGHT_BF16; }
// Whether elements have more mantissa bits than bf16, so that only float32 multiply-adds are exact.
inline bool is_wide(int32_t element) { return element > MINIFLOAT_WEIGHT_BF16; }

inline int32_t element_bits(int32_t element) {
    if (is_quantized(element)) return element == MINIFLOAT_E4M3 ? 8 : 4;
    return element == MINIFLOAT_WEIGHT_F32 ? 32 : 16;
}

inline int32_t inline_scale_bytes(int32_t grid) {
    if (grid == MINIFLOAT_GRID_E8M0) return kPanelRows * kStepCols / kE8M0Cols;
    if (grid == MINIFLOAT_GRID_E4M3) return kPanelRows * kStepCols / kE4M3Cols;
    return 0;
}

inline Weight view(const Header& h) {
    const uint8_t* base = reinterpret_cast<const uint8_t*>(&h);
    Weight w = {};
    w.element = h.element;
    w.grid = h.grid;
    w.rows = h.rows;
    w.cols = h.cols;
    w.panels = ceil_div(h.rows, kPanelRows);
    w.steps = ceil_div(h.cols, kStepCols);
    w.scale_bytes = inline_scale_bytes(h.grid);
    w.step_bytes = w.scale_bytes + kPanelRows * kStepCols * element_bits(h.element) / 8;
    w.panel_bytes = w.steps * w.step_bytes;
    w.block_cols = h.block_cols;
    w.groups = ceil_div(h.cols, h.block_cols);
    w.block_lanes = h.block_lanes;
    w.row_scales = reinterpret_cast<const float*>(base + h.row_scales);
    w.block_scales = reinterpret_cast<const float*>(base + h.block_scales);
    w.data = base + h.steps;
    return w;
}

// Returns the header of the packed form of a weight; `bytes` is 0 if there is no such form.
Header plan_layout(const minifloat_pack_args& a);

// Returns whether memory holds a packed weight that this code can read.
inline bool readable(const uint8_t* packed) {
    if (packed == nullptr || reinterpret_cast<uintptr_t>(packed) % kVectorBytes != 0) return false;
    const Header& h = *reinterpret_cast<const Header*>(packed);
    return h.magic == kMagic && h.version == kLayoutVersion;
}

}  // namespace MINIFLOAT_ISA
