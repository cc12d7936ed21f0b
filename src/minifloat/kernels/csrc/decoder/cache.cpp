// Writing a token into a block: its elements are encoded as vectors, then scattered.
#include "cache.h"

#include "../quantize/encode.h"
#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr minifloat_format kE4M3 = {8, 3, -6, 448.0f};
constexpr int32_t kE4M3Nan = 0x7f;

// `count` floats, up to MINIFLOAT_MAX_HEAD_DIM, to codes of x / scale: nearest, ties to even, clamped; NaN stays NaN.
void encode_e4m3(const float* x, int count, float scale, uint8_t* codes) {
    const Format format(kE4M3);
    for (int i = 0; i < count; i += kWidth) {
        float lanes[kWidth] = {};
        __builtin_memcpy(lanes, x + i, min(kWidth, count - i) * sizeof(float));
        const I32 bits = bit_cast<I32>(load(lanes) / scale);
        const I32 magnitude = bits & kMagnitude;
        const I32 rounded = round_magnitude<F32, I32>(min(magnitude, broadcast(format.max_value)), format).code;
        const I32 nan = magnitude > kInfinity;
        int32_t coded[kWidth];
        store(coded, (rounded & ~nan) | (nan & kE4M3Nan) | (bits >> format.sign_shift & format.sign));
        for (int j = 0; j < min(kWidth, count - i); ++j) codes[i + j] = static_cast<uint8_t>(coded[j]);
    }
}

void encode(const LayerCache& cache, const float* x, float scale, uint8_t* codes) {
    if (cache.element == MINIFLOAT_CACHE_E4M3) return encode_e4m3(x, cache.head_dim, scale, codes);
    from_float(x, cache.element == MINIFLOAT_CACHE_BF16 ? MINIFLOAT_BF16 : MINIFLOAT_F32, cache.head_dim, codes);
}

template <class Code, int kPair>
void scatter(const LayerCache& cache, uint8_t* block, int row, const uint8_t* keys, const uint8_t* values) {
    const Code* key_codes = reinterpret_cast<const Code*>(keys);
    const Code* value_codes = reinterpret_cast<const Code*>(values);
    Code* to_keys = reinterpret_cast<Code*>(block) + row * kPair;
    for (int i = 0; i < cache.head_dim; i += kPair)
        for (int c = 0; c < kPair; ++c) to_keys[i * kBlockTokens + c] = key_codes[i + c];
    if (cache.latent) return;
    Code* to_values = reinterpret_cast<Code*>(block + cache.values_at);
    to_values += row / kPair * kPair * cache.padded_dim + row % kPair;
    for (int i = 0; i < cache.head_dim; ++i) to_values[i * kPair] = value_codes[i];
}

}  // namespace

void write_token(const LayerCache& cache, uint8_t* block, int row, const float* keys, const float* values,
                 float key_scale, float value_scale) {
    alignas(64) uint8_t key_codes[MINIFLOAT_MAX_HEAD_DIM * 4], value_codes[MINIFLOAT_MAX_HEAD_DIM * 4];
    encode(cache, keys, key_scale, key_codes);
    if (!cache.latent) encode(cache, values, value_scale, value_codes);
    if (cache.element == MINIFLOAT_CACHE_F32) scatter<uint32_t, 1>(cache, block, row, key_codes, value_codes);
    if (cache.element == MINIFLOAT_CACHE_BF16) scatter<uint16_t, 2>(cache, block, row, key_codes, value_codes);
    if (cache.element == MINIFLOAT_CACHE_E4M3) scatter<uint8_t, 1>(cache, block, row, key_codes, value_codes);
}

}  // namespace MINIFLOAT_ISA
