// A few rows of x (the decode step of a language model) in float32 multiply-adds, for AVX-512.
#if defined(__AVX512F__)

#include "avx512.h"

namespace MINIFLOAT_ISA {
namespace {

const float kE2M1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Decodes one vector of 16 rows to float32, kCols columns.
struct Bf16Decoder {
    static constexpr int kCols = 2;
    static constexpr bool kTogether = false;
    void decode(const uint8_t* p, __m512 (&out)[kCols]) const {
        const __m512i v = _mm512_load_si512(p);
        out[0] = first_of_pair(v);
        out[1] = second_of_pair(v);
    }
};

struct F16Decoder {
    static constexpr int kCols = 2;
    static constexpr bool kTogether = false;
    void decode(const uint8_t* p, __m512 (&out)[kCols]) const {
        const __m512i v = _mm512_load_si512(p);
        out[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
        out[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
    }
};

struct F32Decoder {
    static constexpr int kCols = 1;
    static constexpr bool kTogether = false;
    void decode(const uint8_t* p, __m512 (&out)[kCols]) const { out[0] = _mm512_load_ps(p); }
};

#if defined(__AVX512VBMI__)

constexpr ByteTables kE4m3Tables = byte_tables(e4m3_to_bf16);

// Four columns of 16 rows.
inline void split(const E4m3Pairs& pairs, __m512 (&out)[4]) {
    out[0] = first_of_pair(pairs.first);
    out[1] = second_of_pair(pairs.first);
    out[2] = first_of_pair(pairs.second);
    out[3] = second_of_pair(pairs.second);
}

struct E4m3Decoder {
    static constexpr int kCols = 4;
    static constexpr bool kTogether = false;
    static constexpr float kFactor = 1.0f;
    E4m3Lookup lookup = E4m3Lookup(kE4m3Tables);

    void decode(const uint8_t* p, __m512 (&out)[kCols]) const { split(lookup(_mm512_load_si512(p)).pairs(), out); }
};

#if defined(__GFNI__)

// For weights that are mostly_normal().
struct E4m3NormalDecoder {
    static constexpr int kCols = 4;
    static constexpr bool kTogether = true;

    void decode(const uint8_t* p, const uint8_t* q, __m512 (&out)[2][kCols]) const {
        const __m512i a = _mm512_load_si512(p), b = _mm512_load_si512(q);
        E4m3Bytes first, second;
        if (__builtin_expect(all_normal(a, b), 1)) {
            first = E4m3Normal<0>()(a);
            second = E4m3Normal<0>()(b);
        } else {
            const E4m3Lookup lookup(kE4m3Tables);  // not a member, which would take registers
            first = lookup(a);
            second = lookup(b);
        }
        split(first.pairs(), out[0]);
        split(second.pairs(), out[1]);
    }
};

#endif

#else

struct E4m3Decoder {
    static constexpr int kCols = 4;
    static constexpr bool kTogether = false;
    // Words of the pairs k0 k1 of 16 rows, then k2 k3.
    __m512i order = _mm512_set_epi16(31, 30, 29, 28, 23, 22, 21, 20, 15, 14, 13, 12, 7, 6, 5, 4,  //
                                     27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);

    void decode(const uint8_t* p, __m512 (&out)[kCols]) const {
        const __m512i keep = _mm512_set1_epi16(kHalfBitsOfE4M3);
        const __m512i v = _mm512_permutexvar_epi16(order, _mm512_load_si512(p));
        const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(v, 1), keep);
        const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 1), keep);
        out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
        out[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
        out[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
        out[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    }
    static constexpr float kFactor = kHalfRebias;
};

#endif

struct E2m1Decoder {
    static constexpr int kCols = 8;
    static constexpr bool kTogether = false;
    __m512 values = _mm512_loadu_ps(kE2M1Values);

    void decode(const uint8_t* p, __m512 (&out)[kCols]) const {
        const __m512i v = _mm512_load_si512(p);
        // The look-up reads the low four bits of each word and ignores the others.
        for (int i = 0; i < kCols; ++i)
            out[i % 4 * 2 + i / 4] = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * i), values);
    }
};

// A vector of each tile.
template <class Decoder, int kCols>
inline __attribute__((always_inline)) void decode_two(const Decoder& decoder, const uint8_t* p, const uint8_t* q,
                                                      __m512 (&out)[2][kCols]) {
    if constexpr (Decoder::kTogether) {
        decoder.decode(p, q, out);
    } else {
        decoder.decode(p, out[0]);
        decoder.decode(q, out[1]);
    }
}

// Sums of 32 rows of W and kRows rows of x, of even and of odd columns, for the latency of the multiply-add. The order
// of summation does not depend on kRows: a row of x has the same result alone as among others.
template <int kRows>
struct Sums {
    static constexpr int kChains = 2;
    __m512 v[kRows][2][kChains];

