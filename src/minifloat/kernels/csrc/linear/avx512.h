// Shared by the AVX-512 paths: decoding of weights and inline scales in registers, and rows of results.
#pragma once

#if defined(__AVX512F__)

#include "../vec.h"
#include "convert.h"
#include "path.h"

namespace MINIFLOAT_ISA {

constexpr int kE4M3MantissaBits = 3;
constexpr int kHalfMantissaBits = 10;
constexpr int kHalfFromE4M3 = kHalfMantissaBits - kE4M3MantissaBits;
constexpr float kHalfRebias = 0x1p8f;  // the exponent biases of E4M3 and half differ by 8
constexpr int16_t kHalfBitsOfE4M3 = static_cast<int16_t>(0xbf80);

#if defined(__AVX512VBMI__)

constexpr int kBf16Mantissa = 7;

constexpr int bf16_exponent(int e) { return (e + 127) << kBf16Mantissa; }

// The magnitude of an E4M3 code as bf16.
constexpr int e4m3_to_bf16(int code) {
    const int e = code >> 3, m = code & 7;
    if (e > 0) return bf16_exponent(e - 7) | m << 4;
    if (m == 0) return 0;
    const int top = m >= 4 ? 2 : m >= 2 ? 1 : 0;  // m * 2^-9 = 2^(top - 9) * (1 + ...)
    return bf16_exponent(top - 9) | (m << (kBf16Mantissa - top) & 0x7f);
}

// 16-bit values of 7-bit codes, for VPERMI2B.
struct ByteTables {
    alignas(64) uint8_t low[128], high[128];
};

template <class Function>
constexpr ByteTables byte_tables(Function function) {
    ByteTables t = {};
    for (int code = 0; code < 128; ++code) {
        t.low[code] = static_cast<uint8_t>(function(code) & 0xff);
        t.high[code] = static_cast<uint8_t>(function(code) >> 8);
    }
    return t;
}

// A vector of E4M3 as two vectors of pairs of bf16 (layout.h).
struct E4m3Pairs {
    __m512i first, second;
};

// The low and the high bytes of E4m3Pairs, before they are interleaved.
struct E4m3Bytes {
    __m512i low, high;

    E4m3Pairs pairs() const { return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}; }
};

// E4M3 as bf16, by tables of the two bytes of its magnitudes.
class E4m3Lookup {
  public:
    explicit E4m3Lookup(const ByteTables& t)
        : low0_(_mm512_load_si512(t.low)),
          low1_(_mm512_load_si512(t.low + 64)),
          high0_(_mm512_load_si512(t.high)),
          high1_(_mm512_load_si512(t.high + 64)) {}

    E4m3Bytes magnitudes(__m512i codes) const {
        return {_mm512_permutex2var_epi8(low0_, codes, low1_), _mm512_permutex2var_epi8(high0_, codes, high1_)};
    }
    E4m3Bytes operator()(__m512i codes) const {
        constexpr int kOrAnd = 0xf8;  // a | (b & c)
        const E4m3Bytes b = magnitudes(codes);
        return {b.low, _mm512_ternarylogic_epi32(b.high, codes, _mm512_set1_epi8(-128), kOrAnd)};
    }

  private:
    __m512i low0_, low1_, high0_, high1_;
};

#if defined(__GFNI__)

// Converts normal numbers of E4M3 to bf16 in two instructions. The exponent e of s eeee mmm becomes e + 120, which only
// copies bits: s e3 ~e3 ~e3 ~e3 ~e3 e2 e1 and e0 mmm 0000; times 2^8, e + 128, the first byte is s 1 0 0 0 e3 e2 e1. A
// matrix has a byte per bit of the result; its lowest byte is that of the highest bit.
template <int kLift>
struct E4m3Normal {
    static_assert(kLift == 0 || kLift == 8, "the lifts that have a matrix");
    static constexpr int64_t kLow = 0x0000000001020408;
    static constexpr int64_t kHigh = kLift == 0 ? 0x1020404040404080 : 0x1020400000000080;
    static constexpr int kSet = kLift == 0 ? 0x3c : 0x40;

    E4m3Bytes operator()(__m512i codes) const {
        return {_mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kLow), 0),
                _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kHigh), kSet)};
    }
};

inline bool all_normal(__m512i a, __m512i b) {
    const __m512i exponent = _mm512_set1_epi8(0x78);
    const __mmask64 normal = _mm512_mask_test_epi8_mask(_mm512_test_epi8_mask(a, exponent), b, exponent);
    return _kortestc_mask64_u8(normal, normal);
}

// Whether testing all_normal() pays off, judged by the vectors of one step: in trained weights one code in some
// thousand is zero or subnormal; with one in a hundred the branch would be mispredicted all the time.
inline bool mostly_normal(const uint8_t* vectors) {
    constexpr int kVectors = kPanelRows * kStepCols / kVectorBytes;
    int others = 0;
    for (const uint8_t* p = vectors; p < vectors + kVectors * kVectorBytes; p += 2 * kVectorBytes)
        others += !all_normal(_mm512_load_si512(p), _mm512_load_si512(p + kVectorBytes));
    return others < 2;
}

#endif

#endif

// Two floats of a 32-bit word that holds a pair of bf16.
inline __m512 first_of_pair(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
inline __m512 second_of_pair(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

// 2^-distance of 16 E8M0 distances.
inline __m512 e8m0_scales(const uint8_t* distances) {
    const __m512i d = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(distances)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kBias), d), kMantissaBits));
}

// 16 E4M3 scales times 2^-8; the caller multiplies with the missing factor where it costs nothing.
inline __m512 e4m3_scales(const uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, kHalfFromE4M3), _mm256_set1_epi16(kHalfBitsOfE4M3));
    return _mm512_cvtph_ps(half);
}

// Rows of x that share the decoding of a panel in the paths for few rows.
constexpr int kMaxRows = 4;

// Stores the sums of panel `p`, kRows rows of x from `row` on and both tiles, times `factor`.
template <int kRows>
inline void store_sums(const Weight& w, const Output& y, int64_t p, int64_t row, const __m512 (&sums)[kRows][2],
                       float factor) {
    for (int r = 0; r < kRows; ++r) {
        alignas(64) float floats[kPanelRows];
        for (int t = 0; t < 2; ++t)
            _mm512_store_ps(floats + t * kTileRows, _mm512_mul_ps(sums[r][t], _mm512_set1_ps(factor)));
        store_row(w, y, p, row + r, floats);
    }
}

template <int kNumber>
struct Constant {
    static constexpr int kValue = kNumber;
};

// Calls function(Constant<rows>(), row) for the m rows of x in groups of at most kMaxRows.
template <class Function>
inline void for_row_groups(int64_t m, const Function& function) {
    for (int64_t row = 0; row < m; row += kMaxRows) {
        const int64_t rows = min<int64_t>(kMaxRows, m - row);
        if (rows == 1) function(Constant<1>(), row);
        if (rows == 2) function(Constant<2>(), row);
        if (rows == 3) function(Constant<3>(), row);
        if (rows == 4) function(Constant<4>(), row);
    }
}

}  // namespace MINIFLOAT_ISA

#endif
