// Decodes steps of packed weights to bf16 tiles, one class per format. tile() decodes a tile, half a step wide and half
// a panel high, to memory; prefetch(p) is called for every line that is read. vector() decodes in registers for kRows
// rows of x: kPairs pairs of columns of 16 rows; pairs() does so for both tiles; scales() reads the scales of a group
// of vectors. All is exact: elements have at most 4 significant bits, their products with a scale in E4M3 at most 6,
// and bf16 has 8; where a format is multiplied by a power of two to be normal, its kFactor reverts it.
#pragma once

#include "avx512.h"
#include "bf16_x.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

constexpr int e2m1_to_bf16(int code) {
    const int e = code >> 1 & 3, m = code & 1;
    if (e > 0) return bf16_exponent(e - 1) | m << 6;
    return m == 0 ? 0 : bf16_exponent(-1);
}

struct WordTable {
    alignas(64) uint16_t words[32];
};

// VPERMW reads 5 bits; the highest belongs to the next element and must be ignored.
template <class Function>
constexpr WordTable nibble_table(Function function) {
    WordTable t = {};
    for (int i = 0; i < 32; ++i) t.words[i] = static_cast<uint16_t>(function(i & 15));
    return t;
}

// The scales of a tile's 16 rows, in the words of the pairs of columns.
inline __m512i twice(__m512i dwords) { return _mm512_or_si512(dwords, _mm512_slli_epi32(dwords, 16)); }
inline __m512i row_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m512i e8m0_distance(const uint8_t* p) {
    return twice(_mm512_slli_epi32(row_bytes(p), kBf16Mantissa));
}

// The four pairs of columns of a vector of E2M1, each with its codes in the low nibbles.
template <class Value>
inline void store_pairs(uint8_t* out, __m512i codes, const Value& value) {
    _mm512_store_si512(out, value(codes));
    _mm512_store_si512(out + kVectorBytes, value(_mm512_srli_epi16(codes, 4)));
    _mm512_store_si512(out + 2 * kVectorBytes, value(_mm512_srli_epi16(codes, 8)));
    _mm512_store_si512(out + 3 * kVectorBytes, value(_mm512_srli_epi16(codes, 12)));
}

// The same in registers.
template <class Value>
inline void take_pairs(const uint8_t* p, __m512i (&out)[4], const Value& value) {
    const __m512i codes = _mm512_load_si512(p);
    out[0] = value(codes);
    out[1] = value(_mm512_srli_epi16(codes, 4));
    out[2] = value(_mm512_srli_epi16(codes, 8));
    out[3] = value(_mm512_srli_epi16(codes, 12));
}

// With this many rows of x, decoding pays for instructions that run beside dot products.
constexpr bool saves_dots(int rows) { return rows >= 6; }

// The properties that most formats have.
struct TilesDefaults {
    static constexpr bool kDecodes = true;  // whether the packed bytes differ from those of tiles
    static constexpr bool kBlocks = false;  // whether sums over blocks of columns are scaled
    static constexpr float kFactor = 1.0f;  // multiplies the sums
    static constexpr int kGroups = 1;       // of a half step
};

// Packed BF16 has the layout of tiles already.
class Bf16Tiles : public TilesDefaults {
  public:
    static constexpr bool kDecodes = false;
    static constexpr int kPairs = 1;

    struct Scales {};
    Scales scales(const uint8_t*, int, int) const { return {}; }

    template <int kRows>
    void vector(const uint8_t* p, const Scales&, int, __m512i (&out)[kPairs]) const {
        out[0] = _mm512_load_si512(p);
    }
    template <int kRows>
    void pairs(const uint8_t* a, const uint8_t* b, const Scales& scales, __m512i (&out)[2][kPairs]) const {
        vector<kRows>(a, scales, 0, out[0]);
        vector<kRows>(b, scales, 1, out[1]);
    }

    template <class Prefetch>
    void tile(const uint8_t* step, int index, uint8_t*, const Prefetch& prefetch) const {
        const uint8_t* p = step + index * kTileBytes;
        for (int i = 0; i < kTileBytes; i += kVectorBytes) prefetch(p + i);
    }
};

// E4M3, two vectors at a time: by bit matrices if all codes are normal numbers, else by table.
template <int32_t kGrid>
class E4m3Tiles : public TilesDefaults {
  public:
    static constexpr bool kBlocks = kGrid == MINIFLOAT_GRID_BLOCK;
    // With this factor the smallest E4M3 value, 2^-9, is a normal number even under the smallest scale (kMaxDistance).
    static constexpr int kLift = kGrid == MINIFLOAT_GRID_E8M0 ? 8 : 0;
    static constexpr float kFactor = kGrid == MINIFLOAT_GRID_E8M0 ? 0x1p-8f : 1.0f;
    static constexpr int kPairs = 2;