    void clear() {
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < 2; ++t)
                for (int c = 0; c < kChains; ++c) v[r][t][c] = _mm512_setzero_ps();
    }
    __m512 total(int r, int t) const { return _mm512_add_ps(v[r][t][0], v[r][t][1]); }
};

// Adds kVectors vectors of both tiles, which are kTileBytes apart, times their columns of x.
template <int kVectors, int kRows, class Decoder>
inline __attribute__((always_inline)) void add_vectors(const Decoder& decoder, const uint8_t* data, const float* x,
                                                       int64_t x_stride, Sums<kRows>& sums) {
    constexpr int kCols = Decoder::kCols;
    constexpr int64_t kTileBytes = kHalfCols / kCols * kVectorBytes;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
        __m512 w[2][kCols];
        // In the order of memory, as the hardware prefetcher expects.
        for (int t = 0; t < 2; ++t) prefetch_ahead(data + (2 * i + t) * kVectorBytes);
        decode_two(decoder, data + i * kVectorBytes, data + kTileBytes + i * kVectorBytes, w);
        for (int r = 0; r < kRows; ++r)
            for (int k = 0; k < kCols; ++k) {
                const __m512 xs = _mm512_set1_ps(x[r * x_stride + i * kCols + k]);
                for (int t = 0; t < 2; ++t) {
                    __m512& sum = sums.v[r][t][(i * kCols + k) % Sums<kRows>::kChains];
                    sum = _mm512_fmadd_ps(w[t][k], xs, sum);
                }
            }
    }
}

// Multiplies a panel without inline scales: one group of columns, or blocks of columns with a scale each. Not inlined:
// next to the loops of other formats the compiler spills registers of the inner loop, which costs a third.
template <int kRows, class Decoder>
__attribute__((noinline)) void multiply_blocks(const Weight& w, int64_t p, const float* x, int64_t x_stride,
                                               __m512 (&out)[kRows][2]) {
    constexpr int kVectors = kHalfCols / Decoder::kCols;
    constexpr int64_t kHalfBytes = 2 * kVectors * kVectorBytes;
    const Decoder decoder;
    const uint8_t* data = w.panel(p);
    const uint8_t* end = data + w.panel_bytes;
    const bool scaled = w.grid == MINIFLOAT_GRID_BLOCK;
    const int64_t group_bytes = w.groups == 1 ? w.panel_bytes : w.block_cols / kHalfCols * kHalfBytes;
    Sums<kRows> sums;
    for (int64_t g = 0; g < w.groups; ++g) {
        sums.clear();
        // The last group takes the columns of padding too.
        const uint8_t* group_end = g + 1 == w.groups ? end : data + group_bytes;
        for (; data < group_end; data += kHalfBytes, x += kHalfCols)
            add_vectors<kVectors>(decoder, data, x, x_stride, sums);
        const float* scales = scaled ? w.block_scale(p, g) : nullptr;
        for (int t = 0; t < 2; ++t) {
            __m512 scale = _mm512_set1_ps(1.0f);
            if (scaled)
                scale = w.block_lanes == 1 ? _mm512_set1_ps(*scales) : _mm512_loadu_ps(scales + t * kTileRows);
            for (int r = 0; r < kRows; ++r) out[r][t] = _mm512_fmadd_ps(sums.total(r, t), scale, out[r][t]);
        }
    }
}

