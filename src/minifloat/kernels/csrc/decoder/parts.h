// The parts of a step, each over all tokens of a batch: what step.cpp calls.
#pragma once

#include "../../native/api.h"
#include "cache.h"

namespace MINIFLOAT_ISA {

// Attention of all sequences in one layer, and the norms, rotation and cache writes before it.

// Heads of q and of its gates in a row of the product of q, k and v.
inline int64_t heads_of_queries(const minifloat_attention& attention) {
    return int64_t{attention.heads} * (attention.gated ? 2 : 1);
}
// All heads in such a row, where it has heads.
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

// The gated delta rule, and the convolution and norms around it; kernels/decoder/attention.py defines it.

// Channels of the convolution: q, k and v of all heads.
inline int64_t delta_channels(const minifloat_delta& d) {
    return 2 * static_cast<int64_t>(d.k_heads) * d.k_dim + static_cast<int64_t>(d.v_heads) * d.v_dim;
}
// Elements in a row of the result, in a row of the product of q, k, v and z, and in one of b and a.
inline int64_t delta_results(const minifloat_delta& d) { return static_cast<int64_t>(d.v_heads) * d.v_dim; }
inline int64_t delta_inputs(const minifloat_delta& d) { return delta_channels(d) + delta_results(d); }
inline int64_t delta_gates(const minifloat_delta& d) { return 2 * static_cast<int64_t>(d.v_heads); }

// From the rows of both products (of the decoder's dtype): out [T, v_heads * v_dim] of the same dtype.
int32_t delta_all(const minifloat_step_args& a, const minifloat_delta& delta, const uint8_t* qkvz, const uint8_t* ba,
                  uint8_t* out);

// Routing: the experts of each token, and the order in which rows are multiplied.

// Tokens sorted by expert. Sorted row i is token rows[i]; place[t * top_k + j] is the sorted row of token t with its
// j-th expert.
struct Routing {
    float* scores;     // [T, 2, experts rounded up to kLanes]: scores, and what is compared for the choice
    float* weights;    // [T, top_k]
    int32_t* chosen;   // [T, top_k]
    int64_t* offsets;  // [experts + 1]
    int64_t* rows;     // [T * top_k]
    int64_t* place;    // [T * top_k]
};

// Chooses the experts with the largest scores, ties to the lower number. x: [T, hidden] of `dtype`.
int32_t choose_experts(const minifloat_router& router, const uint8_t* x, int32_t dtype, int64_t hidden, int64_t count,
                       int threads, Routing& routing);

// x += factor times the weighted sum of the results y [T * top_k, hidden], of `dtype`, of each token's experts.
void add_experts(const minifloat_router& router, const Routing& routing, const uint8_t* y, int32_t dtype,
                 int64_t hidden, int64_t count, int threads, float factor, float* x);

// x += factor * sigmoid(gate * input) * y if there is a gate; else x += factor * y. All [T, hidden].
void add_shared(const float* gate, const uint8_t* input, const uint8_t* y, int32_t dtype, int64_t hidden,
                int64_t count, int threads, float factor, float* x);

// Latent attention before and after attention itself (kernels/decoder/attention.py).

// Elements of a query before `keys` multiplies it.
inline int64_t query_width(const minifloat_attention& attention) {
    return attention.latent->plain + attention.head_dim - attention.latent->rank;
}

// Elements of the product's rows before [latent | rotated].
inline int64_t low_width(const minifloat_attention& attention) {
    const int64_t rank = attention.latent->q_rank;
    return rank > 0 ? rank : attention.heads * query_width(attention);
}

// out [T, q_rank] = the normed queries of the product's rows, which are `width` elements apart.
void norm_low_queries(const minifloat_step_args& a, const minifloat_latent& latent, const uint8_t* rows, int64_t width,
                      uint8_t* out);

// Writes keys into the cache: of rows [latent | rotated], `stride` elements apart, the latent normed, the rest turned.
// Divides the queries [heads, plain | rotated], `query_stride` elements apart: the plain parts, times their factors, to
// plain [heads, T, plain]; the rotated parts, turned and rounded to the dtype, to q [T, heads, head_dim].
void write_latents(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                   const uint8_t* keys, int64_t stride, const uint8_t* queries, int64_t query_stride, const float* turns,
                   const int32_t* token_blocks, uint8_t* plain, float* q);

// Completes q by the products [heads, T, rank] of the plain parts with `keys`.
void add_products(const minifloat_step_args& a, const minifloat_attention& attention, const uint8_t* products, float* q);

// out [rows, heads, count] = in [heads, rows, count], of the decoder's dtype.
void gather_heads(const minifloat_step_args& a, const uint8_t* in, int64_t heads, int64_t rows, int64_t count,
                  uint8_t* out);

// What a layer reads of a token besides the residual stream (api.h: minifloat_layer_inputs).

// Writes the inputs of layer `index` into the second halves of rows [gate | input] of 2 * size elements of the decoder's
// dtype. Row t is token rows[t]; if `rows` is null, token t. `projected`: [T, layers * size] of the dtype.
void write_layer_inputs(const minifloat_step_args& a, int64_t index, const int32_t* rows, const uint8_t* projected,
                        uint8_t* out, int64_t begin, int64_t end);

// Products of this instruction set (linear/linear.cpp), which a step calls without going through the C interface.

int32_t linear(const minifloat_linear_args& args);
int32_t moe(const minifloat_moe_args& args);

}  // namespace MINIFLOAT_ISA
