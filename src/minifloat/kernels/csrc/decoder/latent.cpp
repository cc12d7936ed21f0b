// Latent attention: norms, rotation and cache writes, and the order of heads and tokens between products.
#include "parts.h"

#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

// Norms a row in place, if there is a norm.
void norm_row(const minifloat_norm& norm, float* x, int64_t count) {
    if (norm.weight == nullptr) return;
    norm_part(x, norm, moments(norm, reinterpret_cast<const uint8_t*>(x), MINIFLOAT_F32, count), 0, count);
}

void scale_by(float* x, const float* factors, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] *= factors[i];
}

}  // namespace

void norm_low_queries(const minifloat_step_args& a, const minifloat_latent& latent, const uint8_t* rows, int64_t width,
                      uint8_t* out) {
    const int32_t dtype = a.decoder->dtype;
    const int64_t size = dtype_bytes(dtype);
    share(a.threads, a.token_count, 2 * latent.q_rank, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const uint8_t* row = rows + t * width * size;
            uint8_t* to = out + t * latent.q_rank * size;
            if (latent.q_norm.weight == nullptr) {
                __builtin_memcpy(to, row, latent.q_rank * size);
                continue;
            }
            const Moments known = moments(latent.q_norm, row, dtype, latent.q_rank);
            // In parts that fit on the stack.
            for (int64_t i = 0; i < latent.q_rank; i += MINIFLOAT_MAX_HEAD_DIM) {
                alignas(64) float part[MINIFLOAT_MAX_HEAD_DIM];
                const int64_t count = min<int64_t>(MINIFLOAT_MAX_HEAD_DIM, latent.q_rank - i);
                to_float(row + i * size, dtype, count, part);
                norm_part(part, latent.q_norm, known, i, count);
                from_float(part, dtype, count, to + i * size);
            }
        }
    });
}

void write_latents(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                   const uint8_t* keys, int64_t stride, const uint8_t* queries, int64_t query_stride, const float* turns,
                   const int32_t* token_blocks, uint8_t* plain, float* q) {
    const minifloat_decoder& d = *a.decoder;
    const minifloat_latent& latent = *attention.latent;
    const int64_t size = dtype_bytes(d.dtype), rotated = attention.head_dim - latent.rank, width = latent.plain + rotated;
    const minifloat_rotary* rotary = attention.rotary < 0 ? nullptr : d.rotaries + attention.rotary;
    share(a.threads, a.token_count, (attention.heads + 4) * width * 4, [&](int64_t begin, int64_t end) {
        alignas(64) float row[MINIFLOAT_MAX_HEAD_DIM];
        alignas(64) uint8_t rounded[MINIFLOAT_MAX_HEAD_DIM * 4];
        for (int64_t t = begin; t < end; ++t) {
            const float* turn = rotary == nullptr ? nullptr : turns + t * rotary->rotary;
            to_float(keys + t * stride * size, d.dtype, attention.head_dim, row);
            norm_row(latent.kv_norm, row, latent.rank);
            if (rotary != nullptr) rotate(row + latent.rank, turn, *rotary);
            write_token(cache, cache.head(token_blocks[t], 0), a.positions[t] % kBlockTokens, row, nullptr,
                        attention.k_scale, attention.k_scale);
            const uint8_t* query = queries + t * query_stride * size;
            for (int64_t h = 0; h < attention.heads; ++h, query += width * size) {
                uint8_t* to = plain + (h * a.token_count + t) * latent.plain * size;
                if (latent.key_factors == nullptr) {
                    __builtin_memcpy(to, query, latent.plain * size);
                } else {
                    to_float(query, d.dtype, latent.plain, row);
                    scale_by(row, latent.key_factors + h * latent.plain, latent.plain);
                    from_float(row, d.dtype, latent.plain, to);
                }
                float* turned = q + (t * attention.heads + h) * attention.head_dim + latent.rank;
                to_float(query + latent.plain * size, d.dtype, rotated, row);
                if (rotary != nullptr) rotate(row, turn, *rotary);
                from_float(row, d.dtype, rotated, rounded);
                to_float(rounded, d.dtype, rotated, turned);
            }
        }
    });
}

void add_products(const minifloat_step_args& a, const minifloat_attention& attention, const uint8_t* products, float* q) {
    const int32_t dtype = a.decoder->dtype;
    const int64_t rank = attention.latent->rank, row_bytes = rank * dtype_bytes(dtype);
    share(a.threads, a.token_count, attention.heads * rank, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t h = 0; h < attention.heads; ++h)
                to_float(products + (h * a.token_count + t) * row_bytes, dtype, rank,
                         q + (t * attention.heads + h) * attention.head_dim);
    });
}

void gather_heads(const minifloat_step_args& a, const uint8_t* in, int64_t heads, int64_t rows, int64_t count,
                  uint8_t* out) {
    const int64_t bytes = count * dtype_bytes(a.decoder->dtype);
    share(a.threads, rows, heads * count, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t h = 0; h < heads; ++h)
                __builtin_memcpy(out + (t * heads + h) * bytes, in + (h * rows + t) * bytes, bytes);
    });
}

}  // namespace MINIFLOAT_ISA
