// The data of attention: a tile of queries, a chunk of keys, sums (attend.h).
#pragma once

#include "../linear/convert.h"
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

// The values of a block of a latent cache are the first dimensions of its keys, brought into the order of values.

// Element i of token t, where a vector holds kPair elements of each of the tokens, is moved next to the same element of
// the other tokens: from [i / kPair][t][i % kPair] to [t / kPair][padded][t % kPair].
template <class Code, int kPair>
inline void move_one_by_one(const uint8_t* keys, int begin, int dims, int padded, uint8_t* values) {
    const Code* from = reinterpret_cast<const Code*>(keys);
    Code* to = reinterpret_cast<Code*>(values);
    for (int i = begin; i < dims; ++i)
        for (int t = 0; t < kBlockTokens; ++t)
            to[(t / kPair * padded + i) * kPair + t % kPair] = from[(i / kPair * kBlockTokens + t) * kPair + i % kPair];
}

// `dims` keys of a block to values, rows `padded` elements apart. float32: squares of 4 dimensions and 4 tokens.
template <int kBytes>
inline void values_of_keys(const uint8_t* keys, int dims, int padded, uint8_t* values) {
    static_assert(kBytes == 4, "the other elements are below");
    int i = 0;
    for (; i + 4 <= dims; i += 4) {
        for (int t = 0; t < kBlockTokens; t += 4) {
            Words square[4];
            for (int r = 0; r < 4; ++r) square[r] = load_as<Words>(keys + ((i + r) * kBlockTokens + t) * 4);
            transpose(square);
            for (int r = 0; r < 4; ++r) store_as(values + ((t + r) * padded + i) * 4, square[r]);
        }
    }
    move_one_by_one<uint32_t, 1>(keys, i, dims, padded, values);
}

// bfloat16: a vector of 16 bytes has a pair of dimensions of 4 tokens. Exchanging the middle numbers of each 8 bytes
// makes pairs of tokens of them.
template <>
inline void values_of_keys<2>(const uint8_t* keys, int dims, int padded, uint8_t* values) {
    const auto by_tokens = [](const uint8_t* p) {
        const Halves h = load_as<Halves>(p);
        return bit_cast<Doubles>(MINIFLOAT_SHUFFLE(Halves, h, h, 0, 2, 1, 3, 4, 6, 5, 7));
    };
    int i = 0;
    for (; i + 4 <= dims; i += 4) {
#pragma GCC unroll 4
        for (int t = 0; t < kBlockTokens; t += 4) {
            const uint8_t* from = keys + (i * kBlockTokens + t * 2) * 2;
            const Doubles a = by_tokens(from), b = by_tokens(from + kBlockTokens * 4);
            uint8_t* to = values + (t * padded + i * 2) * 2;
            store_as(to, MINIFLOAT_SHUFFLE(Doubles, a, b, 0, 2));
            store_as(to + padded * 4, MINIFLOAT_SHUFFLE(Doubles, a, b, 1, 3));
        }
    }
    move_one_by_one<uint16_t, 2>(keys, i, dims, padded, values);
}

// E4M3: squares of 16 dimensions and 16 tokens.
template <>
inline void values_of_keys<1>(const uint8_t* keys, int dims, int padded, uint8_t* values) {
    int i = 0;
    for (; i + kBlockTokens <= dims; i += kBlockTokens) {
        Octets square[kBlockTokens];
        for (int r = 0; r < kBlockTokens; ++r) square[r] = load_as<Octets>(keys + (i + r) * kBlockTokens);
        transpose(square);
        for (int t = 0; t < kBlockTokens; ++t) store_as(values + t * padded + i, square[t]);
    }
    move_one_by_one<uint8_t, 1>(keys, i, dims, padded, values);
}

}  // namespace MINIFLOAT_ISA