    struct Scales {
        __m512i distance[2];
    };

#if defined(__GFNI__)
    // `step`: a step that will be decoded, as a sample of the weight.
    explicit E4m3Tiles(const uint8_t* step) : mostly_normal_(mostly_normal(step + kScaleBytes)) {}
#else
    explicit E4m3Tiles(const uint8_t*) {}
#endif

    template <class Prefetch>
    void tile(const uint8_t* step, int index, uint8_t* out, const Prefetch& prefetch) const {
        const uint8_t* in = step + kScaleBytes + index * (kTileBytes / 2);
        const __m512i distance = kScaled ? e8m0_distance(step + index * kTileRows) : _mm512_setzero_si512();
        if (kScaled && index == 0) prefetch(step);
        // Unrolled, the compiler runs out of registers for the addresses of prefetches (10 to 15% of a product).
#pragma GCC unroll 1
        for (int i = 0; i < kTileBytes / 2; i += 2 * kVectorBytes) {
            prefetch(in + i);
            prefetch(in + i + kVectorBytes);
            const __m512i a = _mm512_load_si512(in + i), b = _mm512_load_si512(in + i + kVectorBytes);
#if defined(__GFNI__)
            if (__builtin_expect(mostly_normal_ && all_normal(a, b), 1)) {
                store_normal(out + i * 2, a, distance);
                store_normal(out + i * 2 + 2 * kVectorBytes, b, distance);
                continue;
            }
#endif
            const E4m3Lookup lookup(kTables);
            store_any(out + i * 2, a, distance, lookup);
            store_any(out + i * 2 + 2 * kVectorBytes, b, distance, lookup);
        }
    }

    Scales scales(const uint8_t* step, int half, int) const {
        if (!kScaled) return {};
        return {{e8m0_distance(step + half * kPanelRows), e8m0_distance(step + half * kPanelRows + kTileRows)}};
    }

    template <int kRows>
    void vector(const uint8_t* p, const Scales& scales, int tile, __m512i (&out)[kPairs]) const {
        take(any(_mm512_load_si512(p), scales.distance[tile], E4m3Lookup(kTables)), out);
    }
    template <int kRows>
    void pairs(const uint8_t* first, const uint8_t* second, const Scales& scales, __m512i (&out)[2][kPairs]) const {
        const __m512i a = _mm512_load_si512(first), b = _mm512_load_si512(second);
#if defined(__GFNI__)
        // Bit matrices are fewer instructions than tables, but take the place of dot products.
        if (!saves_dots(kRows) && __builtin_expect(mostly_normal_ && all_normal(a, b), 1)) {
            take(normal(a, scales.distance[0]), out[0]);
            take(normal(b, scales.distance[1]), out[1]);
            return;
        }
#endif
        const E4m3Lookup lookup(kTables);
        take(any(a, scales.distance[0], lookup), out[0]);
        take(any(b, scales.distance[1], lookup), out[1]);
    }

  private:
    static constexpr bool kScaled = kGrid == MINIFLOAT_GRID_E8M0;
    static constexpr int kScaleBytes = kScaled ? kVectorBytes : 0;

    static void store(uint8_t* out, const E4m3Pairs& pairs) {
        _mm512_store_si512(out, pairs.first);
        _mm512_store_si512(out + kVectorBytes, pairs.second);
    }
    static void take(const E4m3Pairs& pairs, __m512i (&out)[kPairs]) {
        out[0] = pairs.first;
        out[1] = pairs.second;
    }
    // Magnitudes with their exponents lowered; zero stays. The maximum does not take the place of a dot product, as a
    // saturating subtraction would.
    static E4m3Pairs lowered(const E4m3Pairs& p, __m512i distance) {
        const __m512i zero = _mm512_setzero_si512();
        return {_mm512_max_epi16(_mm512_sub_epi16(p.first, distance), zero),
                _mm512_max_epi16(_mm512_sub_epi16(p.second, distance), zero)};
    }

#if defined(__GFNI__)
    static E4m3Pairs normal(__m512i codes, __m512i distance) {
        const E4m3Pairs pairs = E4m3Normal<kLift>()(codes).pairs();
        if (!kScaled) return pairs;
        return {_mm512_sub_epi16(pairs.first, distance), _mm512_sub_epi16(pairs.second, distance)};
    }
    static void store_normal(uint8_t* out, __m512i codes, __m512i distance) { store(out, normal(codes, distance)); }
#endif

