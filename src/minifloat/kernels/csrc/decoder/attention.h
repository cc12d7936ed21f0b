// Attention of all sequences of a step in one layer, and the norms, rotation and cache writes before it.
#pragma once

#include "cache.h"

namespace MINIFLOAT_ISA {

// Heads of q and of its gates in a row of the product of q, k and v.
inline int64_t heads_of_queries(const minifloat_attention& attention) {
    return int64_t{attention.heads} * (attention.gated ? 2 : 1);
}
// All heads in such a row, where it has heads (latent.h).
inline int64_t heads_of_product(const minifloat_attention& attention) {
    const int64_t others = attention.values == MINIFLOAT_VALUES_OWN ? 2 : attention.values == MINIFLOAT_VALUES_KEYS;
    return heads_of_queries(attention) + others * attention.kv_heads;
}

// From the rows of the product of q, k and v (of the decoder's dtype): queries, normed, rotated and rounded to the dtype,
// as float32 [T, heads, head_dim]; keys, normed and rotated, and values into the cache. `turns`: [T, rotary] of the
// layer's rotary embedding (rows.h); `token_blocks`: the block of every token.
void write_tokens(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                  const uint8_t* qkv, const float* turns, const int32_t* token_blocks, float* q);

// out [T, heads, values of a head] of the decoder's dtype.
int32_t attend_all(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                   const float* q, uint8_t* out);

// Multiplies the results [T, heads, head_dim] by the sigmoids of the gates in the rows of the product.
void gate_results(const minifloat_step_args& a, const minifloat_attention& attention, const uint8_t* qkv, uint8_t* out);

}  // namespace MINIFLOAT_ISA
