// The data of attention: a tile of queries, a chunk of keys, sums (attend.h).
#pragma once

#include "cache.h"

namespace MINIFLOAT_ISA {

// Rows of a tile share the reading of the cache; registers hold their sums and a vector of keys.
#if defined(__AVX512F__)
constexpr int kQueryRows = 16;
#else
constexpr int kQueryRows = 8;
#endif
constexpr int kChunkBlocks = 8;
constexpr int kChunkKeys = kChunkBlocks * kBlockTokens;
constexpr int kLatentBlocks = 4;  // of a chunk whose values are made from its keys: these stay in the second cache
constexpr int kAheadBlocks = 4;  // blocks are anywhere in memory: the hardware cannot predict the next one

struct Tile {
    int rows;
    const float* q[kQueryRows];                          // [head_dim]
    int64_t first_key[kQueryRows], last_key[kQueryRows];  // a row sees keys first .. last - 1; neither falls from row to row
    const int32_t* blocks;                              // of the sequence
    int64_t head;
    float score_factor;  // of the product of a query and a key as load() gives it
    float score_cap;     // 0: none
    uint8_t* turned;      // of a latent cache: memory for the values of kLatentBlocks blocks
    const uint16_t* q16;  // the queries as bf16 where bf16 is multiplied (rows are head_dim apart for AMX, else
                          // MINIFLOAT_MAX_HEAD_DIM); else null
};

// Sums of a tile: of values weighted by exp(score - largest), and of these weights; initially zero.
struct Sums {
    alignas(64) float values[kQueryRows][MINIFLOAT_MAX_HEAD_DIM];
    alignas(64) float largest[kQueryRows];
    float total[kQueryRows];
};

inline float minus_infinity() { return -__builtin_inff(); }

inline void clear(Sums& sums, int rows, int padded_dim) {
    for (int r = 0; r < rows; ++r) __builtin_memset(sums.values[r], 0, padded_dim * sizeof(float));
    for (int r = 0; r < kQueryRows; ++r) {
        sums.largest[r] = minus_infinity();
        sums.total[r] = 0.0f;
    }
}

// The chunk being processed; keys are numbered from its first key.
struct Chunk {
    alignas(64) float scores[kQueryRows][kChunkKeys];
    const uint8_t* heads[kChunkBlocks + kAheadBlocks];  // blocks of one head, later blocks included
    const uint8_t* values[kChunkBlocks];                // of the blocks of the chunk
    int blocks;
    int first[kQueryRows], last[kQueryRows];  // the keys that each row sees
    int common_begin, common_end;             // seen by all rows, whole pairs
};

}  // namespace MINIFLOAT_ISA
