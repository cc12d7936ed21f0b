// The two products of attention by AMX, for a bfloat16 cache and queries that are exact in bfloat16.
#pragma once

#include "../linear/amx.h"
#include "attend_tile.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {

constexpr int kPairBytes = 4;
constexpr int kGroupCols = 4 * kTileRows;  // columns of values whose sums are in tiles together

// The tile registers of attention with `rows` queries. 0 to 3: sums (1 holds queries while scores are computed); 4 and
// 5: the two parts of the weights of a block; 6: 32 dimensions of the keys of a block; 7: 16 columns of its values.
inline TileShapes attention_tiles(int rows) {
    TileShapes shapes;
    for (int t = 0; t < 4; ++t) shapes.set(t, rows);
    for (int t = 4; t < 6; ++t) shapes.set(t, rows, kBlockTokens * 2);
    shapes.set(6, kTileRows);
    shapes.set(7, kBlockTokens / 2);
    return shapes;
}

// Prefetches 32 dimensions of the keys of a later block, and as many bytes of the values of this block.
inline void prefetch_half(const Chunk& chunk, int b, int64_t at) {
    for (int64_t line = at; line < at + kTileBytes; line += kVectorBytes) {
        __builtin_prefetch(chunk.heads[b + kAheadBlocks] + line);
        __builtin_prefetch(chunk.values[b] + line);
    }
}

// Scores of all blocks of a chunk. q: bf16, rows of `dims`.
inline void score_by_tiles(const uint16_t* q, int rows, int dims, float factor, Chunk& chunk) {
    constexpr int kStride = kChunkKeys * static_cast<int>(sizeof(float));
    publish();
    for (int b = 0; b < chunk.blocks; b += 2) {
        const bool two = b + 1 < chunk.blocks;
        _tile_zero(0);
        _tile_zero(2);
        for (int i = 0; i < dims; i += kHalfCols) {
            const int64_t at = static_cast<int64_t>(i) / 2 * kVectorBytes;
            prefetch_half(chunk, b, at);
            if (two) prefetch_half(chunk, b + 1, at);
            _tile_loadd(1, q + i, dims * 2);
            _tile_loadd(6, chunk.heads[b] + at, kVectorBytes);
            _tile_dpbf16ps(0, 1, 6);
            if (two) {
                _tile_loadd(6, chunk.heads[b + 1] + at, kVectorBytes);
                _tile_dpbf16ps(2, 1, 6);
            }
        }
        _tile_stored(0, &chunk.scores[0][b * kBlockTokens], kStride);
        if (two) _tile_stored(2, &chunk.scores[0][(b + 1) * kBlockTokens], kStride);
    }
    publish();
    for (int r = 0; r < rows; ++r)
        for (int key = 0; key < chunk.blocks * kBlockTokens; key += kWidth)
            store_as(&chunk.scores[r][key], load(&chunk.scores[r][key]) * factor);
}

// Adds the values of blocks begin .. end - 1; all rows must see all their keys.
inline void add_by_tiles(const Chunk& chunk, int rows, int padded_dim, int begin, int end, Sums& out) {
    alignas(64) uint16_t high[kQueryRows][kChunkKeys], low[kQueryRows][kChunkKeys];
    for (int r = 0; r < rows; ++r) {
        for (int key = begin * kBlockTokens; key < end * kBlockTokens; key += kWidth) {
            const F32 weights = load(&chunk.scores[r][key]);
            Bf16Row::store(reinterpret_cast<uint8_t*>(&high[r][key]), weights);
            const F32 rounded = Bf16Row::load(reinterpret_cast<const uint8_t*>(&high[r][key]));
            Bf16Row::store(reinterpret_cast<uint8_t*>(&low[r][key]), weights - rounded);
        }
    }
    constexpr int kSumStride = MINIFLOAT_MAX_HEAD_DIM * 4, kWeightStride = kChunkKeys * 2;
    const int stride = padded_dim * kPairBytes;
    publish();
    for (int col = 0; col < padded_dim; col += kGroupCols) {
        const int tiles = min(kGroupCols, padded_dim - col) / kTileRows;
        float* sums = &out.values[0][col];
        _tile_loadd(0, sums, kSumStride);
        if (tiles > 1) _tile_loadd(1, sums + kTileRows, kSumStride);
        if (tiles > 2) _tile_loadd(2, sums + 2 * kTileRows, kSumStride);
        if (tiles > 3) _tile_loadd(3, sums + 3 * kTileRows, kSumStride);
        for (int b = begin; b < end; ++b) {
            const uint8_t* values = chunk.values[b] + col * kPairBytes;
            _tile_loadd(4, &high[0][b * kBlockTokens], kWeightStride);
            _tile_loadd(5, &low[0][b * kBlockTokens], kWeightStride);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(0, 5, 7);
            if (tiles > 1) {
                _tile_loadd(7, values + kVectorBytes, stride);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(1, 5, 7);
            }
            if (tiles > 2) {
                _tile_loadd(7, values + 2 * kVectorBytes, stride);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(2, 5, 7);
            }
            if (tiles > 3) {
                _tile_loadd(7, values + 3 * kVectorBytes, stride);
                _tile_dpbf16ps(3, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, kSumStride);
        if (tiles > 1) _tile_stored(1, sums + kTileRows, kSumStride);
        if (tiles > 2) _tile_stored(2, sums + 2 * kTileRows, kSumStride);
        if (tiles > 3) _tile_stored(3, sums + 3 * kTileRows, kSumStride);
    }
    publish();
}

}  // namespace MINIFLOAT_ISA

#endif
