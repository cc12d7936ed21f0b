// Latent attention before and after attention itself (kernels/decoder/attention.py): one key of all heads for each
// token, and queries that the matrices of keys have been multiplied into.
#pragma once

#include "cache.h"

namespace MINIFLOAT_ISA {

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

}  // namespace MINIFLOAT_ISA
