// Shared by the AMX paths: the shape of tiles, and storing of tiles into y. TDPBF16PS has no subnormal numbers: bf16
// inputs and sums below 2^-126 count as zero.
#pragma once

#include "bf16_x.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {

// The compiler does not know that the tile instructions read memory: stores before them must not sink or vanish.
inline void publish() { asm volatile("" ::: "memory"); }

// The height and width of the 8 tile registers.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int height, int width = kVectorBytes) {
        rows[tile] = static_cast<uint8_t>(height);
        row_bytes[tile] = static_cast<uint16_t>(width);
    }
};

// Owns the tile registers, and releases them at the end of a call, so that a switch of threads need not save them.
class Tiles {
  public:
    explicit Tiles(const TileShapes& shapes) {
        publish();
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The tile registers of a linear with `rows` rows of x in a tile. 0 to 3: sums, [tile of x][tile of W]; 4 and 5: x;
// 6 and 7: W.
inline TileShapes linear_tiles(int rows) {
    TileShapes shapes;
    for (int t = 0; t < 8; ++t) shapes.set(t, t < 6 ? rows : kTileRows);
    return shapes;
}

// The division of the rows of x.
inline Tiling tiling(int64_t m, int32_t x_dtype) {
    Tiling t;
    t.tiles = m <= kTileRows ? 1 : 2;
    t.pairs = ceil_div(m, t.tiles * kTileRows);
    t.rows = static_cast<int>(ceil_div(m, t.pairs * t.tiles));
    t.planes = x_dtype == MINIFLOAT_BF16 ? 1 : x_dtype == MINIFLOAT_F16 ? 2 : 3;
    return t;
}

template <class Row>
inline void store_rows(const Weight& w, const Output& y, int64_t m, const Tiling& t, int64_t first, int64_t last,
                       int64_t pair, const Finish& finish, const float* sums, int64_t panel_floats) {
    for (int i = 0; i < t.tiles; ++i) {
        const int64_t begin = (pair * t.tiles + i) * t.rows;
        const int rows = static_cast<int>(min<int64_t>(t.rows, m - begin));
        for (int r = 0; r < rows; ++r) {
            uint8_t* out = y.data + (begin + r) * y.stride + first * kPanelRows * Row::kBytes;
            const float* from = sums + i * 2 * kTileFloats + r * kTileRows;
            int64_t left = w.rows - first * kPanelRows;
            for (int64_t p = first; p < last; ++p, from += panel_floats)
                for (int j = 0; j < 2 && left > 0; ++j, left -= kTileRows, out += kTileRows * Row::kBytes) {
                    const int64_t n = (p - first) * kPanelRows + j * kTileRows;
                    const F32 value = load(from + j * kTileFloats) * load(finish.scale + n) + load(finish.bias + n);
                    if (left >= kTileRows) {
                        Row::store(out, value);
                    } else {
                        store_some<Row>(out, value, left);
                    }
                }
        }
    }
}

// Stores the columns of y of panels first .. last - 1, one row of y after the other. `sums` are those of the first
// panel, [tile of x][tile of W][16 rows][16]; those of the next follow after `panel_floats`.
inline void store_panels(const Weight& w, const Output& y, int64_t m, const Tiling& t, int64_t first, int64_t last,
                         int64_t pair, const Finish& finish, const float* sums, int64_t panel_floats) {
    const auto store = [&](auto row) {
        store_rows<decltype(row)>(w, y, m, t, first, last, pair, finish, sums, panel_floats);
    };
    if (y.dtype == MINIFLOAT_BF16) store(Bf16Row());
    if (y.dtype == MINIFLOAT_F16) store(F16Row());
    if (y.dtype == MINIFLOAT_F32) store(F32Row());
}

// Adds one of the four tiles of add_block().
inline void add_tile(const Weight& w, int64_t panel, int64_t group, const Tiling& t, bool first, int tile,
                     const float* block, float* sums) {
    const float* scales = w.block_scale(panel, group);
    const __m512 scale =
        w.block_lanes == 1 ? _mm512_set1_ps(scales[0]) : _mm512_loadu_ps(scales + tile % 2 * kTileRows);
    const float* from = block + tile * kTileFloats;
    float* to = sums + tile * kTileFloats;
    for (int r = 0; r < t.rows * kTileRows; r += kTileRows) {
        const __m512 old = first ? _mm512_setzero_ps() : _mm512_load_ps(to + r);
        _mm512_store_ps(to + r, _mm512_fmadd_ps(_mm512_load_ps(from + r), scale, old));
    }
}

// sums += tiles of one block of columns times its scales; the first block replaces `sums`.
inline void add_block(const Weight& w, int64_t panel, int64_t group, const Tiling& t, bool first, const float* block,
                      float* sums) {
    for (int tile = 0; tile < 2 * t.tiles; ++tile) add_tile(w, panel, group, t, first, tile, block, sums);
}

}  // namespace MINIFLOAT_ISA

#endif