    static E4m3Pairs any(__m512i codes, __m512i distance, const E4m3Lookup& lookup) {
        if (!kScaled) return lookup(codes).pairs();
        // The sign is added last: subtracting from zero would borrow from it.
        const E4m3Pairs pairs = lowered(lookup.magnitudes(codes).pairs(), distance);
        const __m512i signs = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
        const __m512i zero = _mm512_setzero_si512();
        return {_mm512_or_si512(pairs.first, _mm512_unpacklo_epi8(zero, signs)),
                _mm512_or_si512(pairs.second, _mm512_unpackhi_epi8(zero, signs))};
    }
    static void store_any(uint8_t* out, __m512i codes, __m512i distance, const E4m3Lookup& lookup) {
        store(out, any(codes, distance, lookup));
    }

    static constexpr ByteTables kTables = byte_tables([](int code) {
        return code == 0 ? 0 : e4m3_to_bf16(code) + (kLift << kBf16Mantissa);
    });

#if defined(__GFNI__)
    bool mostly_normal_;
#endif
};

// E2M1 with E8M0: the value by table, then its exponent lowered; both zeros decode to +0, which stays.
class Mxfp4Tiles : public TilesDefaults {
  public:
    static constexpr int kPairs = 4;

    struct Scales {
        __m512i distance[2];
    };

    Scales scales(const uint8_t* step, int half, int) const {
        return {{e8m0_distance(step + half * kPanelRows), e8m0_distance(step + half * kPanelRows + kTileRows)}};
    }

    template <int kRows>
    void pairs(const uint8_t* a, const uint8_t* b, const Scales& scales, __m512i (&out)[2][kPairs]) const {
        vector<kRows>(a, scales, 0, out[0]);
        vector<kRows>(b, scales, 1, out[1]);
    }
    template <int kRows>
    void vector(const uint8_t* p, const Scales& scales, int tile, __m512i (&out)[kPairs]) const {
        const __m512i distance = scales.distance[tile];
        if constexpr (saves_dots(kRows)) {
            take_pairs(p, out, [&](__m512i shifted) {
                const __m512i lowers = _mm512_and_si512(distance, _mm512_permutexvar_epi16(shifted, nonzero_));
                return _mm512_sub_epi16(_mm512_permutexvar_epi16(shifted, values_), lowers);
            });
        } else {
            take_pairs(p, out, [&](__m512i shifted) { return value(shifted, distance); });
        }
    }

    template <class Prefetch>
    void tile(const uint8_t* step, int index, uint8_t* out, const Prefetch& prefetch) const {
        const uint8_t* in = step + kVectorBytes + index * (kTileBytes / 4);
        const __m512i distance = e8m0_distance(step + index * kTileRows);
        if (index == 0) prefetch(step);
#pragma GCC unroll 4
        for (int i = 0; i < kTileBytes / 4; i += kVectorBytes, out += 4 * kVectorBytes) {
            prefetch(in + i);
            const __m512i codes = _mm512_load_si512(in + i);
            store_pairs(out, codes, [&](__m512i shifted) { return value(shifted, distance); });
        }
    }

  private:
    static constexpr WordTable kValues = nibble_table([](int code) {
        const int value = e2m1_to_bf16(code & 7);
        return code > 8 ? value | 0x8000 : value;
    });
    static constexpr WordTable kNonzero = nibble_table([](int code) { return (code & 7) != 0 ? 0xffff : 0; });

    __m512i value(__m512i codes, __m512i distance) const {
        return _mm512_subs_epu16(_mm512_permutexvar_epi16(codes, values_), distance);
    }

    const __m512i values_ = _mm512_load_si512(kValues.words);
    const __m512i nonzero_ = _mm512_load_si512(kNonzero.words);
};

// E2M1 with E4M3. For numbers with the same mantissa the bits of a bf16 are a logarithm, so a product with a scale S is
// a subtraction. From the elements times 2^9, which is above the largest S, it subtracts bits(2^9) - bits(S) where the
// element is 2^i, and bits(1.5 * 2^9) - bits(1.5 * S) where it is 1.5 * 2^i.
class Nvfp4Tiles : public TilesDefaults {
    struct RowScales {
        __m512i power, other, sign;
    };

  public:
    static constexpr int kPairs = 4;
    static constexpr int kGroups = 2;

    struct Scales {
        RowScales of[2];
    };

    Scales scales(const uint8_t* step, int half, int group) const {
        const uint8_t* codes = step + (half * kGroups + group) * kPanelRows;
        return {{scales_of(codes), scales_of(codes + kTileRows)}};
    }

