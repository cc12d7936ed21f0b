// One row of x and E2M1 for AVX2, in integers: decoding to float32 (few_rows.cpp) would take longer than reading. For
// the columns that share a scale, x becomes one power of two times integers of kXBits bits, cut into kDigits digits of
// base kRadix; elements become bytes (e2m1_bytes.h). Where bits of x below 2^-kXBits of the largest would matter, and
// with Inf or NaN, the columns are multiplied in float32.
#include "decode.h"
#include "e2m1_bytes.h"

namespace MINIFLOAT_ISA {

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace {

constexpr int kPrefetch = 2048;  // bytes ahead
constexpr int kPanelParts = kPanelRows / kWidth;
constexpr int kTileParts = kTileRows / kWidth;

constexpr int kDigits = 3;
constexpr int kXBits = 21;  // without the sign
constexpr int kRadix = 160;  // the smallest radix that keeps the digits of kXBits bits within 82
constexpr int kMostByte = 2 * kE2M1Offset;
static_assert((1 << kXBits) / (kRadix * kRadix) < 82 && 82 * kMostByte * 16 < 1 << 15, "16 products in 16 bits");
static_assert(int64_t{kE8M0Cols} * kMostByte << kXBits < int64_t{1} << 31, "a group in 32 bits");
constexpr int kWordCols = 8;  // columns of a vector of E2M1

void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetch, _MM_HINT_T0); }

int64_t padded_cols(const Weight& w) { return w.steps * kStepCols; }
int group_cols(const Weight& w) { return w.grid == MINIFLOAT_GRID_E4M3 ? kE4M3Cols : kE8M0Cols; }

// x under one scale.
struct Group {
    int32_t in_digits;  // whether x is in digits; else float32 x is used
    int32_t shift;      // kE2M1Offset times the sum of the integers
    float scale;        // of the integers, with the factors that E2M1 and its scales are decoded without
};

// A row of x for E2M1.
struct DigitRow {
    const float* x;
    const Group* groups;
    const int8_t* digits;  // [columns / kWordCols, kDigits, kWordCols] in the order of the nibbles
};

int64_t groups_bytes(const Weight& w) {
    return round_up(padded_cols(w) / group_cols(w) * static_cast<int64_t>(sizeof(Group)), kVectorBytes);
}

int64_t row_bytes(const Weight& w) {
    const int64_t cols = padded_cols(w);
    return cols * static_cast<int64_t>(sizeof(float)) + groups_bytes(w) + round_up(cols * kDigits, kVectorBytes);
}

DigitRow digit_row(const Weight& w, const uint8_t* row) {
    const uint8_t* groups = row + padded_cols(w) * sizeof(float);
    return {reinterpret_cast<const float*>(row), reinterpret_cast<const Group*>(groups),
            reinterpret_cast<const int8_t*>(groups + groups_bytes(w))};
}

float power_of_two(int e) { return bit_cast<float>((e + kBias) << kMantissaBits); }

// The position of column k in the bytes of a vector: low nibbles come first.
constexpr int kByteOf[kWordCols] = {0, 2, 4, 6, 1, 3, 5, 7};

// Integers below this number have lost bits that are visible in a result of this dtype.
int32_t least_integer(int32_t dtype) { return 1 << (dtype == MINIFLOAT_BF16 ? 9 : dtype == MINIFLOAT_F16 ? 12 : 16); }

void cut_group(const float* x, int cols, int32_t least, float missing, Group& group, int8_t* digits) {
    int32_t largest = 0;
    for (int k = 0; k < cols; ++k) largest = max(largest, bit_cast<int32_t>(x[k]) & kMagnitude);
    group = {0, 0, 0.0f};
    if (largest >= kInfinity) return;
    // Every |x| is below 2^exponent. Two factors, because one factor might be out of range.
    const int exponent = max((largest >> kMantissaBits) - kBias + 1, -kBias);
    const float first = power_of_two(-exponent / 2), second = power_of_two(kXBits - exponent + exponent / 2);
    int32_t sum = 0, short_ones = 0;
    for (int k = 0; k < cols; ++k) {
        int32_t rest = _mm_cvtss_si32(_mm_set_ss(x[k] * first * second));
        sum += rest;
        short_ones += x[k] != 0.0f && rest > -least && rest < least;
        int8_t* out = digits + k / kWordCols * kWordCols * kDigits + kByteOf[k % kWordCols];
        for (int d = 0; d < kDigits; ++d) {
            const int32_t next = d + 1 < kDigits ? (rest + (rest < 0 ? -kRadix : kRadix) / 2) / kRadix : 0;
            out[d * kWordCols] = static_cast<int8_t>(rest - next * kRadix);
            rest = next;
        }
    }
    const float scale = missing * power_of_two(exponent / 2) * power_of_two(exponent - exponent / 2 - kXBits);
    group = {short_ones * 4 <= cols, kE2M1Offset * sum, scale};
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return m * row_bytes(w); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i) {
        uint8_t* row = prepared + i * row_bytes(w);
        float* floats = reinterpret_cast<float*>(row);
        to_float(x.row(i), x.dtype, w.cols, floats);
        for (int64_t k = w.cols; k < padded_cols(w); ++k) floats[k] = 0.0f;
        const DigitRow out = digit_row(w, row);
        const int cols = group_cols(w);
        const float missing = 0.5f * (w.grid == MINIFLOAT_GRID_E4M3 ? E4M3Part::kFactor : 1.0f);
        for (int64_t g = 0; g < padded_cols(w) / cols; ++g)
            cut_group(floats + g * cols, cols, least_integer(x.dtype), missing, const_cast<Group&>(out.groups[g]),
                      const_cast<int8_t*>(out.digits) + g * cols * kDigits);
    }
}

