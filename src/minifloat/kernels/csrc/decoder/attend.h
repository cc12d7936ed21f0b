// Softmax attention of a tile: some queries of one key-value head over a range of blocks. Values of keys that not every
// row sees are added only to the rows that do: other memory may hold NaN, and zero times NaN is NaN.
#pragma once

#include "attend_amx.h"
#include "attend_dot.h"
#include "attend_tile.h"
#include "math.h"
#include "rows.h"

namespace MINIFLOAT_ISA {

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
                    __builtin_prefetch(chunk.values[b + j] + at);
                }
                F32 keys[Element::kPair];
                Element::load(chunk.heads[b + j] + at + lane * Element::kPair * Element::kBytes, keys);
#pragma GCC unroll 16
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

// Bounds scores: cap * tanh(score / cap).
inline void cap_scores(Chunk& chunk, int rows, float cap) {
    for (int r = 0; r < rows; ++r)
        for (int key = 0; key < chunk.blocks * kBlockTokens; key += kWidth)
            store_as(&chunk.scores[r][key], tanh(load(&chunk.scores[r][key]) / cap) * cap);
}

// Sets the scores of keys that a row does not see to minus infinity.
inline void hide(Chunk& chunk, int rows) {
    for (int r = 0; r < rows; ++r) {
        for (int key = 0; key < chunk.first[r]; ++key) chunk.scores[r][key] = minus_infinity();
        for (int key = chunk.last[r]; key < chunk.blocks * kBlockTokens; ++key)
            chunk.scores[r][key] = minus_infinity();
    }
}

// Turns scores into weights exp(score - largest) and rescales the sums so far to the new largest scores.
inline void weigh(Chunk& chunk, int rows, int padded_dim, Sums& out) {
    const int count = chunk.blocks * kBlockTokens;
    alignas(64) float now[kQueryRows], reference[kQueryRows] = {}, shrink[kQueryRows];
    for (int r = 0; r < rows; ++r) {
        F32 most = broadcast(out.largest[r]);
        for (int i = 0; i < count; i += kWidth) most = max(load(chunk.scores[r] + i), most);
        now[r] = fold<kWidth, float>(most, Max());
        reference[r] = now[r] == minus_infinity() ? 0.0f : now[r];
    }
    for (int r = 0; r < rows; r += kWidth) store_as(shrink + r, exp(load(out.largest + r) - load(reference + r)));
    for (int r = 0; r < rows; ++r) {
        float* scores = chunk.scores[r];
        F32 sum = {};
        for (int i = 0; i < count; i += kWidth) {
            const F32 weight = exp(load(scores + i) - reference[r]);
            store_as(scores + i, weight);
            sum += weight;
        }
        out.total[r] = out.total[r] * shrink[r] + fold<kWidth, float>(sum, Add());
    }
    for (int r = 0; r < rows; ++r) {
        float* values = out.values[r];
        if (now[r] != out.largest[r])
            for (int i = 0; i < padded_dim; i += kWidth) store_as(values + i, load(values + i) * shrink[r]);
        out.largest[r] = now[r];
    }
}

// The address of the values of a key, or of its pair.
template <class Element>
inline const uint8_t* values_of(const Chunk& chunk, int padded_dim, int key) {
    const int row = key % kBlockTokens / Element::kPair * Element::kPair;
    return chunk.values[key / kBlockTokens] + row * padded_dim * Element::kBytes;
}