// Multiplies a panel with scales at the start of each step: kVectors vectors of each tile share a scale.
template <int kRows, int kVectors, class Decoder>
__attribute__((noinline)) void multiply_inline(const Weight& w, int64_t p, const float* x, int64_t x_stride,
                                               __m512 (&out)[kRows][2]) {
    constexpr int kGroups = kStepCols / (kVectors * Decoder::kCols);
    constexpr int kGroupsOfHalf = kGroups / 2;
    constexpr int64_t kHalfBytes = 2 * (kHalfCols / Decoder::kCols) * kVectorBytes;
    const Decoder decoder;
    const uint8_t* step = w.panel(p);
    Sums<kRows> sums;
    for (int64_t s = 0; s < w.steps; ++s, step += w.step_bytes) {
        for (int i = 0; i < w.scale_bytes; i += kVectorBytes) prefetch_ahead(step + i);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g, x += kVectors * Decoder::kCols) {
            const uint8_t* data = step + w.scale_bytes + g / kGroupsOfHalf * kHalfBytes +
                                  g % kGroupsOfHalf * kVectors * kVectorBytes;
            sums.clear();
            add_vectors<kVectors>(decoder, data, x, x_stride, sums);
            for (int t = 0; t < 2; ++t) {
                const uint8_t* codes = step + g * kPanelRows + t * kTileRows;
                const __m512 scale = kGroups == 2 ? e8m0_scales(codes) : e4m3_scales(codes);
                for (int r = 0; r < kRows; ++r) out[r][t] = _mm512_fmadd_ps(sums.total(r, t), scale, out[r][t]);
            }
        }
    }
}

template <int kRows>
void multiply_panel(const Weight& w, int64_t p, const float* x, int64_t x_stride, __m512 (&out)[kRows][2]) {
    if (w.element == MINIFLOAT_WEIGHT_BF16) return multiply_blocks<kRows, Bf16Decoder>(w, p, x, x_stride, out);
    if (w.element == MINIFLOAT_WEIGHT_F16) return multiply_blocks<kRows, F16Decoder>(w, p, x, x_stride, out);
    if (w.element == MINIFLOAT_WEIGHT_F32) return multiply_blocks<kRows, F32Decoder>(w, p, x, x_stride, out);
    if (w.element == MINIFLOAT_E2M1) {
        if (w.grid == MINIFLOAT_GRID_E4M3) return multiply_inline<kRows, 2, E2m1Decoder>(w, p, x, x_stride, out);
        return multiply_inline<kRows, 4, E2m1Decoder>(w, p, x, x_stride, out);
    }
#if defined(__GFNI__)
    if (mostly_normal(w.panel(p) + w.scale_bytes)) {
        if (w.grid == MINIFLOAT_GRID_E8M0)
            return multiply_inline<kRows, 8, E4m3NormalDecoder>(w, p, x, x_stride, out);
        return multiply_blocks<kRows, E4m3NormalDecoder>(w, p, x, x_stride, out);
    }
#endif
    if (w.grid == MINIFLOAT_GRID_E8M0) return multiply_inline<kRows, 8, E4m3Decoder>(w, p, x, x_stride, out);
    return multiply_blocks<kRows, E4m3Decoder>(w, p, x, x_stride, out);
}

float factor_of(const Weight& w) {
    float factor = w.element == MINIFLOAT_E4M3 ? E4m3Decoder::kFactor : 1.0f;
    if (w.grid == MINIFLOAT_GRID_E4M3) factor *= kHalfRebias;
    return factor;
}

template <int kRows>
void multiply_rows(const Weight& w, const float* x, int64_t row, const Output& y, int64_t p) {
    const int64_t x_stride = w.steps * kStepCols;
    __m512 out[kRows][2];
    for (int r = 0; r < kRows; ++r) out[r][0] = out[r][1] = _mm512_setzero_ps();
    multiply_panel<kRows>(w, p, x + row * x_stride, x_stride, out);
    store_sums(w, y, p, row, out, factor_of(w));
}

bool multiply(const Weight& w, const Input& in, const uint8_t* prepared, const Output& y, int64_t first,
              int64_t last) {
    const float* x = reinterpret_cast<const float*>(prepared);
    // All rows for one panel before the next panel: row groups after the first find the weights in the cache.
    for (int64_t p = first; p < last; ++p)
        for_row_groups(in.m, [&](auto rows, int64_t row) { multiply_rows<decltype(rows)::kValue>(w, x, row, y, p); });
    return true;
}

}  // namespace

extern const Path kGemvPath = {"gemv", float_rows_bytes, to_float_rows, multiply};

}  // namespace MINIFLOAT_ISA

#endif
