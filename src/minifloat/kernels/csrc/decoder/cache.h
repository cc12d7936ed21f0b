// Blocks of a cache of keys and values: where an element lies (kernels/decoder/cache.py describes it), reading vectors
// of them as float32, writing a token.
#pragma once

#include "../vec.h"
#include "../linear/decode.h"

namespace MINIFLOAT_ISA {

constexpr int kBlockTokens = MINIFLOAT_BLOCK_TOKENS;
static_assert(kBlockTokens == kLanes, "the keys of a block are whole vectors");

// An element format of a cache. load() reads kWidth groups of kPair elements: the first element of each group, then the
// second, divided by kFactor.
struct CacheF32 {
    static constexpr int kBytes = 4, kPair = 1;
    static constexpr float kFactor = 1.0f;
    static void load(const uint8_t* p, F32 (&v)[kPair]) { v[0] = load_as<F32>(p); }
};

struct CacheBf16 {
    static constexpr int kBytes = 2, kPair = 2;
    static constexpr float kFactor = 1.0f;
    static void load(const uint8_t* p, F32 (&v)[kPair]) { Bf16Part::unpack(p, v); }
};

struct CacheE4M3 {
    static constexpr int kBytes = 1, kPair = 1;
#if defined(__AVX512F__)
    static constexpr float kFactor = 0x1p8f;
    static void load(const uint8_t* p, F32 (&v)[kPair]) {
        const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(p)), 7);
        const __m256i nan = _mm256_set1_epi16(kNanBits);
        const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(wide, nan), nan);
        const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(kKeptBits));
        v[0] = _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(kHalfNan)));
    }
#elif defined(__F16C__)
    static constexpr float kFactor = 0x1p8f;
    static void load(const uint8_t* p, F32 (&v)[kPair]) {
        const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        const __m128i wide = _mm_slli_epi16(codes, 7), nan = _mm_set1_epi16(kNanBits);
        const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(wide, nan), nan);
        const __m128i half = _mm_and_si128(wide, _mm_set1_epi16(kKeptBits));
        v[0] = _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(kHalfNan))));
    }
#else
    static constexpr float kFactor = 1.0f;
    static void load(const uint8_t* p, F32 (&v)[kPair]) {
        const U32 codes = widen(p);
        const U32 is_nan = bit_cast<U32>((codes & 0x7fu) == 0x7fu);
        v[0] = bit_cast<F32>(bit_cast<U32>(decode_e4m3(codes)) | (is_nan & 0x7fc00000u));
    }
#endif
  private:
    // An E4M3 code in the upper bits of a half is its value with another exponent bias, except NaN.
    static constexpr int16_t kNanBits = 0x7f << 7, kHalfNan = 0x7e00;
    static constexpr int16_t kKeptBits = static_cast<int16_t>(0xbf80);
};

// The cache of one layer.
struct LayerCache {
    uint8_t* data;
    int64_t block_bytes, head_bytes, values_at;  // of all heads; of one; from its keys to its values
    int32_t element;
    int32_t head_dim;                // of keys
    int32_t value_dim, padded_dim;   // of values; rounded up to whole vectors
    bool latent;                     // values are the first dimensions of keys, and not stored again

    uint8_t* head(int32_t block, int64_t head) const { return data + block * block_bytes + head * head_bytes; }
};

inline int element_bytes(int32_t element) {
    return element == MINIFLOAT_CACHE_F32 ? 4 : element == MINIFLOAT_CACHE_BF16 ? 2 : 1;
}
inline float element_factor(int32_t element) { return element == MINIFLOAT_CACHE_E4M3 ? CacheE4M3::kFactor : 1.0f; }

inline LayerCache layer_cache(const minifloat_step_args& a, const minifloat_attention& attention) {
    const int bytes = element_bytes(a.cache_element);
    const bool latent = attention.latent != nullptr;
    const int32_t dims = latent ? attention.latent->rank : attention.head_dim;
    const int32_t padded = static_cast<int32_t>(round_up(dims, kLanes));
    LayerCache c = {};
    c.element = a.cache_element;
    c.head_dim = attention.head_dim;
    c.value_dim = dims;
    c.padded_dim = padded;
    c.latent = latent;
    c.values_at = static_cast<int64_t>(kBlockTokens) * attention.head_dim * bytes;
    c.head_bytes = c.values_at + (latent ? 0 : static_cast<int64_t>(kBlockTokens) * padded * bytes);
    c.block_bytes = c.head_bytes * attention.kv_heads;
    c.data = a.cache + attention.cache_before * bytes * a.cache_blocks;
    return c;
}

// Writes keys and values [head_dim] of one token and head at `row` of a block; `values` is null where the cache is
// latent. The scales are those of E4M3.
void write_token(const LayerCache& cache, uint8_t* block, int row, const float* keys, const float* values,
                 float key_scale, float value_scale);

}  // namespace MINIFLOAT_ISA