// The sixteen registers hold what a group needs only if the compiler neither reorders sums nor keeps digits of x for
// the next tile, so these hide from it where a value comes from.
__m256i opaque(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}
const int8_t* opaque(const int8_t* p) {
    __asm__("" : "+r"(p));
    return p;
}

// Sums of a tile over the kCols columns of one scale: bytes of E2M1 times the digits of x, an integer per row.
template <int kCols>
void multiply_digits(const uint8_t* data, const int8_t* digits, I32 (&sums)[kTileParts]) {
    __m256i totals[kDigits][kTileParts];
    digits = opaque(digits);
    for (auto& total : totals)
        for (__m256i& part : total) part = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int v = 0; v < kCols / kWordCols; ++v) {
        prefetch(data + v * kVectorBytes);
        __m256i bytes[2][kTileParts];
        for (int i = 0; i < kTileParts; ++i)
            e2m1_bytes(load_as<__m256i>(data + v * kVectorBytes + i * MINIFLOAT_VECTOR_BYTES), bytes[0][i], bytes[1][i]);
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const int8_t* four = digits + (v * kDigits + d) * kWordCols + h * kWordCols / 2;
                const __m256i x = _mm256_set1_epi32(load_as<int32_t>(four));
#pragma GCC unroll 2
                for (int i = 0; i < kTileParts; ++i)
                    totals[d][i] = opaque(_mm256_add_epi16(totals[d][i], _mm256_maddubs_epi16(bytes[h][i], x)));
            }
    }
    for (int i = 0; i < kTileParts; ++i) {
        __m256i sum = _mm256_madd_epi16(totals[0][i], _mm256_set1_epi16(1));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(totals[1][i], _mm256_set1_epi16(kRadix)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(totals[2][i], _mm256_set1_epi16(kRadix * kRadix)));
        sums[i] = bit_cast<I32>(sum);
    }
}

// The scales of eight rows; for E4M3 ones divided by E4M3Part::kFactor.
template <int kCols>
F32 inline_scales(const uint8_t* scales) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    if constexpr (kCols == kE4M3Cols) {
        const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
        return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
    } else {
        const __m256i distance = _mm256_cvtepu8_epi32(codes);
        return bit_cast<F32>(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(kBias), distance), kMantissaBits));
    }
}

// Adds columns col .. col + cols - 1 of a step in float32.
void add_decoded(const Weight& w, int64_t p, int64_t s, int col, int cols, const float* x, F32 (&sums)[kPanelParts]) {
    alignas(64) float step[kStepCols * kPanelRows];
    decode_step(w, p, s, step);
    for (int k = col; k < col + cols; ++k)
        for (int i = 0; i < kPanelParts; ++i)
            sums[i] += load(step + k * kPanelRows + i * kWidth) * x[s * kStepCols + k];
}

template <int kCols>
void e2m1_row(const Weight& w, int64_t p, const DigitRow& x, F32 (&sums)[kPanelParts]) {
    constexpr int kTileBytes = kTileRows * kHalfCols / 2, kGroupBytes = kTileRows * kCols / 2;
    constexpr int kGroups = kHalfCols / kCols;  // of a half
    const Group* group = x.groups;
    const int8_t* digits = x.digits;
    for (int64_t s = 0; s < w.steps; ++s) {
        const uint8_t* scales = w.panel(p) + s * w.step_bytes;
        const uint8_t* data = scales + w.scale_bytes;
        prefetch(scales);
        for (int g = 0; g < kStepCols / kCols; ++g, ++group, digits += kCols * kDigits, scales += kPanelRows) {
            if (!group->in_digits) {
                add_decoded(w, p, s, g * kCols, kCols, x.x, sums);
                continue;
            }
            for (int tile = 0; tile < 2; ++tile) {
                I32 products[kTileParts];
                const int64_t offset = (g / kGroups * 2 + tile) * kTileBytes + g % kGroups * kGroupBytes;
                multiply_digits<kCols>(data + offset, digits, products);
#pragma GCC unroll 2
                for (int i = 0; i < kTileParts; ++i) {
                    const F32 exact = __builtin_convertvector(products[i] - group->shift, F32);
                    const F32 scale = inline_scales<kCols>(scales + tile * kTileRows + i * kWidth) * group->scale;
                    sums[tile * kTileParts + i] += exact * scale;
                }
            }
        }
    }
}

void multiply_row(const Weight& w, int64_t p, const uint8_t* row, F32 (&sums)[kPanelParts]) {
    const DigitRow digits = digit_row(w, row);
    if (w.grid == MINIFLOAT_GRID_E4M3) return e2m1_row<kE4M3Cols>(w, p, digits, sums);
    return e2m1_row<kE8M0Cols>(w, p, digits, sums);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
        for (int64_t i = 0; i < x.m; ++i) {
            F32 sums[kPanelParts] = {};
            multiply_row(w, p, prepared + i * row_bytes(w), sums);
            alignas(64) float floats[kPanelRows];
            __builtin_memcpy(floats, sums, sizeof floats);
            store_row(w, y, p, i, floats);
        }
    }
    return true;
}

}  // namespace

extern const Path kDigitsPath;
const Path kDigitsPath = {"digits", prepared_bytes, prepare, multiply};

#endif

}  // namespace MINIFLOAT_ISA
