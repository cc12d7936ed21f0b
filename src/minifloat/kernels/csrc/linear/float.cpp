// The path for every instruction set and every M: x and W in float32, one multiply-add per element.
#include "../threads.h"
#include "convert.h"
#include "decode.h"
#include "path.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kBlockSteps = 2;
constexpr int kBlockCols = kBlockSteps * kStepCols;
constexpr int64_t kSmallBytes = int64_t{4} << 20;  // maximum size of an x in float32 that is converted once per call
constexpr int64_t kMaxRows = 240;  // rows of x per decoded block; their columns of the block fit the L2 cache

constexpr int64_t kPiecePanels = 8;  // panels that share the cost of converting x

// Rows of a tile of kTileVectors vectors. The tile, one factor and a row of W fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxTileRows = 12;
#else
constexpr int kMaxTileRows = 6;
#endif
constexpr int kTileVectors = 2;

int64_t blocks_of(const Weight& w) { return ceil_div(w.steps, kBlockSteps); }
int cols_of(const Weight& w, int64_t block) {
    return static_cast<int>(min<int64_t>(kBlockSteps, w.steps - block * kBlockSteps)) * kStepCols;
}

bool is_small(const Weight& w, int64_t m) { return m * blocks_of(w) * kBlockCols * 4 <= kSmallBytes; }

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) {
    return is_small(w, m) ? m * blocks_of(w) * kBlockCols * 4 : 0;
}

// Converts the columns of row `i` of x that belong to a block: kBlockCols floats, zeros behind the last column of x.
void convert(const Weight& w, const Input& x, int64_t i, int64_t block, float* out) {
    const int64_t begin = block * kBlockCols;
    const int64_t count = min<int64_t>(kBlockCols, w.cols - begin);
    to_float(x.row(i) + begin * dtype_bytes(x.dtype), x.dtype, count, out);
    for (int64_t k = count; k < kBlockCols; ++k) out[k] = 0.0f;
}

// Converts a small x to [block, row, kBlockCols].
void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    if (!is_small(w, x.m)) return;
    float* out = reinterpret_cast<float*>(prepared);
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i)
        for (int64_t b = 0; b < blocks_of(w); ++b) convert(w, x, i, b, out + (b * x.m + i) * kBlockCols);
}

// sums [kRows, kVectors * kWidth] (+)= x [kRows, cols] * weights [cols, kVectors * kWidth].
template <int kRows, int kVectors>
void multiply_tile(const float* x, const float* weights, int cols, bool first, float* sums) {
    F32 tile[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) tile[r][j] = first ? F32{} : load(sums + r * kPanelRows + j * kWidth);
    for (int k = 0; k < cols; ++k) {
        F32 column[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) column[j] = load(weights + k * kPanelRows + j * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const F32 factor = broadcast(x[r * kBlockCols + k]);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) tile[r][j] += factor * column[j];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) store_as(sums + r * kPanelRows + j * kWidth, tile[r][j]);
}

// multiply_tile() for all columns of a panel and 1 .. kMaxTileRows rows.
template <int kRows>
void multiply_rows(int rows, const float* x, const float* weights, int cols, bool first, float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<kRows - 1>(rows, x, weights, cols, first, sums);
    }
    // With few rows there are registers for more columns, which hide the latency of additions.
    constexpr int kMost = kPanelRows / kWidth;
    constexpr int kVectors = kRows * 4 <= kMaxTileRows * kTileVectors && kMost >= 4 ? 4 : kTileVectors;
    for (int n = 0; n < kPanelRows; n += kVectors * kWidth)
        multiply_tile<kRows, kVectors>(x, weights + n, cols, first, sums + n);
}

void multiply_block(int64_t m, const float* x, const float* weights, int cols, bool first, float* sums) {
    const int64_t tiles = ceil_div(m, kMaxTileRows);
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = m * t / tiles, rows = m * (t + 1) / tiles - begin;
        multiply_rows<kMaxTileRows>(static_cast<int>(rows), x + begin * kBlockCols, weights, cols, first,
                                    sums + begin * kPanelRows);
    }
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const int64_t parts = ceil_div(x.m, kMaxRows), most = ceil_div(x.m, parts), panels = last - first;
    const int64_t floats = kBlockCols * kPanelRows + most * (kBlockCols + panels * kPanelRows);
    float* weights = static_cast<float*>(minifloat::scratch(minifloat::kScratchThread, floats * 4));
    if (weights == nullptr) return false;
    float* converted = weights + kBlockCols * kPanelRows;
    float* sums = converted + most * kBlockCols;
    for (int64_t begin = 0; begin < x.m; begin += most) {
        const int64_t m = min(most, x.m - begin);
        for (int64_t b = 0; b < blocks_of(w); ++b) {
            const float* rows = reinterpret_cast<const float*>(prepared) + (b * x.m + begin) * kBlockCols;
            if (!is_small(w, x.m)) {
                for (int64_t i = 0; i < m; ++i) convert(w, x, begin + i, b, converted + i * kBlockCols);
                rows = converted;
            }
            for (int64_t p = 0; p < panels; ++p) {
                for (int s = 0; s < cols_of(w, b) / kStepCols; ++s)
                    decode_step(w, first + p, b * kBlockSteps + s, weights + s * kStepCols * kPanelRows);
                multiply_block(m, rows, weights, cols_of(w, b), b == 0, sums + p * m * kPanelRows);
            }
        }
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t i = 0; i < m; ++i) store_row(w, y, first + p, begin + i, sums + (p * m + i) * kPanelRows);
    }
    return true;
}

}  // namespace

extern const Path kFloatPath = {"float", prepared_bytes, prepare, multiply, kPiecePanels};

}  // namespace MINIFLOAT_ISA
