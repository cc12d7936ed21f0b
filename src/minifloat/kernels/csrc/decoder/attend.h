// Softmax attention of a tile: some queries of one key-value head over a range of blocks.
//
// Rows of a tile are pairs of token and query head, in the order of tokens, so that one reading of keys and values
// serves a group of heads, or several tokens, or both. Blocks go in chunks: scores of a chunk, then their exponentials
// under the largest score so far, then the values. Blocks that every row sees whole take the fast way. In the others,
// at the ends of what rows see, a row meets only its own keys: memory behind the last token holds anything, and so may
// a token that the row must not see, and zero times NaN is NaN.
#pragma once

#include "cache.h"
#include "math.h"

namespace MINIFLOAT_ISA {

constexpr int kQueryRows = 8;  // with their sums, and a vector of keys, the registers of AVX2 are used
constexpr int kChunkBlocks = 8;
constexpr int kChunkKeys = kChunkBlocks * kBlockTokens;

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

// A chunk while it is worked on.
struct Chunk {
    alignas(64) float scores[kQueryRows][kChunkKeys];
    const uint8_t* keys[kChunkBlocks];
    const uint8_t* values[kChunkBlocks];
    int64_t first_key;
    int blocks;
    int whole_begin, whole_end;  // blocks that all rows see whole
};

// Scores of blocks b .. b + kBlocks - 1 of a chunk.
template <class Element, int kRows, int kBlocks>
inline void score_blocks(const Tile& tile, Chunk& chunk, int dims, int b) {
    for (int lane = 0; lane < kLanes; lane += kWidth) {
        F32 sums[kRows][kBlocks] = {};
        for (int i = 0; i < dims; i += Element::kPair) {
#pragma GCC unroll 4
            for (int j = 0; j < kBlocks; ++j) {
                F32 keys[Element::kPair];
                Element::load(chunk.keys[b + j] + (i * kLanes + lane * Element::kPair) * Element::kBytes, keys);
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
inline void hide(const Tile& tile, Chunk& chunk, int b) {
    const int64_t begin = chunk.first_key + b * kBlockTokens;
    for (int r = 0; r < tile.rows; ++r)
        for (int64_t key = begin; key < begin + kBlockTokens; ++key)
            if (key < tile.first_key[r] || key >= tile.last_key[r])
                chunk.scores[r][key - chunk.first_key] = minus_infinity();
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

// Adds the values of the blocks that all rows see whole, kVectors vectors of columns from `col` on.
template <class Element, int kRows, int kVectors>
inline void add_whole(const Chunk& chunk, int padded_dim, int col, Sums& out) {
    F32 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load(&out.values[r][col + v * kWidth]);
    for (int b = chunk.whole_begin; b < chunk.whole_end; ++b) {
        for (int key = 0; key < kBlockTokens; key += Element::kPair) {
            const uint8_t* row = chunk.values[b] + key * padded_dim * Element::kBytes;
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                F32 values[Element::kPair];
                Element::load(row + (col + v * kWidth) * Element::kPair * Element::kBytes, values);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                    for (int c = 0; c < Element::kPair; ++c)
                        sums[r][v] += chunk.scores[r][b * kBlockTokens + key + c] * values[c];
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) store_as(&out.values[r][col + v * kWidth], sums[r][v]);
}

// Adds the values of a block of which each row sees keys of its own.
template <class Element>
inline void add_partly(const Tile& tile, const Chunk& chunk, int padded_dim, int b, Sums& out) {
    const int64_t begin = chunk.first_key + b * kBlockTokens;
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t first = max(tile.first_key[r] - begin, int64_t{0});
        const int64_t last = min(tile.last_key[r] - begin, int64_t{kBlockTokens});
        for (int64_t key = first; key < last; ++key) {
            const uint8_t* row = chunk.values[b] + key / Element::kPair * Element::kPair * padded_dim * Element::kBytes;
            const float weight = chunk.scores[r][b * kBlockTokens + key];
            for (int col = 0; col < padded_dim; col += kWidth) {
                F32 values[Element::kPair];
                Element::load(row + col * Element::kPair * Element::kBytes, values);
                float* sum = &out.values[r][col];
                store_as(sum, load(sum) + weight * values[key % Element::kPair]);
            }
        }
    }
}

template <class Element, int kRows>
inline void attend_chunk(const Tile& tile, const LayerCache& cache, Chunk& chunk, Sums& out) {
    // Few rows leave registers for more columns, and need them: an addition takes several cycles.
    constexpr int kAtOnce = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
    int b = 0;
    for (; b + kAtOnce <= chunk.blocks; b += kAtOnce)
        score_blocks<Element, kRows, kAtOnce>(tile, chunk, cache.head_dim, b);
    for (; b < chunk.blocks; ++b) score_blocks<Element, kRows, 1>(tile, chunk, cache.head_dim, b);
    for (b = 0; b < chunk.blocks; ++b)
        if (b < chunk.whole_begin || b >= chunk.whole_end) hide(tile, chunk, b);
    for (int r = 0; r < kRows; ++r)
        weigh(chunk.scores[r], chunk.blocks * kBlockTokens, cache.padded_dim, out.values[r], out.largest[r],
              out.total[r]);
    int col = 0;
    for (; col + kAtOnce * kWidth <= cache.padded_dim; col += kAtOnce * kWidth)
        add_whole<Element, kRows, kAtOnce>(chunk, cache.padded_dim, col, out);
    for (; col < cache.padded_dim; col += kWidth) add_whole<Element, kRows, 1>(chunk, cache.padded_dim, col, out);
    for (b = 0; b < chunk.blocks; ++b)
        if (b < chunk.whole_begin || b >= chunk.whole_end) add_partly<Element>(tile, chunk, cache.padded_dim, b, out);
}

// Adds blocks begin .. end - 1 of the sequence to the sums of a tile.
template <class Element, int kRows>
void attend_rows(const Tile& tile, const LayerCache& cache, int64_t begin, int64_t end, Sums& out) {
    if constexpr (kRows > 1) {
        if (tile.rows < kRows) return attend_rows<Element, kRows - 1>(tile, cache, begin, end, out);
    }
    Chunk chunk;
    const int64_t whole_begin = ceil_div(tile.first_key[kRows - 1], kBlockTokens);
    const int64_t whole_end = tile.last_key[0] / kBlockTokens;
    for (int64_t block = begin; block < end; block += kChunkBlocks) {
        chunk.first_key = block * kBlockTokens;
        chunk.blocks = static_cast<int>(min<int64_t>(kChunkBlocks, end - block));
        for (int b = 0; b < chunk.blocks; ++b) {
            chunk.keys[b] = cache.head(tile.blocks[block + b], tile.head);
            chunk.values[b] = chunk.keys[b] + cache.values_at;
        }
        const int64_t most = chunk.blocks;
        chunk.whole_begin = static_cast<int>(min(max(whole_begin - block, int64_t{0}), most));
        chunk.whole_end = static_cast<int>(max<int64_t>(chunk.whole_begin, min(whole_end - block, most)));
        attend_chunk<Element, kRows>(tile, cache, chunk, out);
    }
}

inline void attend(const Tile& tile, const LayerCache& cache, int64_t begin, int64_t end, Sums& out) {
    if (cache.element == MINIFLOAT_CACHE_F32) attend_rows<CacheF32, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_BF16) attend_rows<CacheBf16, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_E4M3) attend_rows<CacheE4M3, kQueryRows>(tile, cache, begin, end, out);
}

}  // namespace MINIFLOAT_ISA
