// A few rows of x times E2M1 weights in integers, with fewer instructions per weight than in float32, where decoding
// would be slower than the memory. For each group of columns that share a scale, x becomes integers of up to 2^22 times
// one power of two, in three balanced digits of base 256; E2M1 times two is an integer of -12 .. 12. Sums are exact
// integers, scaled and added up in float32; the VNNI product takes weights unsigned, so 12 is added, which the first
// value of the sums cancels. Rows with Inf, NaN or an outlier are computed in float32.
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "avx512.h"
#include "decode.h"
#include "e2m1_bytes.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kPlanes = 3;
constexpr int kDigitBits = 8;
constexpr int kIntegerBits = 22;
constexpr int kSmallestExponent = 23;  // biased; 2^-kIntegerBits times this power is still a normal number
constexpr int kInfiniteExponent = 255;
constexpr int kExactExponents = kIntegerBits - 8;  // below the largest of a group: bf16 values there are exact
constexpr int kMostInexact = 4;                    // of a group: the fourth part of its values, or the eighth
constexpr int kVectorCols = 8;
constexpr int kChunkCols = 16;  // columns prepared at a time: two vectors of every plane
constexpr int kChunkBytes = kChunkCols * kPlanes;
constexpr int kStepBytes = kStepCols / kChunkCols * kChunkBytes;
constexpr int64_t kTileBytes = kHalfCols / kVectorCols * kVectorBytes;

// The byte of a weight, by its 4-bit code; stored four times, because the look-up uses six bits of a byte.
struct CodeTable {
    alignas(64) uint8_t bytes[kVectorBytes];
};
constexpr CodeTable make_code_table() {
    CodeTable table = {};
    for (int i = 0; i < kVectorBytes; ++i) table.bytes[i] = static_cast<uint8_t>(kE2M1Offset + e2m1_twice(i));
    return table;
}
constexpr CodeTable kCodes = make_code_table();

// A prepared row of x: this, the digits of all steps, and the groups.
struct alignas(64) RowHead {
    int32_t usable;
};
struct Group {
    int32_t start;  // initial value of the sums: minus what kE2M1Offset adds
    float scale;    // of the joined sums
};

int group_cols(const Weight& w) { return w.grid == MINIFLOAT_GRID_E4M3 ? kE4M3Cols : kE8M0Cols; }
int64_t groups_at(const Weight& w) { return static_cast<int64_t>(sizeof(RowHead)) + w.steps * kStepBytes; }
int64_t row_bytes(const Weight& w) {
    const int64_t groups = w.steps * kStepCols / group_cols(w) * static_cast<int64_t>(sizeof(Group));
    return round_up(groups_at(w) + groups, kVectorBytes);
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return m * row_bytes(w); }

// Stores the digits of 16 integers in the order of the nibbles of a vector (layout.h): low nibbles, then high nibbles.
void store_digits(__m512i q, uint8_t* out) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    for (int plane = 0; plane < kPlanes; ++plane) {
        const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(q, 32 - kDigitBits), 32 - kDigitBits);
        const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(digit), order);
        _mm_store_si128(reinterpret_cast<__m128i*>(out + plane * kChunkCols), bytes);
        q = _mm512_srai_epi32(_mm512_sub_epi32(q, digit), kDigitBits);
    }
}

