// Inputs rounded to int8, on VNNI: integer sums over groups of columns, scaled and added up in float32.
//
// A group of kInt8Cols columns of a row of W becomes int8 too, times one power of two: the smallest with which no
// magnitude exceeds 127.
#include "../threads.h"
#include "decode.h"
#include "int8_x.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kPanels = Finish::kMaxPanels;
constexpr int64_t kGroupBytes = kPanelRows * kInt8Cols;  // of decoded weights
constexpr int64_t kChunkBytes = kInt8ChunkGroups * kGroupBytes;
constexpr int64_t kTileSums = kInt8Rows * kPanelRows;
constexpr int64_t kScratchBytes = 2 << 20;
constexpr int64_t kBlockTiles = 64;
constexpr int64_t kFewTiles = 4;
constexpr int kVectorCols = 4;

// A decoded chunk of a panel: unsigned [group][vector of 4 columns][tile of 16 rows][row][4 columns], and the scales.
struct Chunk {
    uint8_t* codes;
    float* scales;  // [group][kPanelRows]
};

// Decodes step `s` of panel `p`.
void decode_group(const Weight& w, int64_t p, int64_t s, uint8_t* codes, float* scales) {
    alignas(64) float values[kStepCols * kPanelRows];
    Weight unscaled = w;
    if (w.grid == MINIFLOAT_GRID_BLOCK) unscaled.grid = MINIFLOAT_GRID_ROW;
    decode_step(unscaled, p, s, values);
    for (int t = 0; t < kPanelRows; t += kTileRows) {
        __m512 amax = _mm512_setzero_ps();
        if (w.element == MINIFLOAT_E2M1) {
            for (int k = 0; k < kStepCols; k += kE4M3Cols) {
                __m512 largest = _mm512_setzero_ps();
                for (int c = 0; c < kE4M3Cols; ++c)
                    largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_load_ps(values + (k + c) * kPanelRows + t)));
                const __mmask16 present = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
                const __m512 bound = _mm512_mul_ps(_mm512_set1_ps(6.0f), scales_of(w, p, s, k, t));
                amax = _mm512_mask_max_ps(amax, present, amax, bound);
            }
        } else {
            for (int k = 0; k < kStepCols; ++k)
                amax = _mm512_max_ps(amax, _mm512_abs_ps(_mm512_load_ps(values + k * kPanelRows + t)));
        }
        // The exponent of amax / 127, rounded up.
        const __m512 bound = _mm512_max_ps(_mm512_div_ps(amax, _mm512_set1_ps(kInt8Max)), _mm512_set1_ps(0x1p-100f));
        const __m512i up = _mm512_add_epi32(_mm512_castps_si512(bound), _mm512_set1_epi32((1 << kMantissaBits) - 1));
        const __m512i exponent = _mm512_srli_epi32(up, kMantissaBits);
        const __m512 unit = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, kMantissaBits));
        const __m512 inverse = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(2 * kBias), exponent), kMantissaBits));
        __m512 scale = unit;
        if (w.grid == MINIFLOAT_GRID_BLOCK) {
            const float* block = w.block_scale(p, min(s * kStepCols / w.block_cols, w.groups - 1));
            const __m512 factor = w.block_lanes == 1 ? _mm512_set1_ps(*block) : _mm512_loadu_ps(block + t);
            scale = _mm512_mul_ps(unit, factor);
        }
        _mm512_store_ps(scales + t, scale);
        for (int v = 0; v < kInt8Cols / kVectorCols; ++v) {
            __m512i word = _mm512_setzero_si512();
            for (int c = 0; c < kVectorCols; ++c) {
                const __m512 value = _mm512_load_ps(values + (v * kVectorCols + c) * kPanelRows + t);
                const __m512i q = _mm512_and_si512(_mm512_cvtps_epi32(_mm512_mul_ps(value, inverse)),
                                                   _mm512_set1_epi32(0xff));
                word = _mm512_or_si512(word, _mm512_slli_epi32(q, 8 * c));
            }
            _mm512_store_si512(codes + (v * 2 + t / kTileRows) * kVectorBytes,
                               _mm512_xor_si512(word, _mm512_set1_epi8(-128)));
        }
    }
}

