// ARM with BF16 for more rows of x than share the decoding in registers, and x in bfloat16: BFMMLA multiplies 2 rows of
// x with 2 rows of W, 4 columns of each, and adds to a 2x2 block of float32. Without FEAT_EBF16, BFMMLA rounds pairs of
// products and sums to odd, at most twice the error of rounding to nearest, and takes inputs and sums below 2^-126 for
// zero, whatever FPCR says.
#include "../threads.h"
#include "decode.h"
#include "path.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

namespace MINIFLOAT_ISA {
namespace {

constexpr int kOperandCols = 4;
constexpr int kOperandBytes = 16;
constexpr int kChunkSteps = 4;
constexpr int kChunkCols = kChunkSteps * kStepCols;
constexpr int kPairChunk = kChunkCols / kOperandCols * kOperandBytes;  // bytes of two rows of a chunk
constexpr int kGroupPairs = 4;                                         // pairs of rows of W of a tile
constexpr int kGroups = kPanelRows / 2 / kGroupPairs;
constexpr int kGroupBytes = kGroupPairs * kOperandBytes;
constexpr int kMaxTilePairs = 6;  // of x: 24 sums, 4 operands of W and one of x fill the registers
constexpr int kSumFloats = 4;     // of a pair of rows of x and one of W
constexpr int kPairSums = kPanelRows / 2 * kSumFloats;
constexpr int64_t kMaxPairs = 120;  // of x per decoded chunk; their columns of the chunk fit the L2 cache
constexpr int64_t kPiecePanels = 8;
// E4M3 as float16 without its factor of 2^8; under E8M0 scales lifted, so that 2^-9 times the smallest scale is normal.
constexpr float kLift = 0x1p8f;

int64_t chunks_of(const Weight& w) { return ceil_div(w.steps, kChunkSteps); }
int64_t pairs_of(int64_t m) { return ceil_div(m, 2); }

// The factor of decoded weights that the results are multiplied with.
float factor_of(const Weight& w) {
    if (w.element != MINIFLOAT_E4M3) return 1.0f;
    return w.grid == MINIFLOAT_GRID_E8M0 ? 1.0f / kLift : E4M3Part::kFactor;
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return chunks_of(w) * pairs_of(m) * kPairChunk; }

// x as [chunk][pair of rows][operand: 2 rows, 4 columns]; zeros fill up rows and columns. The columns of E2M1 are in the
// order of the nibbles of a word, k0 k4 k1 k5 k2 k6 k3 k7.
void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    const uint8x16_t nibbles = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const int64_t pairs = pairs_of(x.m), cols = chunks_of(w) * kChunkCols;
    for (int64_t i = pairs * part / parts * 2; i < pairs * (part + 1) / parts * 2; ++i) {
        const uint8_t* row = i < x.m ? x.row(i) : nullptr;
        for (int64_t k = 0; k < cols; k += 2 * kOperandCols) {
            uint8x16_t eight = vdupq_n_u8(0);
            const int64_t count = min<int64_t>(2 * kOperandCols, w.cols - k);
            if (row != nullptr && count > 0) {
                uint8_t bytes[16] = {};
                __builtin_memcpy(bytes, row + 2 * k, static_cast<uint64_t>(2 * count));
                eight = vld1q_u8(bytes);
            }
            if (w.element == MINIFLOAT_E2M1) eight = vqtbl1q_u8(eight, nibbles);
            uint8_t* out = prepared + (k / kChunkCols * pairs + i / 2) * kPairChunk +
                           k % kChunkCols / kOperandCols * kOperandBytes + i % 2 * (kOperandBytes / 2);
            vst1_u8(out, vget_low_u8(eight));
            vst1_u8(out + kOperandBytes, vget_high_u8(eight));
        }
    }
}

// Stores an operand from the float16 of two rows, times their scales kRow and kRow + 1: exact, so that the lower halves
// of the float32 are zero.
template <bool kScaled, int kRow>
inline void store_operand(uint8_t* out, uint16x8_t halves, float32x4_t scales) {
    const float16x8_t values = vreinterpretq_f16_u16(halves);
    float32x4_t a = vcvt_f32_f16(vget_low_f16(values)), b = vcvt_high_f32_f16(values);
    if (kScaled) {
        a = vmulq_laneq_f32(a, scales, kRow);
        b = vmulq_laneq_f32(b, scales, kRow + 1);
    }
    vst1q_u16(reinterpret_cast<uint16_t*>(out), vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
}

// Four rows and all columns of 16 bytes of W: operands of rows 0 and 1 at `out`, of rows 2 and 3 behind them; those of
// further columns after kGroupBytes.
struct Bf16Operands {
    static constexpr int kCols = 2;
};

template <bool kScaled>
struct E4M3Operands {
    static constexpr int kCols = 4;
    static void decode(const uint8_t* p, float32x4_t scales, uint8_t* out) {
        const uint8x16_t codes = vld1q_u8(p), zero = vdupq_n_u8(0);
        const auto halves = [](uint8x16_t high) {
            const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u8(high), 1);
            return vreinterpretq_u32_s16(vandq_s16(shifted, vdupq_n_s16(E4M3Part::kMask)));
        };
        const uint32x4_t k01 = halves(vzip1q_u8(zero, codes)), k23 = halves(vzip2q_u8(zero, codes));
        store_operand<kScaled, 0>(out, vreinterpretq_u16_u32(vzip1q_u32(k01, k23)), scales);
        store_operand<kScaled, 2>(out + kOperandBytes, vreinterpretq_u16_u32(vzip2q_u32(k01, k23)), scales);
    }
};

struct E2M1Operands {
    static constexpr int kCols = 8;
    static void decode(const uint8_t* p, float32x4_t scales, uint8_t* out) {
        const uint8x16_t codes = vld1q_u8(p), zero = vdupq_n_u8(0);
        const uint8x16_t first = E2M1Part::high_bytes(vandq_u8(codes, vdupq_n_u8(0xf)));
        const uint8x16_t second = E2M1Part::high_bytes(vshrq_n_u8(codes, 4));
        const auto store = [&](uint8_t* to, uint8x16_t bytes) {
            store_operand<true, 0>(to, vreinterpretq_u16_u8(vzip1q_u8(zero, bytes)), scales);
            store_operand<true, 2>(to + kOperandBytes, vreinterpretq_u16_u8(vzip2q_u8(zero, bytes)), scales);
        };
        store(out, first);
        store(out + kGroupBytes, second);
    }
};

// A chunk is [group of 8 rows][operand columns][kGroupPairs operands]: where rows `n` and columns `k` of it begin.
uint8_t* operand_at(uint8_t* chunk, int n, int k) {
    return chunk + n / (2 * kGroupPairs) * (kGroupPairs * kPairChunk) + k / kOperandCols * kGroupBytes +
           n % (2 * kGroupPairs) / 2 * kOperandBytes;
}

// Decodes step `s` of panel `p` to columns `at` and on of a chunk.
template <class Operands>
void decode_step_to(const Weight& w, int64_t p, int64_t s, int at, uint8_t* chunk) {
    constexpr int kVectors = kHalfCols / Operands::kCols;
    const uint8_t* data = w.panel(p) + s * w.step_bytes + w.scale_bytes;
    for (int i = 0; i < w.scale_bytes; i += kVectorBytes) prefetch_ahead(data - w.scale_bytes + i);
    const float lift = w.element == MINIFLOAT_E4M3 ? E4M3Part::kFactor * kLift : 1.0f;
    for (int half = 0; half < kStepCols; half += kHalfCols)
        for (int tile = 0; tile < kPanelRows; tile += kTileRows)
            for (int v = 0; v < kVectors; ++v, data += kVectorBytes) {
                const int k = half + v * Operands::kCols;
                prefetch_ahead(data);
                for (int n = 0; n < kTileRows; n += kWidth) {
                    F32 scales = {};
                    if (w.scale_bytes != 0) scales = scales_of(w, p, s, k, tile + n) * lift;
                    Operands::decode(data + n / kWidth * MINIFLOAT_VECTOR_BYTES,
                                     bit_cast<float32x4_t>(scales), operand_at(chunk, tile + n, at + k));
                }
            }
}

// BF16 needs no decoding, only two vectors of pairs of columns joined.
template <>
void decode_step_to<Bf16Operands>(const Weight& w, int64_t p, int64_t s, int at, uint8_t* chunk) {
    constexpr int kVectors = kHalfCols / Bf16Operands::kCols;
    const uint8_t* data = w.panel(p) + s * w.step_bytes;
    for (int half = 0; half < kStepCols; half += kHalfCols)
        for (int tile = 0; tile < kPanelRows; tile += kTileRows)
            for (int v = 0; v < kVectors; v += 2, data += 2 * kVectorBytes) {
                prefetch_ahead(data);
                prefetch_ahead(data + kVectorBytes);
                for (int n = 0; n < kTileRows; n += kWidth) {
                    const uint32x4_t k01 = vreinterpretq_u32_u8(vld1q_u8(data + 4 * n));
                    const uint32x4_t k23 = vreinterpretq_u32_u8(vld1q_u8(data + kVectorBytes + 4 * n));
                    uint8_t* out = operand_at(chunk, tile + n, at + half + v * Bf16Operands::kCols);
                    vst1q_u8(out, vreinterpretq_u8_u32(vzip1q_u32(k01, k23)));
                    vst1q_u8(out + kOperandBytes, vreinterpretq_u8_u32(vzip2q_u32(k01, k23)));
                }
            }
}

void decode(const Weight& w, int64_t p, int64_t s, int at, uint8_t* chunk) {
    if (w.element == MINIFLOAT_WEIGHT_BF16) return decode_step_to<Bf16Operands>(w, p, s, at, chunk);
    if (w.element == MINIFLOAT_E2M1) return decode_step_to<E2M1Operands>(w, p, s, at, chunk);
    if (w.grid == MINIFLOAT_GRID_E8M0) return decode_step_to<E4M3Operands<true>>(w, p, s, at, chunk);
    return decode_step_to<E4M3Operands<false>>(w, p, s, at, chunk);
}

// sums [kPairs][kPairSums], at one group of W, += scales times kPairs pairs of rows of x times `cols` columns.
template <int kPairs>
void multiply_tile(const uint8_t* x, const uint8_t* w, int cols, const float* scales, float* sums) {
    float32x4_t tile[kPairs][kGroupPairs];
#pragma GCC unroll 8
    for (int r = 0; r < kPairs; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kGroupPairs; ++j) tile[r][j] = vdupq_n_f32(0.0f);
    for (int k = 0; k < cols; k += kOperandCols, x += kOperandBytes, w += kGroupBytes) {
        bfloat16x8_t rows[kGroupPairs];
#pragma GCC unroll 4
        for (int j = 0; j < kGroupPairs; ++j) rows[j] = load_as<bfloat16x8_t>(w + j * kOperandBytes);
#pragma GCC unroll 8
        for (int r = 0; r < kPairs; ++r) {
            const bfloat16x8_t two = load_as<bfloat16x8_t>(x + r * kPairChunk);
#pragma GCC unroll 4
            for (int j = 0; j < kGroupPairs; ++j) tile[r][j] = vbfmmlaq_f32(tile[r][j], two, rows[j]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kGroupPairs; ++j) {
        const float32x2_t two = vld1_f32(scales + 2 * j);
        const float32x4_t factors = vcombine_f32(two, two);
#pragma GCC unroll 8
        for (int r = 0; r < kPairs; ++r) {
            float* to = sums + r * kPairSums + j * kSumFloats;
            vst1q_f32(to, vfmaq_f32(vld1q_f32(to), tile[r][j], factors));
        }
    }
}

template <int kPairs>
void multiply_pairs(int pairs, const uint8_t* x, const uint8_t* w, int cols, const float* scales, float* sums) {
    if constexpr (kPairs > 1) {
        if (pairs < kPairs) return multiply_pairs<kPairs - 1>(pairs, x, w, cols, scales, sums);
    }
    multiply_tile<kPairs>(x, w, cols, scales, sums);
}

// Adds the products of `pairs` pairs of rows with columns begin .. end - 1 of a decoded chunk.
void multiply_columns(int64_t pairs, const uint8_t* x, const uint8_t* chunk, int begin, int end, const float* scales,
                      float* sums) {
    const int offset = begin / kOperandCols;
    const int64_t tiles = ceil_div(pairs, kMaxTilePairs);
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = pairs * t / tiles, count = pairs * (t + 1) / tiles - first;
        for (int g = 0; g < kGroups; ++g)
            multiply_pairs<kMaxTilePairs>(static_cast<int>(count), x + first * kPairChunk + offset * kOperandBytes,
                                          chunk + g * kGroupPairs * kPairChunk + offset * kGroupBytes, end - begin,
                                          scales + g * 2 * kGroupPairs,
                                          sums + first * kPairSums + g * kGroupPairs * kSumFloats);
    }
}

// The scales of the rows of panel `p` for column `col` of GRID_BLOCK, else ones; returns the column where they end.
int64_t block_scales(const Weight& w, int64_t p, int64_t col, float* scales) {
    const bool blocks = w.grid == MINIFLOAT_GRID_BLOCK;
    const int64_t group = blocks ? min(col / w.block_cols, w.groups - 1) : 0;
    for (int n = 0; n < kPanelRows; ++n)
        scales[n] = blocks ? w.block_scale(p, group)[w.block_lanes == 1 ? 0 : n] : 1.0f;
    return blocks && group + 1 < w.groups ? (group + 1) * w.block_cols : w.steps * kStepCols;
}

void multiply_chunk(const Weight& w, int64_t p, int64_t c, int64_t pairs, const uint8_t* x, uint8_t* chunk,
                    float* sums) {
    const int64_t steps = min<int64_t>(kChunkSteps, w.steps - c * kChunkSteps);
    for (int s = 0; s < steps; ++s) decode(w, p, c * kChunkSteps + s, s * kStepCols, chunk);
    const int64_t origin = c * kChunkCols, cols = steps * kStepCols;
    for (int64_t begin = 0, end; begin < cols; begin = end) {
        alignas(64) float scales[kPanelRows];
        end = min(block_scales(w, p, origin + begin, scales) - origin, cols);
        multiply_columns(pairs, x, chunk, static_cast<int>(begin), static_cast<int>(end), scales, sums);
    }
}

// Stores rows 2 pair and 2 pair + 1 of y.
void store_pair(const Weight& w, const Output& y, int64_t p, int64_t row, int64_t m, const float* sums, float factor) {
    alignas(64) float rows[2][kPanelRows];
    for (int n = 0; n < kPanelRows; n += 2) {
        const float32x4_t block = vmulq_n_f32(vld1q_f32(sums + n / 2 * kSumFloats), factor);
        vst1_f32(rows[0] + n, vget_low_f32(block));
        vst1_f32(rows[1] + n, vget_high_f32(block));
    }
    store_row(w, y, p, row, rows[0]);
    if (row + 1 < m) store_row(w, y, p, row + 1, rows[1]);
}

bool multiply(const Weight& w, const Input& in, const uint8_t* prepared, const Output& y, int64_t first,
              int64_t last) {
    const int64_t pairs = pairs_of(in.m), blocks = ceil_div(pairs, kMaxPairs), most = ceil_div(pairs, blocks);
    constexpr int64_t kChunkBytes = kGroups * kGroupPairs * kPairChunk;
    const int64_t panel_floats = most * kPairSums, floats = (last - first) * panel_floats;
    const int64_t bytes = kChunkBytes + floats * static_cast<int64_t>(sizeof(float));
    uint8_t* chunk = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
    if (chunk == nullptr) return false;
    float* sums = reinterpret_cast<float*>(chunk + kChunkBytes);
    for (int64_t begin = 0; begin < pairs; begin += most) {
        const int64_t count = min(most, pairs - begin);
        __builtin_memset(sums, 0, static_cast<uint64_t>(floats) * sizeof(float));
        for (int64_t c = 0; c < chunks_of(w); ++c)
            for (int64_t p = first; p < last; ++p)
                multiply_chunk(w, p, c, count, prepared + (c * pairs + begin) * kPairChunk, chunk,
                               sums + (p - first) * panel_floats);
        for (int64_t p = first; p < last; ++p)
            for (int64_t i = 0; i < count; ++i)
                store_pair(w, y, p, 2 * (begin + i), in.m, sums + (p - first) * panel_floats + i * kPairSums,
                           factor_of(w));
    }
    return true;
}

}  // namespace

extern const Path kMmlaPath;
const Path kMmlaPath = {"mmla", prepared_bytes, prepare, multiply, kPiecePanels};

}  // namespace MINIFLOAT_ISA

#endif