// Prepares kChunks times 16 columns that share a scale. Returns false if a value is not finite, or an outlier leaves
// too few bits for others.
template <int kChunks>
bool prepare_group(const float* x, uint8_t* digits, Group* group) {
    __m512 values[kChunks];
    __m512i bits = _mm512_setzero_si512();
    for (int i = 0; i < kChunks; ++i) {
        values[i] = _mm512_loadu_ps(x + i * kChunkCols);
        bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(values[i]), _mm512_set1_epi32(kMagnitude)));
    }
    const int exponent = max(_mm512_reduce_max_epi32(bits) >> kMantissaBits, kSmallestExponent);
    if (exponent == kInfiniteExponent) {  // has no integers, and sums of converted values would overflow
        __builtin_memset(digits, 0, kChunks * kChunkBytes);
        *group = {};
        return false;
    }
    const float to_integers = bit_cast<float>((2 * kBias + kIntegerBits - 1 - exponent) << kMantissaBits);
    const __m512i exact = _mm512_set1_epi32(max(exponent - kExactExponents, 0) << kMantissaBits);
    int inexact = 0;
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < kChunks; ++i) {
        const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(values[i]), _mm512_set1_epi32(kMagnitude));
        inexact += __builtin_popcount(
            _mm512_mask_cmplt_epi32_mask(_mm512_test_epi32_mask(magnitude, magnitude), magnitude, exact));
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], _mm512_set1_ps(to_integers)));
        sum = _mm512_add_epi32(sum, q);
        store_digits(q, digits + i * kChunkBytes);
    }
    group->start = -kE2M1Offset * _mm512_reduce_add_epi32(sum);
    group->scale = bit_cast<float>((exponent - kIntegerBits) << kMantissaBits);  // half a unit: weights are doubled
    return inexact <= kMostInexact;
}

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i) {
        uint8_t* row = prepared + i * row_bytes(w);
        Group* group = reinterpret_cast<Group*>(row + groups_at(w));
        uint8_t* digits = row + sizeof(RowHead);
        bool usable = true;
        for (int64_t k = 0; k < w.cols; k += kStepCols, digits += kStepBytes) {
            float values[kStepCols];
            const int64_t count = min<int64_t>(kStepCols, w.cols - k);
            for (int64_t j = count; j < kStepCols; ++j) values[j] = 0.0f;
            to_float(x.row(i) + k * dtype_bytes(x.dtype), x.dtype, count, values);
            for (int j = 0; j < kStepCols; j += group_cols(w), ++group) {
                uint8_t* out = digits + j / kChunkCols * kChunkBytes;
                usable &= w.grid == MINIFLOAT_GRID_E4M3 ? prepare_group<1>(values + j, out, group)
                                                        : prepare_group<2>(values + j, out, group);
            }
        }
        reinterpret_cast<RowHead*>(row)->usable = usable;
    }
}

__m512i broadcast_dword(const uint8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

// The panel for kRows rows of x; kVectors vectors of each tile share a scale.
template <int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply_panel(const Weight& w, int64_t p, const uint8_t* x,
                                                          int64_t x_stride, __m512 (&out)[kRows][2]) {
    constexpr int kGroups = kStepCols / (kVectors * kVectorCols);
    constexpr int kGroupsOfHalf = kGroups / 2;
    const __m512i codes = _mm512_load_si512(kCodes.bytes);
    const uint8_t* step = w.panel(p);
    const uint8_t* digits = x + sizeof(RowHead);
    const Group* groups = reinterpret_cast<const Group*>(x + groups_at(w));
    for (int64_t s = 0; s < w.steps; ++s, step += w.step_bytes, digits += kStepBytes, groups += kGroups) {
        for (int i = 0; i < w.scale_bytes; i += kVectorBytes) prefetch_ahead(step + i);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
            const int64_t at = g / kGroupsOfHalf * 2 * kTileBytes + g % kGroupsOfHalf * kVectors * kVectorBytes;
            const uint8_t* data = step + w.scale_bytes + at;
            __m512i sums[kRows][2][kPlanes];
            for (int r = 0; r < kRows; ++r)
                for (int t = 0; t < 2; ++t) {
                    const uint8_t* group = reinterpret_cast<const uint8_t*>(groups + g) + r * x_stride;
                    sums[r][t][0] = broadcast_dword(group);
                    for (int plane = 1; plane < kPlanes; ++plane) sums[r][t][plane] = _mm512_setzero_si512();
                }
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                __m512i weights[2][2];
                for (int t = 0; t < 2; ++t) {
                    const uint8_t* line = data + t * kTileBytes + v * kVectorBytes;
                    prefetch_ahead(step + w.scale_bytes + (g * kVectors * 2 + v * 2 + t) * kVectorBytes);
                    const __m512i nibbles = _mm512_load_si512(line);
                    weights[t][0] = _mm512_permutexvar_epi8(nibbles, codes);
                    weights[t][1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(nibbles, 4), codes);
                }
                const int vector = g * kVectors + v;
                const uint8_t* xs = digits + vector / 2 * kChunkBytes + vector % 2 * kVectorCols;
                for (int r = 0; r < kRows; ++r)
                    for (int plane = 0; plane < kPlanes; ++plane)
                        for (int part = 0; part < 2; ++part) {
                            const __m512i q = broadcast_dword(xs + r * x_stride + plane * kChunkCols + part * 4);
                            for (int t = 0; t < 2; ++t)
                                sums[r][t][plane] = _mm512_dpbusd_epi32(sums[r][t][plane], weights[t][part], q);
                        }
            }
            for (int t = 0; t < 2; ++t) {
                const uint8_t* scales = step + g * kPanelRows + t * kTileRows;
                const __m512 scale = kGroups == 2 ? e8m0_scales(scales) : e4m3_scales(scales);
                for (int r = 0; r < kRows; ++r) {
                    const __m512i* planes = sums[r][t];
                    const __m512i upper = _mm512_add_epi32(planes[1], _mm512_slli_epi32(planes[2], kDigitBits));
                    const __m512i sum = _mm512_add_epi32(planes[0], _mm512_slli_epi32(upper, kDigitBits));
                    const Group* group =
                        reinterpret_cast<const Group*>(reinterpret_cast<const uint8_t*>(groups + g) + r * x_stride);
                    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                    out[r][t] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(group->scale), out[r][t]);
                }
            }
        }
    }
}

