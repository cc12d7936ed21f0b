// Rows of x as bf16, for the paths that multiply bf16 (AMX and AVX512_BF16). x is split into as many bf16 planes as its
// bits require, so products are those of float32.
#pragma once

#include "../vec.h"
#include "convert.h"
#include "path.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

constexpr int kTileBytes = 1024;
constexpr int kTileFloats = kTileRows * kTileRows;
constexpr int kStepTiles = kStepCols * kPanelRows * 2 / kTileBytes;  // 2 halves of 2 tiles

// The division of the rows of x into tiles of the same number of rows, and of tiles into pairs.
struct Tiling {
    int64_t pairs;
    int tiles;   // tiles of a pair: 1 or 2
    int rows;    // rows of a tile
    int planes;  // bf16 parts of an element

    int unit_bytes() const { return tiles * planes * rows * kVectorBytes; }  // 32 columns of a pair
};

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
inline void pack_x(const Weight& w, const Input& x, const Tiling& t, int64_t chunk_units, uint8_t* packed, int part,
                   int parts) {
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

}  // namespace MINIFLOAT_ISA

#endif
