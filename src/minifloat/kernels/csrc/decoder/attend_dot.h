// The two products of attention by VDPBF16PS, for a bfloat16 cache and queries that are exact in bfloat16. Weights are
// split into two bf16 that hold 16 bits of them.
#pragma once

#include "../linear/avx512.h"
#include "../linear/bf16_dot.h"
#include "attend_tile.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {

// Rows whose sums, with those of two vectors each, stay in registers.
constexpr int kDotQueries = 8;

// Scores of blocks b .. b + kBlocks - 1 for rows `row` to row + kRows - 1. q: [kQueryRows][MINIFLOAT_MAX_HEAD_DIM].
template <int kRows, int kBlocks>
inline void score_dots(const uint16_t* q, int row, int dims, float factor, Chunk& chunk, int b) {
    __m512 sums[kRows][kBlocks];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kBlocks; ++j) sums[r][j] = _mm512_setzero_ps();
    const uint8_t* queries = reinterpret_cast<const uint8_t*>(q + row * MINIFLOAT_MAX_HEAD_DIM);
    for (int i = 0; i < dims; i += 2, queries += 4) {
        const int at = i / 2 * kVectorBytes;
        __m512bh keys[kBlocks];
#pragma GCC unroll 4
        for (int j = 0; j < kBlocks; ++j) {
            if (row == 0) {
                __builtin_prefetch(chunk.heads[b + j + kAheadBlocks] + at);
                __builtin_prefetch(chunk.values[b + j] + at);
            }
            keys[j] = bit_cast<__m512bh>(_mm512_loadu_si512(chunk.heads[b + j] + at));
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512bh query = broadcast_pair(queries + r * MINIFLOAT_MAX_HEAD_DIM * 2);
#pragma GCC unroll 4
            for (int j = 0; j < kBlocks; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], keys[j], query);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kBlocks; ++j)
            _mm512_store_ps(&chunk.scores[row + r][(b + j) * kLanes], _mm512_mul_ps(sums[r][j], _mm512_set1_ps(factor)));
}

// With few rows there are registers for more vectors, which hide the latency of dot products.
constexpr int dots_at_once(int rows) { return rows <= 4 ? 4 : 2; }

template <int kRows>
__attribute__((noinline)) void score_rows_by_dots(const uint16_t* q, int row, int dims, float factor, Chunk& chunk) {
    constexpr int kBlocks = dots_at_once(kRows);
    int b = 0;
    for (; b + kBlocks <= chunk.blocks; b += kBlocks) score_dots<kRows, kBlocks>(q, row, dims, factor, chunk, b);
    for (; b < chunk.blocks; ++b) score_dots<kRows, 1>(q, row, dims, factor, chunk, b);
}

// The weights of a chunk in two parts.
struct SplitWeights {
    alignas(64) uint16_t high[kQueryRows][kChunkKeys], low[kQueryRows][kChunkKeys];

    SplitWeights(const Chunk& chunk, int rows, int begin, int end) {
        begin -= begin % kWidth;
        for (int r = 0; r < rows; ++r) {
            for (int key = begin; key < end; key += kWidth) {
                const __m512 weights = _mm512_load_ps(&chunk.scores[r][key]);
                const __m256i rounded = bit_cast<__m256i>(_mm512_cvtneps_pbh(weights));
                const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
                _mm256_store_si256(reinterpret_cast<__m256i*>(&high[r][key]), rounded);
                _mm256_store_si256(reinterpret_cast<__m256i*>(&low[r][key]),
                                   bit_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_sub_ps(weights, back))));
            }
        }
    }
};

// Adds the values of keys begin .. end - 1 to the sums of rows `row` to row + kRows - 1 and kVectors vectors from `col`.
template <int kRows, int kVectors>
inline void add_dots(const Chunk& chunk, const SplitWeights& weights, int row, int padded_dim, int begin, int end, int col,
                     Sums& out) {
    __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_load_ps(&out.values[row + r][col + v * kWidth]);
    for (int key = begin; key < end;) {
        const int stop = min(end, (key / kBlockTokens + 1) * kBlockTokens);
        const uint8_t* values = chunk.values[key / kBlockTokens] + (key % kBlockTokens * padded_dim + col * 2) * 2;
        for (; key < stop; key += 2, values += padded_dim * 4) {
            __m512bh columns[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                columns[v] = bit_cast<__m512bh>(_mm512_loadu_si512(values + v * kVectorBytes));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m512bh high = broadcast_pair(reinterpret_cast<const uint8_t*>(&weights.high[row + r][key]));
                const __m512bh low = broadcast_pair(reinterpret_cast<const uint8_t*>(&weights.low[row + r][key]));
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], high);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], low);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) _mm512_store_ps(&out.values[row + r][col + v * kWidth], sums[r][v]);
}

template <int kRows>
__attribute__((noinline)) void add_rows_by_dots(const Chunk& chunk, const SplitWeights& weights, int row, int padded_dim,
                                                int begin, int end, Sums& out) {
    constexpr int kVectors = dots_at_once(kRows);
    int col = 0;
    for (; col + kVectors * kWidth <= padded_dim; col += kVectors * kWidth)
        add_dots<kRows, kVectors>(chunk, weights, row, padded_dim, begin, end, col, out);
    for (; col < padded_dim; col += kWidth) add_dots<kRows, 1>(chunk, weights, row, padded_dim, begin, end, col, out);
}

// Calls function(Constant<n>(), row) for kRows rows in groups of kDotQueries.
template <int kRows, class Function>
inline void for_dot_rows(const Function& function) {
    if constexpr (kRows > kDotQueries) {
        function(Constant<kDotQueries>(), 0);
        function(Constant<kRows - kDotQueries>(), kDotQueries);
    } else {
        function(Constant<kRows>(), 0);
    }
}

// Scores of all blocks of a chunk.
template <int kRows>
inline void score_by_dots(const Tile& tile, int dims, Chunk& chunk) {
    for_dot_rows<kRows>([&](auto count, int row) {
        score_rows_by_dots<decltype(count)::kValue>(tile.q16, row, dims, tile.score_factor, chunk);
    });
}

// Adds the values of keys begin .. end - 1, pairs of keys that all rows see.
template <int kRows>
inline void add_by_dots(const Chunk& chunk, const SplitWeights& weights, int padded_dim, int begin, int end, Sums& out) {
    if (begin >= end) return;
    for_dot_rows<kRows>([&](auto count, int row) {
        add_rows_by_dots<decltype(count)::kValue>(chunk, weights, row, padded_dim, begin, end, out);
    });
}

}  // namespace MINIFLOAT_ISA

#endif