template <int kRows>
void multiply_rows(const Weight& w, const uint8_t* prepared, int64_t row, const Output& y, int64_t p) {
    const int64_t stride = row_bytes(w);
    const uint8_t* x = prepared + row * stride;
    __m512 out[kRows][2];
    for (int r = 0; r < kRows; ++r) out[r][0] = out[r][1] = _mm512_setzero_ps();
    float factor = 1.0f;
    if (w.grid == MINIFLOAT_GRID_E4M3) {
        multiply_panel<kRows, 2>(w, p, x, stride, out);
        factor = kHalfRebias;
    } else {
        multiply_panel<kRows, 4>(w, p, x, stride, out);
    }
    store_sums(w, y, p, row, out, factor);
}

// Multiplies a row of x that has no integers, in float32, so that Inf and NaN spread as in any product.
void multiply_in_float(const Weight& w, const Input& x, int64_t row, const Output& y, int64_t p) {
    alignas(64) float weights[kStepCols * kPanelRows], sums[kPanelRows] = {};
    for (int64_t s = 0; s < w.steps; ++s) {
        float values[kStepCols];
        const int64_t count = min<int64_t>(kStepCols, w.cols - s * kStepCols);
        to_float(x.row(row) + s * kStepCols * dtype_bytes(x.dtype), x.dtype, count, values);
        decode_step(w, p, s, weights);
        for (int64_t k = 0; k < count; ++k)
            for (int n = 0; n < kPanelRows; ++n) sums[n] += values[k] * weights[k * kPanelRows + n];
    }
    store_row(w, y, p, row, sums);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const int64_t stride = row_bytes(w);
    for (int64_t p = first; p < last; ++p) {
        // All rows for one panel before the next panel: row groups after the first find the weights in the cache.
        for_row_groups(x.m, [&](auto rows, int64_t row) {
            multiply_rows<decltype(rows)::kValue>(w, prepared, row, y, p);
        });
        for (int64_t row = 0; row < x.m; ++row)
            if (!reinterpret_cast<const RowHead*>(prepared + row * stride)->usable)
                multiply_in_float(w, x, row, y, p);
    }
    return true;
}

}  // namespace

extern const Path kGemvInt8Path = {"gemv_int8", prepared_bytes, prepare, multiply};

}  // namespace MINIFLOAT_ISA

#endif
