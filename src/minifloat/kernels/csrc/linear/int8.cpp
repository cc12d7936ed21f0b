// Inputs rounded to int8, on VNNI: integer sums over groups of columns, scaled and added up in float32.
#include "../threads.h"
#include "int8_tiles.h"
#include "convert.h"

#if defined(MINIFLOAT_INT8)

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kPanels = Finish::kMaxPanels;
constexpr int64_t kChunkBytes = kInt8ChunkGroups * kInt8GroupBytes;
constexpr int64_t kTileSums = kInt8Rows * kPanelRows;
constexpr int64_t kScratchBytes = 2 << 20;
constexpr int64_t kBlockTiles = 48;
constexpr int64_t kFewTiles = 4;
constexpr int64_t kAheadGroups = 2;
constexpr int kVectorCols = 4;

// A decoded chunk of a panel: unsigned [group][vector of 4 columns][tile of 16 rows][row][4 columns], and the scales.
struct Chunk {
    uint8_t* codes;
    float* scales;  // [group][kPanelRows]
};

// Adds the products of 4 columns of 16 rows of W, unsigned, and the same columns of a row of x, signed. In assembler:
// of the intrinsic gcc 12 makes three instructions and spills the sums.
inline __attribute__((always_inline)) void add_dots(I32& sums, __m512i w, const uint8_t* x) {
    struct Four {
        uint8_t bytes[4];
    };
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(*reinterpret_cast<const Four*>(x)));
}

// sums [kRows][kPanelRows] += kRows rows of x times `groups` groups of a chunk.
template <int kRows>
__attribute__((noinline)) void multiply_groups(const Chunk& chunk, int64_t groups, const uint8_t* x, int x_rows,
                                               int64_t unit_bytes, float* sums) {
    for (int i = 0; i < kRows * kPanelRows; i += kTileRows)
        _mm_prefetch(reinterpret_cast<const char*>(sums + i), _MM_HINT_T0);
    for (int64_t g = 0; g < groups; ++g, x += unit_bytes) {
        const uint8_t* w = chunk.codes + g * kInt8GroupBytes;
        const float* x_scales = reinterpret_cast<const float*>(x + x_rows * kInt8Cols);
        const int32_t* starts = reinterpret_cast<const int32_t*>(x_scales + x_rows);
        I32 dots[kRows][2];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) dots[r][0] = dots[r][1] = I32{} + starts[r];
        for (int v = 0; v < kInt8Vectors; ++v) {
            const __m512i a = _mm512_load_si512(w + v * 2 * kVectorBytes);
            const __m512i b = _mm512_load_si512(w + (v * 2 + 1) * kVectorBytes);
            _mm_prefetch(reinterpret_cast<const char*>(x + unit_bytes + v * kVectorBytes), _MM_HINT_T0);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* four = x + r * kInt8Cols + v * kVectorCols;
                add_dots(dots[r][0], a, four);
                add_dots(dots[r][1], b, four);
            }
        }
        asm volatile("" ::: "memory");  // or gcc 12 loads what follows before the products, and spills it
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
            const __m512 scale = _mm512_load_ps(chunk.scales + g * kPanelRows + t * kTileRows);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* to = sums + r * kPanelRows + t * kTileRows;
                const __m512 scaled = _mm512_mul_ps(__builtin_convertvector(dots[r][t], F32), scale);
                _mm512_store_ps(to, _mm512_fmadd_ps(scaled, _mm512_set1_ps(x_scales[r]), _mm512_load_ps(to)));
            }
        }
    }
}

template <int kRows>
void multiply_rows(int rows, const Chunk& chunk, int64_t groups, const uint8_t* x, int x_rows, int64_t unit_bytes,
                   float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<kRows - 1>(rows, chunk, groups, x, x_rows, unit_bytes, sums);
    }
    multiply_groups<kRows>(chunk, groups, x, x_rows, unit_bytes, sums);
}

void prefetch_part(const uint8_t* from, int64_t bytes, int64_t part, int64_t parts) {
    const int64_t end = min(bytes, round_up(ceil_div(bytes * (part + 1), parts), kVectorBytes));
    for (int64_t i = bytes * part / parts / kVectorBytes * kVectorBytes; i < end; i += kVectorBytes)
        _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) {
    const Int8Tiling t(m);
    return t.tiles * w.steps * t.unit_bytes();
}

// Panels begin .. end - 1 times tiles low .. high - 1 of x.
void multiply_block(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, const Int8Tiling& t,
                    int64_t begin, int64_t end, int64_t low, int64_t high, const Chunk& chunk, float* sums) {
    const int64_t tiles = high - low, panel_floats = tiles * kTileSums;
    const bool few = tiles <= kFewTiles;
    // With few tiles, decoding and multiplying alternate after each group, so that memory is read all the time.
    const int64_t most = few ? 1 : kInt8ChunkGroups, ahead = few ? kAheadGroups : 0;
    __builtin_memset(sums, 0, static_cast<uint64_t>((end - begin) * panel_floats) * sizeof *sums);
    for (int64_t s = 0; s < w.steps; s += most) {
        const int64_t groups = min(most, w.steps - s);
        for (int64_t p = begin; p < end; ++p) {
            for (int64_t g = 0; g < groups; ++g)
                decode_int8(w, p, s + g, chunk.codes + g * kInt8GroupBytes, chunk.scales + g * kPanelRows);
            const uint8_t* next = w.panel(p) + (s + ahead) * w.step_bytes;
            if (!few) next = p + 1 < end ? next + w.panel_bytes : w.panel(begin) + (s + most) * w.step_bytes;
            for (int64_t tile = low; tile < high; ++tile) {
                prefetch_part(next, groups * w.step_bytes, tile - low, tiles);
                const uint8_t* units = prepared + t.offset(w, tile, s / kInt8ChunkGroups);
                multiply_rows<kInt8Rows>(t.rows_of(x.m, tile), chunk, groups,
                                         units + s % kInt8ChunkGroups * t.unit_bytes(), t.rows, t.unit_bytes(),
                                         sums + (p - begin) * panel_floats + (tile - low) * kTileSums);
            }
        }
    }
    const Finish finish(w, y, begin, end, 1.0f);
    for (int64_t tile = low; tile < high; ++tile)
        store_dots(w, y, tile * t.rows, t.rows_of(x.m, tile), begin, end, finish, sums + (tile - low) * kTileSums,
                   panel_floats);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const Int8Tiling t(x.m);
    const int64_t blocks = ceil_div(t.tiles, kBlockTiles), block = ceil_div(t.tiles, blocks);
    const int64_t panels = t.tiles <= kFewTiles ? 1 : kPanels;
    const int64_t floats = block * min(panels, last - first) * kTileSums;
    const int64_t head = kChunkBytes + kInt8ChunkGroups * kPanelRows * static_cast<int64_t>(sizeof(float));
    const int64_t bytes = max(kScratchBytes, head + floats * static_cast<int64_t>(sizeof(float)));
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
    if (memory == nullptr) return false;
    const Chunk chunk = {memory, reinterpret_cast<float*>(memory + kChunkBytes)};
    float* sums = reinterpret_cast<float*>(memory + head);
    for (int64_t begin = first; begin < last; begin += panels)
        for (int64_t b = 0; b < blocks; ++b)
            multiply_block(w, x, prepared, y, t, begin, min(begin + panels, last), t.tiles * b / blocks,
                           t.tiles * (b + 1) / blocks, chunk, sums);
    return true;
}

}  // namespace

extern const Path kInt8Path = {"int8", prepared_bytes, round_x, multiply, kPanels};

}  // namespace MINIFLOAT_ISA

#endif
