// Shared by the AMX paths: the shape of tiles, packing of rows of x, and storing of tiles into y.
//
// A tile is 16 rows of 64 bytes. Products of a tile of x (rows x 32 columns, bf16) and a tile of W (32 columns x 16
// rows, pairs of columns together) are summed in float32 tiles. All decoded weights are exact in bf16, and x is split
// into as many bf16 planes as its bits require, so products are those of float32. TDPBF16PS has no subnormal numbers:
// bf16 inputs and sums below 2^-126 count as zero.
//
// Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter AMX.
#pragma once

#include "../intrinsics.h"
#include "convert.h"
#include "path.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {

constexpr int kTileBytes = 1024;
constexpr int kTileFloats = kTileRows * kTileRows;
constexpr int kStepTiles = kStepCols * kPanelRows * 2 / kTileBytes;  // 2 halves of 2 tiles

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

// The division of the rows of x into tiles. All tiles have the same number of rows, because the time of a product is
// proportional to the rows of its tile of x. Tiles form pairs (up to 16 rows: a single tile), because two tiles of x
// and two tiles of W give four products.
struct Tiling {
    int64_t pairs;
    int tiles;  // tiles of a pair: 1 or 2
    int rows;   // rows of a tile
    int planes;

    int unit_bytes() const { return tiles * planes * rows * kVectorBytes; }  // 32 columns of a pair
};

inline Tiling tiling(int64_t m, int32_t x_dtype) {
    Tiling t;
    t.tiles = m <= kTileRows ? 1 : 2;
    t.pairs = ceil_div(m, t.tiles * kTileRows);
    t.rows = static_cast<int>(ceil_div(m, t.pairs * t.tiles));
    t.planes = x_dtype == MINIFLOAT_BF16 ? 1 : x_dtype == MINIFLOAT_F16 ? 2 : 3;
    return t;
}

// Units are the 32 columns that a tile is wide.
inline int64_t units_of(const Weight& w) { return w.steps * 2; }

inline int64_t packed_x_bytes(const Weight& w, const Tiling& t) { return t.pairs * units_of(w) * t.unit_bytes(); }

// Stores 32 columns of a row, of which `valid` exist, as planes that are `plane_bytes` apart. Planes are cut off, not
// rounded, so that none can overflow and each is exact. With `infinite`, for weights that may be infinite, no plane of
// a number is zero and all planes have its sign (1 is 255/256 and so on): zero times infinity would be NaN.
inline void pack_unit(const uint8_t* x, int32_t dtype, int valid, bool infinite, uint8_t* out, int plane_bytes) {
    const uint32_t mask = valid >= kHalfCols ? ~0u : (1u << valid) - 1;
    if (dtype == MINIFLOAT_BF16) {
        _mm512_store_si512(out, _mm512_maskz_loadu_epi16(mask, x));
        return;
    }
    const __m512i top = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    for (int half = 0; half < 2; ++half) {
        const __mmask16 lanes = static_cast<__mmask16>(mask >> 16 * half);
        __m512 rest = dtype == MINIFLOAT_F16 ? _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, x + half * 32))
                                             : _mm512_maskz_loadu_ps(lanes, x + half * 64);
        constexpr int kNotFinite = 0x99;  // NaN and the infinities, which all planes repeat
        const __mmask16 finite = _knot_mask16(_mm512_fpclass_ps_mask(rest, kNotFinite));
        rest = _mm512_mask_add_ps(rest, _knot_mask16(finite), rest, rest);  // quiet, so that cutting off keeps a NaN
        const int planes = dtype == MINIFLOAT_F16 ? 2 : 3;
        for (int plane = 0; plane < planes; ++plane) {
            __m512i bits = _mm512_castps_si512(rest);
            if (infinite && plane + 1 < planes) {
                const __mmask16 number = _mm512_mask_test_epi32_mask(finite, bits, _mm512_set1_epi32(kMagnitude));
                bits = _mm512_mask_sub_epi32(bits, number, bits, _mm512_set1_epi32(1));
            }
            bits = _mm512_and_si512(bits, top);
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + plane * plane_bytes + half * 32),
                               _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
            rest = _mm512_mask_sub_ps(rest, finite, rest, _mm512_castsi512_ps(bits));
        }
    }
}

// x as [chunk of `chunk_units`][pair][unit][tile of the pair][plane][row][32 columns]; zeros fill up rows and columns.
inline void pack_x(const Weight& w, const Input& x, int64_t chunk_units, uint8_t* packed, int part, int parts) {
    const Tiling t = tiling(x.m, x.dtype);
    const int plane_bytes = t.rows * kVectorBytes;
    const int64_t units = units_of(w);
    const int64_t begin = units * part / parts, end = units * (part + 1) / parts;
    for (int64_t tile = 0; tile < t.pairs * t.tiles; ++tile) {
        for (int64_t u = begin; u < end; ++u) {
            const int64_t chunk = u / chunk_units * chunk_units;
            const int64_t width = min(chunk_units, units - chunk);
            uint8_t* out = packed + (chunk * t.pairs + tile / t.tiles * width + u - chunk) * t.unit_bytes() +
                           tile % t.tiles * t.planes * plane_bytes;
            const int valid = static_cast<int>(max<int64_t>(0, min<int64_t>(kHalfCols, w.cols - u * kHalfCols)));
            for (int r = 0; r < t.rows; ++r, out += kVectorBytes) {
                const int64_t row = tile * t.rows + r;
                if (row < x.m && valid > 0) {
                    const uint8_t* from = x.row(row) + u * kHalfCols * dtype_bytes(x.dtype);
                    pack_unit(from, x.dtype, valid, w.element == MINIFLOAT_WEIGHT_BF16, out, plane_bytes);
                } else {
                    for (int plane = 0; plane < t.planes; ++plane)
                        _mm512_store_si512(out + plane * plane_bytes, _mm512_setzero_si512());
                }
            }
        }
    }
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

// Stores the columns of y of panels first .. last - 1, one row of y after the other. Panel after panel would write one
// cache line of each row, each in another page. `sums` are those of the first panel,
// [tile of x][tile of W][16 rows][16]; the sums of the next panel follow after `panel_floats`.
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