// Adds the values of keys begin .. end - 1, which all rows see, kVectors vectors of columns from `col` on.
template <class Element, int kRows, int kVectors>
inline void add_columns(const Chunk& chunk, int padded_dim, int begin, int end, int col, Sums& out) {
    F32 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load(&out.values[r][col + v * kWidth]);
    for (int key = begin; key < end; key += Element::kPair) {
        const uint8_t* row = values_of<Element>(chunk, padded_dim, key);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            F32 values[Element::kPair];
            Element::load(row + (col + v * kWidth) * Element::kPair * Element::kBytes, values);
#pragma GCC unroll 16
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

// With few rows there are registers for more vectors, which hide the latency of additions.
constexpr int at_once(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }

template <class Element, int kRows>
inline void add_common(const Chunk& chunk, int padded_dim, int begin, int end, Sums& out) {
    constexpr int kVectors = at_once(kRows);
    if (begin >= end) return;
    int col = 0;
    for (; col + kVectors * kWidth <= padded_dim; col += kVectors * kWidth)
        add_columns<Element, kRows, kVectors>(chunk, padded_dim, begin, end, col, out);
    for (; col < padded_dim; col += kWidth) add_columns<Element, kRows, 1>(chunk, padded_dim, begin, end, col, out);
}

template <class Element, int kRows>
inline void score_chunk(const Tile& tile, int dims, Chunk& chunk) {
#if defined(__AMX_BF16__)
    if (tile.q16 != nullptr) return score_by_tiles(tile.q16, kRows, dims, tile.score_factor, chunk);
#elif defined(__AVX512BF16__)
    if (tile.q16 != nullptr) return score_by_dots<kRows>(tile, dims, chunk);
#endif
    constexpr int kBlocks = at_once(kRows);
    int b = 0;
    for (; b + kBlocks <= chunk.blocks; b += kBlocks) score_blocks<Element, kRows, kBlocks>(tile, chunk, dims, b);
    for (; b < chunk.blocks; ++b) score_blocks<Element, kRows, 1>(tile, chunk, dims, b);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// Adds the values of a chunk. Every row adds the same keys in pairs and the same keys alone whatever the others see: pairs
// from the first even key on, and a key alone at an odd beginning or end.
template <class Element, int kRows>
inline void add_in_pairs(const Chunk& chunk, int padded_dim, Sums& out) {
    const SplitWeights weights(chunk, kRows, chunk.first[0], chunk.last[kRows - 1]);
    const auto pairs_of = [&](int r, int begin, int end) {
        begin = max(begin, static_cast<int>(round_up(chunk.first[r], Element::kPair)));
        end = min(end, chunk.last[r] / Element::kPair * Element::kPair);
        if (begin < end) add_rows_by_dots<1>(chunk, weights, r, padded_dim, begin, end, out);
    };
    for (int r = 0; r < kRows; ++r) {
        const int even = static_cast<int>(round_up(chunk.first[r], Element::kPair));
        add_own<Element>(chunk, padded_dim, r, chunk.first[r], min(even, chunk.last[r]), out);
        pairs_of(r, even, chunk.common_begin);
    }
    add_by_dots<kRows>(chunk, weights, padded_dim, chunk.common_begin, chunk.common_end, out);
    for (int r = 0; r < kRows; ++r) {
        const int even = static_cast<int>(round_up(chunk.first[r], Element::kPair));
        pairs_of(r, chunk.common_end, kChunkKeys);
        add_own<Element>(chunk, padded_dim, r, max(even, chunk.last[r] / Element::kPair * Element::kPair), chunk.last[r],
                         out);
    }
}

#endif

template <class Element, int kRows>
inline void attend_chunk(const Tile& tile, const LayerCache& cache, Chunk& chunk, Sums& out) {
    const int padded = cache.padded_dim;
    score_chunk<Element, kRows>(tile, cache.head_dim, chunk);
    if (tile.score_cap > 0.0f) cap_scores(chunk, kRows, tile.score_cap);
    hide(chunk, kRows);
    weigh(chunk, kRows, padded, out);
#if defined(__AMX_BF16__)
    int begin = chunk.common_begin;
    const int first = static_cast<int>(ceil_div(begin, kBlockTokens)), last = chunk.common_end / kBlockTokens;
    if (tile.q16 != nullptr && first < last) {
        add_by_tiles(chunk, kRows, padded, first, last, out);
        add_common<Element, kRows>(chunk, padded, begin, first * kBlockTokens, out);
        begin = last * kBlockTokens;
    }
    add_common<Element, kRows>(chunk, padded, begin, chunk.common_end, out);
    for (int r = 0; r < kRows; ++r) {
        add_own<Element>(chunk, padded, r, chunk.first[r], min(chunk.common_begin, chunk.last[r]), out);
        add_own<Element>(chunk, padded, r, max(chunk.common_end, chunk.first[r]), chunk.last[r], out);
    }
#else
#if defined(__AVX512BF16__)
    if (tile.q16 != nullptr) return add_in_pairs<Element, kRows>(chunk, padded, out);
#endif
    for (int r = 0; r < kRows; ++r)
        add_own<Element>(chunk, padded, r, chunk.first[r], min(chunk.common_begin, chunk.last[r]), out);
    add_common<Element, kRows>(chunk, padded, chunk.common_begin, chunk.common_end, out);
    for (int r = 0; r < kRows; ++r)
        add_own<Element>(chunk, padded, r, max(chunk.common_end, chunk.first[r]), chunk.last[r], out);
#endif
}

// Sets the keys that the rows of a tile see in the chunk that begins at block `block`.
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
    const int64_t value_bytes = int64_t{kBlockTokens} * cache.padded_dim * Element::kBytes;
    const auto head = [&](int64_t block) { return cache.head(tile.blocks[min(block, end - 1)], tile.head); };
    for (int64_t block = begin; block < min(begin + kAheadBlocks, end); ++block)
        for (int64_t i = 0; i < cache.values_at; i += kVectorBytes) __builtin_prefetch(head(block) + i);
    const int most = cache.latent ? kLatentBlocks : kChunkBlocks;
    // Chunks end at multiples of `most`, wherever the first begins: the sums of a row have the same order in every tile.
    for (int64_t block = begin; block < end; block += chunk.blocks) {
        chunk.blocks = static_cast<int>(min<int64_t>(most - block % most, end - block));
        for (int b = 0; b < chunk.blocks + kAheadBlocks; ++b) chunk.heads[b] = head(block + b);
        for (int b = 0; b < chunk.blocks; ++b) {
            uint8_t* turned = tile.turned + b * value_bytes;
            chunk.values[b] = cache.latent ? turned : chunk.heads[b] + cache.values_at;
            if (cache.latent) values_of_keys<Element::kBytes>(chunk.heads[b], cache.value_dim, cache.padded_dim, turned);
        }
        bound<Element>(tile, block, chunk);
        attend_chunk<Element, kRows>(tile, cache, chunk, out);
    }
}

#if defined(__AVX512BF16__)

#if defined(__AMX_BF16__)
constexpr int kFewestRows = 4;  // with fewer rows, reading the cache takes longer than multiplying
constexpr int kDimsTogether = kHalfCols;
#else
constexpr int kFewestRows = 1;
constexpr int kDimsTogether = 2;
#endif

// Whether bf16 can be multiplied; `dtype` is the dtype of the queries.
inline bool fits_bf16(const Tile& tile, const LayerCache& cache, int32_t dtype) {
    return tile.rows >= kFewestRows && cache.element == MINIFLOAT_CACHE_BF16 && dtype == MINIFLOAT_BF16 &&
           cache.head_dim % kDimsTogether == 0;
}

inline void attend_in_bf16(const Tile& tile, const LayerCache& cache, int64_t begin, int64_t end, Sums& out) {
    alignas(64) uint16_t q16[kQueryRows * MINIFLOAT_MAX_HEAD_DIM];
#if defined(__AMX_BF16__)
    const int stride = cache.head_dim;
    const Tiles tiles(attention_tiles(tile.rows));
#else
    constexpr int stride = MINIFLOAT_MAX_HEAD_DIM;
#endif
    for (int r = 0; r < tile.rows; ++r)
        from_float(tile.q[r], MINIFLOAT_BF16, cache.head_dim, reinterpret_cast<uint8_t*>(q16 + r * stride));
    Tile exact = tile;
    exact.q16 = q16;
    attend_rows<CacheBf16, kQueryRows>(exact, cache, begin, end, out);
}

#endif

inline void attend(const Tile& tile, const LayerCache& cache, int32_t dtype, int64_t begin, int64_t end, Sums& out) {
#if defined(__AVX512BF16__)
    if (fits_bf16(tile, cache, dtype)) return attend_in_bf16(tile, cache, begin, end, out);
#else
    (void)dtype;
#endif
    if (cache.element == MINIFLOAT_CACHE_F32) attend_rows<CacheF32, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_BF16) attend_rows<CacheBf16, kQueryRows>(tile, cache, begin, end, out);
    if (cache.element == MINIFLOAT_CACHE_E4M3) attend_rows<CacheE4M3, kQueryRows>(tile, cache, begin, end, out);
}

}  // namespace MINIFLOAT_ISA