// sums [kRows][kPanelRows] (+)= kRows rows of x times `groups` groups of a chunk.
template <int kRows>
__attribute__((noinline)) void multiply_groups(const Chunk& chunk, int64_t groups, const uint8_t* x, int x_rows,
                                               int64_t unit_bytes, bool first, float* sums) {
    for (int64_t g = 0; g < groups; ++g, x += unit_bytes) {
        const uint8_t* w = chunk.codes + g * kGroupBytes;
        const float* x_scales = reinterpret_cast<const float*>(x + x_rows * kInt8Cols);
        const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + x_rows);
        __m512i dots[kRows][2];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) dots[r][0] = dots[r][1] = _mm512_set1_epi32(starts[r]);
        for (int v = 0; v < kInt8Cols / kVectorCols; ++v) {
            const __m512i a = _mm512_load_si512(w + v * 2 * kVectorBytes);
            const __m512i b = _mm512_load_si512(w + (v * 2 + 1) * kVectorBytes);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                int32_t four;
                __builtin_memcpy(&four, x + r * kInt8Cols + v * kVectorCols, sizeof four);
                const __m512i q = _mm512_set1_epi32(four);
                dots[r][0] = _mm512_dpbusd_epi32(dots[r][0], a, q);
                dots[r][1] = _mm512_dpbusd_epi32(dots[r][1], b, q);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
            const __m512 scale = _mm512_load_ps(chunk.scales + g * kPanelRows + t * kTileRows);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* to = sums + r * kPanelRows + t * kTileRows;
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r][t]), scale);
                const __m512 before = first && g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
                _mm512_store_ps(to, _mm512_fmadd_ps(scaled, _mm512_set1_ps(x_scales[r]), before));
            }
        }
    }
}

template <int kRows>
void multiply_rows(int rows, const Chunk& chunk, int64_t groups, const uint8_t* x, int x_rows, int64_t unit_bytes,
                   bool first, float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows)
            return multiply_rows<kRows - 1>(rows, chunk, groups, x, x_rows, unit_bytes, first, sums);
    }
    multiply_groups<kRows>(chunk, groups, x, x_rows, unit_bytes, first, sums);
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) {
    const Int8Tiling t(m);
    return t.tiles * w.steps * t.unit_bytes();
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const Int8Tiling t(x.m);
    const int64_t panels = t.tiles <= kFewTiles ? 1 : kPanels, block = min(kBlockTiles, t.tiles);
    const int64_t floats = block * min(panels, last - first) * kTileSums;
    const int64_t head = kChunkBytes + kInt8ChunkGroups * kPanelRows * static_cast<int64_t>(sizeof(float));
    const int64_t bytes = max(kScratchBytes, head + floats * static_cast<int64_t>(sizeof(float)));
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
    if (memory == nullptr) return false;
    const Chunk chunk = {memory, reinterpret_cast<float*>(memory + kChunkBytes)};
    float* sums = reinterpret_cast<float*>(memory + head);
    for (int64_t begin = first; begin < last; begin += panels) {
        const int64_t end = min(begin + panels, last);
        for (int64_t low = 0; low < t.tiles; low += block) {
            const int64_t high = min(low + block, t.tiles);
            for (int64_t c = 0; c * kInt8ChunkGroups < w.steps; ++c) {
                const int64_t groups = min(kInt8ChunkGroups, w.steps - c * kInt8ChunkGroups);
                for (int64_t p = begin; p < end; ++p) {
                    for (int64_t g = 0; g < groups; ++g)
                        decode_group(w, p, c * kInt8ChunkGroups + g, chunk.codes + g * kGroupBytes,
                                     chunk.scales + g * kPanelRows);
                    for (int64_t tile = low; tile < high; ++tile)
                        multiply_rows<kInt8Rows>(t.rows_of(x.m, tile), chunk, groups, prepared + t.offset(w, tile, c),
                                                 t.rows, t.unit_bytes(), c == 0,
                                                 sums + ((p - begin) * block + tile - low) * kTileSums);
                }
            }
            for (int64_t p = begin; p < end; ++p)
                for (int64_t tile = low; tile < high; ++tile)
                    for (int r = 0; r < t.rows_of(x.m, tile); ++r)
                        store_row(w, y, p, tile * t.rows + r,
                                  sums + ((p - begin) * block + tile - low) * kTileSums + r * kPanelRows);
        }
    }
    return true;
}

}  // namespace

extern const Path kInt8Path = {"int8", prepared_bytes, round_x, multiply, kPanels};

}  // namespace MINIFLOAT_ISA

#endif