    template <int kRows>
    void pairs(const uint8_t* a, const uint8_t* b, const Scales& scales, __m512i (&out)[2][kPairs]) const {
        vector<kRows>(a, scales, 0, out[0]);
        vector<kRows>(b, scales, 1, out[1]);
    }
    template <int kRows>
    void vector(const uint8_t* p, const Scales& scales, int tile, __m512i (&out)[kPairs]) const {
        take_pairs(p, out, [&](__m512i shifted) { return value(shifted, scales.of[tile]); });
    }

    template <class Prefetch>
    void tile(const uint8_t* step, int index, uint8_t* out, const Prefetch& prefetch) const {
        const uint8_t* in = step + 2 * kVectorBytes + index * (kTileBytes / 4);
        if (index < 2) prefetch(step + index * kVectorBytes);
        for (int quarter = 0; quarter < 2; ++quarter) {
            const int row = (index / 2 * 2 + quarter) * kPanelRows + index % 2 * kTileRows;
            const RowScales scales = scales_of(step + row);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i, in += kVectorBytes, out += 4 * kVectorBytes) {
                prefetch(in);
                const __m512i codes = _mm512_load_si512(in);
                store_pairs(out, codes, [&](__m512i shifted) { return value(shifted, scales); });
            }
        }
    }

  private:
    static constexpr int kLift = 9 << kBf16Mantissa;

    static constexpr WordTable kValues = nibble_table([](int code) {
        const int value = e2m1_to_bf16(code & 7);
        return value == 0 ? 0 : (value + kLift) | (code & 8) << 12;
    });
    static constexpr WordTable kIsOther =
        nibble_table([](int code) { return (code & 7) > 1 && (code & 1) ? 0xffff : 0; });
    // For a scale of zero, 0xffff is subtracted, so that every element becomes zero.
    static constexpr ByteTables kPower = byte_tables([](int code) {
        return code == 0 ? 0xffff : bf16_exponent(9) - e4m3_to_bf16(code);
    });
    // The difference of the two subtracted numbers, indexed by minus the 3 bits of the mantissa of S.
    static constexpr WordTable kLess = nibble_table([](int minus) {
        const int eighths = 8 + (-minus & 7), product = eighths * 3;  // 16 times 1.5 * S / 2^e: 24 .. 45
        const int bits = product < 32 ? (product - 16) * 8 : 128 + (product - 32) * 4;
        return bits - (eighths - 8) * 16 - 64;
    });

    RowScales scales_of(const uint8_t* codes) const {
        const __m512i code = _mm512_mullo_epi32(row_bytes(codes), _mm512_set1_epi32(0x01010101));
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kPower.low), code,
                                                     _mm512_load_si512(kPower.low + 64));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kPower.high), code,
                                                      _mm512_load_si512(kPower.high + 64));
        const __m512i power = _mm512_mask_mov_epi8(low, 0xaaaaaaaaaaaaaaaaull, high);
        const __m512i less = _mm512_permutexvar_epi16(_mm512_srli_epi16(power, 4), _mm512_load_si512(kLess.words));
        return {power, _mm512_sub_epi16(power, less),
                _mm512_and_si512(code, _mm512_set1_epi16(static_cast<int16_t>(0x8000)))};
    }

    __m512i value(__m512i codes, const RowScales& scales) const {
        constexpr int kSelect = 0xca;
        const __m512i other = _mm512_permutexvar_epi16(codes, is_other_);
        const __m512i scale = _mm512_ternarylogic_epi32(other, scales.other, scales.power, kSelect);
        return _mm512_xor_si512(_mm512_subs_epu16(_mm512_permutexvar_epi16(codes, values_), scale), scales.sign);
    }

    const __m512i values_ = _mm512_load_si512(kValues.words);
    const __m512i is_other_ = _mm512_load_si512(kIsOther.words);
};

// Calls `function` with the tiles of the weight's format, for panel `first` and those after it.
template <class Function>
inline bool with_format(const Weight& w, int64_t first, const Function& function) {
    if (w.element == MINIFLOAT_WEIGHT_BF16) return function(Bf16Tiles());
    if (w.element == MINIFLOAT_E2M1 && w.grid == MINIFLOAT_GRID_E8M0) return function(Mxfp4Tiles());
    if (w.element == MINIFLOAT_E2M1) return function(Nvfp4Tiles());
    if (w.grid == MINIFLOAT_GRID_E8M0) return function(E4m3Tiles<MINIFLOAT_GRID_E8M0>(w.panel(first)));
    if (w.grid == MINIFLOAT_GRID_BLOCK) return function(E4m3Tiles<MINIFLOAT_GRID_BLOCK>(w.panel(first)));
    return function(E4m3Tiles<MINIFLOAT_GRID_ROW>(w.panel(first)));
}

}  // namespace MINIFLOAT_ISA

#endif
