// Rows of x as int8, for the paths with rounded inputs. A group of kInt8Cols columns has one scale, amax / 127; an amax
// below kSmallestAmax counts as it. With Inf or NaN the scale is NaN and the integers are zero. The products take W
// unsigned, with 128 added; `start` cancels this.
#pragma once

#include "convert.h"
#include "path.h"

namespace MINIFLOAT_ISA {

constexpr float kSmallestAmax = 0x1p-100f;

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(__AMX_BF16__)
#define MINIFLOAT_INT8

constexpr int kInt8Cols = kStepCols;
constexpr int kInt8Rows = 12;  // of a tile; with two vectors of sums each, two of W and one of x, they fill the registers
constexpr int kInt8Offset = 128;
constexpr float kInt8Max = 127.0f;
constexpr int64_t kInt8ChunkGroups = 8;

// Tiles that hold the rows evenly; the last may have fewer rows. A unit is a group of columns of a tile: the integers
// [rows][kInt8Cols], then the scales and then the starts of the rows.
struct Int8Tiling {
    int64_t tiles;
    int rows;

    explicit Int8Tiling(int64_t m)
        : tiles(ceil_div(m, kInt8Rows)), rows(static_cast<int>(ceil_div(m, max<int64_t>(1, tiles)))) {}

    int64_t unit_bytes() const { return round_up(rows * (kInt8Cols + 8), kVectorBytes); }
    int rows_of(int64_t m, int64_t tile) const { return static_cast<int>(min<int64_t>(rows, m - tile * rows)); }
    // Units of the tile from the first group of a chunk on, [chunk][tile][group of the chunk].
    int64_t offset(const Weight& w, int64_t tile, int64_t chunk) const {
        const int64_t first = chunk * kInt8ChunkGroups;
        return (first * tiles + tile * min(kInt8ChunkGroups, w.steps - first)) * unit_bytes();
    }
};

// The column of each of 8 places, which is that of the nibbles of E2M1 as they are decoded.
inline const int8_t* column_order(const Weight& w) {
    static constexpr int8_t kNatural[8] = {0, 1, 2, 3, 4, 5, 6, 7}, kMxfp4[8] = {0, 4, 1, 5, 2, 6, 3, 7},
                            kNvfp4[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    if (w.element != MINIFLOAT_E2M1) return kNatural;
    return w.grid == MINIFLOAT_GRID_E8M0 ? kMxfp4 : kNvfp4;
}

// Rounds a group: `values` [kInt8Cols] to `out`, sixteen columns in `order`.
inline void round_group(const float* values, __m128i order, int8_t* out, float* scale, int32_t* start) {
    __m512i bits = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
    for (int i = 0; i < kInt8Cols; i += 16)
        bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(values + i)), magnitude));
    const int32_t largest = _mm512_reduce_max_epi32(bits);
    if (largest >= kInfinity) {
        __builtin_memset(out, 0, kInt8Cols);
        *scale = __builtin_nanf("");
        *start = 0;
        return;
    }
    const float amax = max(bit_cast<float>(largest), kSmallestAmax);
    const __m512 factor = _mm512_set1_ps(kInt8Max / amax);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < kInt8Cols; i += 16) {
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), factor));
        sum = _mm512_add_epi32(sum, q);
        const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(q), order);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
    }
    *scale = amax / kInt8Max;
    *start = -kInt8Offset * _mm512_reduce_add_epi32(sum);
}

// Rounds part `part` of `parts` of x into units.
inline void round_x(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    const Int8Tiling t(x.m);
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(column_order(w)));
    const __m128i order = _mm_unpacklo_epi64(eight, _mm_add_epi8(eight, _mm_set1_epi8(8)));
    const int64_t begin = t.tiles * t.rows * part / parts, end = t.tiles * t.rows * (part + 1) / parts;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t tile = row / t.rows, r = row % t.rows;
        if (row >= x.m) break;  // sums of such rows are not computed
        for (int64_t s = 0; s < w.steps; ++s) {
            const int64_t chunk = s / kInt8ChunkGroups;
            uint8_t* unit = prepared + t.offset(w, tile, chunk) + s % kInt8ChunkGroups * t.unit_bytes();
            float* scales = reinterpret_cast<float*>(unit + t.rows * kInt8Cols);
            int32_t* starts = reinterpret_cast<int32_t*>(scales + t.rows);
            float values[kInt8Cols];
            const int64_t count = min<int64_t>(kInt8Cols, w.cols - s * kInt8Cols);
            for (int64_t i = count; i < kInt8Cols; ++i) values[i] = 0.0f;
            to_float(x.row(row) + s * kInt8Cols * dtype_bytes(x.dtype), x.dtype, count, values);
            round_group(values, order, reinterpret_cast<int8_t*>(unit + r * kInt8Cols), scales + r, starts + r);
        }
    }
}

#endif

}  // namespace MINIFLOAT_ISA
