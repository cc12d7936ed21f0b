// Softmax attention of a tile: some queries of one key-value head over a range of blocks.
//
// Rows of a tile are pairs of token and query head, in the order of tokens, so that one reading of keys and values
// serves a group of heads, or several tokens, or both. Blocks go in chunks: scores of a chunk, then their exponentials
// under the largest score so far, then the values. Values of keys that every row sees are added for all rows at once;
// of the others, at the ends of what rows see, a row meets only its own: memory behind the last token holds anything,
// and so may a token that the row must not see, and zero times NaN is NaN.
#pragma once

#include "cache.h"
#include "math.h"

namespace MINIFLOAT_ISA {

constexpr int kQueryRows = 8;  // with their sums, and a vector of keys, the registers of AVX2 are used
constexpr int kChunkBlocks = 8;
constexpr int kChunkKeys = kChunkBlocks * kBlockTokens;
constexpr int kAheadBlocks = 4;  // blocks lie anywhere: the processor does not foresee where the next one begins

struct Tile {
    int rows;
    const float* q[kQueryRows];                          // [head_dim]
    int64_t first_key[kQueryRows], last_key[kQueryRows];  // a row sees keys first .. last - 1; neither falls from row to row
    const int32_t* blocks;                              // of the sequence
    int64_t head;
    float score_factor;  // of the product of a query and a key as load() gives it
};

// Of a tile: sums of values weighted by exp(score - largest), and of those weights; zeros at first.
struct Sums {
    alignas(64) float values[kQueryRows][MINIFLOAT_MAX_HEAD_DIM];
    float largest[kQueryRows], total[kQueryRows];
};

inline float minus_infinity() { return -__builtin_inff(); }

inline void clear(Sums& sums, int rows, int padded_dim) {
    for (int r = 0; r < rows; ++r) {
        __builtin_memset(sums.values[r], 0, padded_dim * sizeof(float));
        sums.largest[r] = minus_infinity();
        sums.total[r] = 0.0f;
    }
}

// A chunk while it is worked on; keys are counted from its first.
struct Chunk {
    alignas(64) float scores[kQueryRows][kChunkKeys];
    const uint8_t* heads[kChunkBlocks + kAheadBlocks];  // blocks of one head, those to come included
    int64_t values_at;
    int blocks;
    int first[kQueryRows], last[kQueryRows];  // what each row sees
    int common_begin, common_end;             // seen by all rows, whole pairs
};

// Scores of blocks b .. b + kBlocks - 1 of a chunk.
template <class Element, int kRows, int kBlocks>
inline void score_blocks(const Tile& tile, Chunk& chunk, int dims, int b) {
    for (int lane = 0; lane < kLanes; lane += kWidth) {
        F32 sums[kRows][kBlocks] = {};
        for (int i = 0; i < dims; i += Element::kPair) {
#pragma GCC unroll 4
            for (int j = 0; j < kBlocks; ++j) {
                const int at = i * kLanes * Element::kBytes;
                if (lane == 0 && at % kVectorBytes == 0) {
                    __builtin_prefetch(chunk.heads[b + j + kAheadBlocks] + at);
                    __builtin_prefetch(chunk.heads[b + j] + chunk.values_at + at);
                }
                F32 keys[Element::kPair];
                Element::load(chunk.heads[b + j] + at + lane * Element::kPair * Element::kBytes, keys);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                    for (int c = 0; c < Element::kPair; ++c) sums[r][j] += tile.q[r][i + c] * keys[c];
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kBlocks; ++j)
                store_as(&chunk.scores[r][(b + j) * kLanes + lane], sums[r][j] * tile.score_factor);
    }
}

// Makes scores of keys that a row does not see minus infinity.
inline void hide(Chunk& chunk, int rows) {
    for (int r = 0; r < rows; ++r) {
        for (int key = 0; key < chunk.first[r]; ++key) chunk.scores[r][key] = minus_infinity();
        for (int key = chunk.last[r]; key < chunk.blocks * kBlockTokens; ++key)
            chunk.scores[r][key] = minus_infinity();
    }
}

// Scores to weights exp(score - largest); sums so far are brought under the new largest.
inline void weigh(float* scores, int count, int padded_dim, float* values, float& largest, float& total) {
    F32 most = broadcast(largest);
    for (int i = 0; i < count; i += kWidth) most = max(load(scores + i), most);
    const float now = fold<kWidth, float>(most, Max());
    const F32 reference = broadcast(now == minus_infinity() ? 0.0f : now);
    F32 sum = {};
    for (int i = 0; i < count; i += kWidth) {
        const F32 weight = exp(load(scores + i) - reference);
        store_as(scores + i, weight);
        sum += weight;
    }
    const float shrink = exp(broadcast(largest) - reference)[0];
    total = total * shrink + fold<kWidth, float>(sum, Add());
    if (now != largest)
        for (int i = 0; i < padded_dim; i += kWidth) store_as(values + i, load(values + i) * shrink);
    largest = now;
}

// Where the values of a key, or of its pair, lie.
template <class Element>
inline const uint8_t* values_of(const Chunk& chunk, int padded_dim, int key) {
    const int row = key % kBlockTokens / Element::kPair * Element::kPair;
    return chunk.heads[key / kBlockTokens] + chunk.values_at + row * padded_dim * Element::kBytes;
}

// Adds the values of the keys that all rows see, kVectors vectors of columns from `col` on.
template <class Element, int kRows, int kVectors>
inline void add_common(const Chunk& chunk, int padded_dim, int col, Sums& out) {
    F32 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load(&out.values[r][col + v * kWidth]);
    for (int key = chunk.common_begin; key < chunk.common_end; key += Element::kPair) {
        const uint8_t* row = values_of<Element>(chunk, padded_dim, key);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            F32 values[Element::kPair];
            Element::load(row + (col + v * kWidth) * Element::kPair * Element::kBytes, values);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                for (int c = 0; c < Element::kPair; ++c) sums[r][v] += chunk.scores[r][key + c] * values[c];
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) store_as(&out.values[r][col + v * kWidth], sums[r][v]);
}

// Adds the values of keys begin .. end - 1 to one row.
template <class Element>
inline void add_own(const Chunk& chunk, int padded_dim, int r, int begin, int end, Sums& out) {
    for (int key = begin; key < end; ++key) {
        const uint8_t* row = values_of<Element>(chunk, padded_dim, key);
        for (int col = 0; col < padded_dim; col += kWidth) {
            F32 values[Element::kPair];
            Element::load(row + col * Element::kPair * Element::kBytes, values);
            float* sum = &out.values[r][col];
            store_as(sum, load(sum) + chunk.scores[r][key] * values[key % Element::kPair]);
        }
    }
}

template <class Element, int kRows>
inline void attend_chunk(const Tile& tile, const LayerCache& cache, Chunk& chunk, Sums& out) {
    // Few rows leave registers for more columns, and need them: an addition takes several cycles.
    constexpr int kAtOnce = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
    const int dims = cache.head_dim, padded = cache.padded_dim;
    int b = 0;
    for (; b + kAtOnce <= chunk.blocks; b += kAtOnce) score_blocks<Element, kRows, kAtOnce>(tile, chunk, dims, b);
    for (; b < chunk.blocks; ++b) score_blocks<Element, kRows, 1>(tile, chunk, dims, b);
    hide(chunk, kRows);
    for (int r = 0; r < kRows; ++r)
        weigh(chunk.scores[r], chunk.blocks * kBlockTokens, padded, out.values[r], out.largest[r], out.total[r]);
    int col = 0;
    for (; col + kAtOnce * kWidth <= padded; col += kAtOnce * kWidth)
        add_common<Element, kRows, kAtOnce>(chunk, padded, col, out);
    for (; col < padded; col += kWidth) add_common<Element, kRows, 1>(chunk, padded, col, out);
    for (int r = 0; r < kRows; ++r) {
        add_own<Element>(chunk, padded, r, chunk.first[r], min(chunk.common_begin, chunk.last[r]), out);
        add_own<Element>(chunk, padded, r, max(chunk.common_end, chunk.first[r]), chunk.last[r], out);
    }
}

// What the rows of a tile see of the chunk that begins at block `block`.
template <class Element>
inline void bound(const Tile& tile, int64_t block, Chunk& chunk) {
    const int keys = chunk.blocks * kBlockTokens;
    const auto within = [&](int64_t key) {
        return static_cast<int>(min<int64_t>(max<int64_t>(key - block * kBlockTokens, 0), keys));
    };
    for (int r = 0; r < tile.rows; ++r) {
        chunk.first[r] = within(tile.first_key[r]);
        chunk.last[r] = within(tile.last_key[r]);
    }
    chunk.common_begin = static_cast<int>(round_up(chunk.first[tile.rows - 1], Element::kPair));
    chunk.common_end = max(chunk.common_begin, chunk.last[0] / Element::kPair * Element::kPair);
}

// Adds blocks begin .. end - 1 of the sequence to the sums of a tile.
template <class Element, int kRows>
void attend_rows(const Tile& tile, const LayerCache& cache, int64_t begin, int64_t end, Sums& out) {
    if constexpr (kRows > 1) {
        if (tile.rows < kRows) return attend_rows<Element, kRows - 1>(tile, cache, begin, end, out);
    }
    Chunk chunk;
    chunk.values_at = cache.values_at;
    const auto head = [&](int64_t block) { return cache.head(tile.blocks[min(block, end - 1)], tile.head); };
    for (int64_t block = begin; block < min(begin + kAheadBlocks, end); ++block)
        for (int64_t i = 0; i < cache.values_at; i += kVectorBytes) __builtin_prefetch(head(block) + i);
    for (int64_t block = begin; block < end; block += kChunkBlocks) {
        chunk.blocks = static_cast<int>(min<int64_t>(kChunkBlocks, end - block));
        for (int b = 0; b < chunk.blocks + kAheadBlocks; ++b) chunk.heads[b] = head(block + b);
        bound<Element>(tile, block, chunk);
        attend_chunk<Element, kRows>(tile, cache, chunk, out);
    }
}

inline void attend(const Tile& tile, const LayerCache& cache, int64_t begin, int64_t end, Sums& out) {
    if (cache.element == MINIFLOAT_CACHE_F32) attend_rows<CacheF32, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_BF16) attend_rows<CacheBf16, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_E4M3) attend_rows<CacheE4M3, kQueryRows>(tile, cache, begin, end, out);
}

}  // namespace MINIFLOAT_ISA
