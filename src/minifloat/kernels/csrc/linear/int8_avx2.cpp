// Rounded inputs on AVX2: integer sums over blocks of columns, scaled and added up in float32. Twice an element of E2M1,
// made positive, is a byte that VPMADDUBSW multiplies with x in int8; sums of a block fit into 16 bits. E4M3 becomes
// integers of 15 bits, exact down to 2^-10 of the largest of a row of a step, which VPMADDWD multiplies with x in 12 bits.
// Instructions of AVX-VNNI add these products up in 32 bits: the sums, and so the results, are the same.
#include "../threads.h"
#include "decode.h"
#include "e2m1_bytes.h"
#include "int8_x.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int kRows = 6;     // of a tile of x; with two vectors of W, x and a product their sums fill the registers
constexpr int kVectors = 2;  // of W
constexpr int kMostBlocks = kStepCols / kE4M3Cols;
constexpr int64_t kChunkSteps = 4;  // that are decoded at once, into the L1 cache
constexpr int64_t kBlockRows = 512;  // of x, whose columns of a chunk stay in the L2 cache
constexpr int64_t kPanels = Finish::kMaxPanels;

// Columns of a step of a tile of x: integers, scales, and what the sums of each block start from.
template <class T>
struct alignas(64) Unit {
    T values[kRows][kStepCols];
    float scales[kRows];
    int32_t starts[kMostBlocks][kRows];
};

// Steps of a panel: integers of W, [word of columns][row][columns of the word], and scales, [block][row].
struct Decoded {
    static constexpr int64_t kWords = kStepCols / 2 * kPanelRows;  // of a step, at most
    alignas(64) uint32_t words[kChunkSteps][kWords];
    alignas(64) float scales[kChunkSteps][kMostBlocks][kPanelRows];
};

// E2M1 in bytes. Sums of 16 bits wrap around until the start of -kE2M1Offset times the sum of x cancels the offset.
struct E2M1Bytes {
    typedef int8_t X;
    static constexpr int kWordCols = 4;
    // Columns of the eight of a vector of layout.h, in the order of its low nibbles and then of its high ones.
    static constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    static constexpr float kMax = 127.0f;
    static_assert(kE8M0Cols / 2 * kE2M1Offset * 127 < 1 << 15, "half of the columns of a block in 16 bits");

    static void add(__m256i& sums, __m256i w, __m256i x) {
        asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(_mm256_maddubs_epi16(w, x)));
    }
    static F32 totals(__m256i sums) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }

    // The starts of both halves of a word, for the columns of a block in the order of `x`.
    static int32_t start(const int8_t* x, int cols) {
        int32_t halves[2] = {0, 0};
        for (int k = 0; k < cols; ++k) halves[k % 4 / 2] -= kE2M1Offset * x[k];
        return static_cast<int32_t>((static_cast<uint32_t>(halves[0]) & 0xffff) | static_cast<uint32_t>(halves[1]) << 16);
    }

    static void decode(const Weight& w, int64_t p, int64_t s, uint32_t* words, float (*scales)[kPanelRows], int blocks) {
        const uint8_t* data = w.panel(p) + s * w.step_bytes + w.scale_bytes;
        constexpr int kHalfVectors = kHalfCols / E2M1Part::kCols;
        for (int half = 0; half < 2; ++half)
            for (int tile = 0; tile < kPanelRows; tile += kTileRows)
                for (int v = half * kHalfVectors; v < (half + 1) * kHalfVectors; ++v, data += kVectorBytes) {
                    prefetch_ahead(data);
                    for (int i = 0; i < 2; ++i) {
                        __m256i low, high;
                        e2m1_bytes(load_as<__m256i>(data + i * MINIFLOAT_VECTOR_BYTES), low, high);
                        uint32_t* out = words + 2 * v * kPanelRows + tile + i * kWidth;
                        store_as(out, low);
                        store_as(out + kPanelRows, high);
                    }
                }
        for (int b = 0; b < blocks; ++b)
            for (int n = 0; n < kPanelRows; n += kWidth)
                store_as(scales[b] + n, scales_of(w, p, s, b * (kStepCols / blocks), n) * 0.5f);
    }
};

// E4M3: integers up to kMostWord in units of a power of two for each row and step, the smallest that is possible.
struct E4M3Words {
    typedef int16_t X;
    static constexpr int kWordCols = 2;
    static constexpr int kOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    // The most with which the sums of a step fit into 32 bits.
    static constexpr float kMax = 2047.0f;
    static constexpr int kMostWord = 15 << 10;
    static_assert(int64_t{kStepCols} * kMostWord * 2047 < int64_t{1} << 31, "a step in 32 bits");

    static void add(__m256i& sums, __m256i w, __m256i x) {
        asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(w, x)));
    }
    static F32 totals(__m256i sums) { return _mm256_cvtepi32_ps(sums); }
    static int32_t start(const int16_t*, int) { return 0; }

    // The exponents of codes.
    static __m256i exponents(__m256i codes) {
        return _mm256_and_si256(_mm256_srli_epi16(codes, 3), _mm256_set1_epi8(0xf));
    }
    // The largest of the four columns of each row, in all of them.
    static __m256i of_rows(__m256i bytes) {
        const __m256i pairs = _mm256_max_epu8(bytes, _mm256_or_si256(_mm256_srli_epi16(bytes, 8),
                                                                    _mm256_slli_epi16(bytes, 8)));
        return _mm256_max_epu8(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    }

    // A code is (8 + mantissa) 2^(exponent - 10), without the 8 if the exponent is 0 and then counts as 1. Its integer is
    // (8 + mantissa) 2^(exponent + lift - 5): the product of (8 + mantissa) 2^11 and 2^(exponent + lift - 1), of which
    // VPMULHRSW returns the highest bits, rounded.
    static void decode_part(const uint8_t* from, __m256i lift, uint32_t* words) {
        const auto table = [](__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); };
        const __m256i leading = table(_mm_setr_epi8(0, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64));
        const __m256i low = table(_mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0));
        const __m256i high = table(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64));
        const __m256i codes = load_as<__m256i>(from), none = _mm256_setzero_si256(), exponent = exponents(codes);
        const __m256i mantissa = _mm256_and_si256(_mm256_slli_epi16(codes, 3), _mm256_set1_epi8(0x38));
        const __m256i significand = _mm256_or_si256(mantissa, _mm256_shuffle_epi8(leading, exponent));
        const __m256i power = _mm256_add_epi8(_mm256_max_epu8(exponent, _mm256_set1_epi8(1)), lift);
        const __m256i low_bytes = _mm256_shuffle_epi8(low, power), high_bytes = _mm256_shuffle_epi8(high, power);
        const auto store_pair = [&](uint32_t* to, __m256i factor, __m256i powers, __m256i signs) {
            store_as(to, _mm256_sign_epi16(_mm256_mulhrs_epi16(factor, powers), signs));
        };
        store_pair(words, _mm256_unpacklo_epi8(none, significand), _mm256_unpacklo_epi8(low_bytes, high_bytes),
                   _mm256_unpacklo_epi8(none, codes));
        store_pair(words + kPanelRows, _mm256_unpackhi_epi8(none, significand),
                   _mm256_unpackhi_epi8(low_bytes, high_bytes), _mm256_unpackhi_epi8(none, codes));
    }

    static void decode(const Weight& w, int64_t p, int64_t s, uint32_t* words, float (*scales)[kPanelRows], int blocks) {
        constexpr int kHalfVectors = kHalfCols / E4M3Part::kCols, kHalfBytes = 2 * kHalfVectors * kVectorBytes;
        for (int n = 0; n < kPanelRows; n += kWidth) {
            const uint8_t* first = w.panel(p) + s * w.step_bytes + w.scale_bytes + n / kTileRows * kHalfBytes / 2 +
                                   n % kTileRows / kWidth * MINIFLOAT_VECTOR_BYTES;
            const auto part = [&](int v) { return first + v / kHalfVectors * kHalfBytes + v % kHalfVectors * kVectorBytes; };
            __m256i largest = _mm256_set1_epi8(1);
            for (int v = 0; v < 2 * kHalfVectors; ++v) {
                prefetch_ahead(part(v));
                largest = _mm256_max_epu8(largest, exponents(load_as<__m256i>(part(v))));
            }
            const __m256i lift = _mm256_sub_epi8(_mm256_set1_epi8(15), of_rows(largest));
            for (int v = 0; v < 2 * kHalfVectors; ++v) decode_part(part(v), lift, words + 2 * v * kPanelRows + n);
            const __m256i lifts = _mm256_unpacklo_epi16(_mm256_and_si256(lift, _mm256_set1_epi16(0xff)),
                                                        _mm256_setzero_si256());
            const __m256i exponent = _mm256_sub_epi32(_mm256_set1_epi32(kBias - 5), lifts);
            const F32 unit = bit_cast<F32>(_mm256_slli_epi32(exponent, kMantissaBits));
            for (int b = 0; b < blocks; ++b)
                store_as(scales[b] + n, scales_of(w, p, s, b * (kStepCols / blocks), n) * unit);
        }
    }
};

#if defined(MINIFLOAT_AVX_VNNI)
struct E2M1Vnni : E2M1Bytes {
    static void add(__m256i& sums, __m256i w, __m256i x) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
    }
    static F32 totals(__m256i sums) { return _mm256_cvtepi32_ps(sums); }
    static int32_t start(const int8_t* x, int cols) {
        int32_t sum = 0;
        for (int k = 0; k < cols; ++k) sum += x[k];
        return -kE2M1Offset * sum;
    }
};

struct E4M3Vnni : E4M3Words {
    static void add(__m256i& sums, __m256i w, __m256i x) {
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
    }
};
#endif

// Blocks of columns of a step that have sums of their own.
int blocks_of(const Weight& w) {
    if (w.grid == MINIFLOAT_GRID_E8M0) return kStepCols / kE8M0Cols;
    return w.element == MINIFLOAT_E2M1 ? kStepCols / kE4M3Cols : 1;
}

int64_t tiles_of(int64_t m) { return ceil_div(m, kRows); }
// Tiles hold the rows evenly; the last may have fewer.
int64_t tile_rows(int64_t m) { return ceil_div(m, max<int64_t>(1, tiles_of(m))); }

// Rounds columns of a row of x. With Inf or NaN the scale is NaN and the integers are zero.
template <class Arithmetic>
void round_row(const float* x, int row, int blocks, Unit<typename Arithmetic::X>& unit) {
    int32_t largest = bit_cast<int32_t>(kSmallestAmax);
    for (int k = 0; k < kStepCols; ++k) largest = max(largest, bit_cast<int32_t>(x[k]) & kMagnitude);
    const bool finite = largest < kInfinity;
    const float amax = bit_cast<float>(largest), factor = Arithmetic::kMax / amax;
    unit.scales[row] = finite ? amax / Arithmetic::kMax : __builtin_nanf("");
    alignas(64) int32_t integers[kStepCols];
    for (int k = 0; k < kStepCols; k += kWidth)
        store_as(integers + k, finite ? _mm256_cvtps_epi32(load(x + k) * factor) : _mm256_setzero_si256());
    for (int k = 0; k < kStepCols; k += 8)
        for (int i = 0; i < 8; ++i)
            unit.values[row][k + i] = static_cast<typename Arithmetic::X>(integers[k + Arithmetic::kOrder[i]]);
    const int cols = kStepCols / blocks;
    for (int b = 0; b < blocks; ++b) unit.starts[b][row] = Arithmetic::start(unit.values[row] + b * cols, cols);
}

// The units of the tiles, [tile][step].
template <class Arithmetic>
void round_rows(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    auto* units = reinterpret_cast<Unit<typename Arithmetic::X>*>(prepared);
    const int64_t rows = tile_rows(x.m);
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i)
        for (int64_t s = 0; s < w.steps; ++s) {
            alignas(64) float values[kStepCols];
            const int64_t count = min<int64_t>(kStepCols, w.cols - s * kStepCols);
            to_float(x.row(i) + s * kStepCols * dtype_bytes(x.dtype), x.dtype, count, values);
            for (int64_t k = count; k < kStepCols; ++k) values[k] = 0.0f;
            round_row<Arithmetic>(values, static_cast<int>(i % rows), blocks_of(w), units[i / rows * w.steps + s]);
        }
}

// sums [kTile][kPanelRows] += kTile rows of x times `steps` steps of a panel.
template <class Arithmetic, int kBlocks, int kTile>
__attribute__((noinline)) void multiply_tile(const Decoded& d, int64_t steps, const Unit<typename Arithmetic::X>* units,
                                             float* sums) {
    constexpr int kBlockWords = kStepCols / kBlocks / Arithmetic::kWordCols;
    for (int64_t s = 0; s < steps; ++s) {
        const auto& unit = units[s];
        for (int n = 0; n < kPanelRows; n += kVectors * kWidth)
            for (int b = 0; b < kBlocks; ++b) {
                __m256i dots[kTile][kVectors];
#pragma GCC unroll 6
                for (int r = 0; r < kTile; ++r)
                    dots[r][0] = dots[r][1] = _mm256_set1_epi32(unit.starts[b][r]);
                const uint32_t* w = d.words[s] + b * kBlockWords * kPanelRows + n;
                const auto* x = unit.values[0] + b * (kStepCols / kBlocks);
#pragma GCC unroll 2
                for (int k = 0; k < kBlockWords; ++k, w += kPanelRows, x += Arithmetic::kWordCols) {
                    const __m256i w0 = load_as<__m256i>(w), w1 = load_as<__m256i>(w + kWidth);
#pragma GCC unroll 6
                    for (int r = 0; r < kTile; ++r) {
                        const __m256i word = _mm256_set1_epi32(load_as<int32_t>(x + r * kStepCols));
                        Arithmetic::add(dots[r][0], w0, word);
                        Arithmetic::add(dots[r][1], w1, word);
                    }
                }
                const float* scales = d.scales[s][b] + n;
#pragma GCC unroll 6
                for (int r = 0; r < kTile; ++r)
#pragma GCC unroll 2
                    for (int i = 0; i < kVectors; ++i) {
                        float* to = sums + r * kPanelRows + n + i * kWidth;
                        const F32 scale = load(scales + i * kWidth) * unit.scales[r];
                        store_as(to, load(to) + Arithmetic::totals(dots[r][i]) * scale);
                    }
            }
    }
}

template <class Arithmetic, int kBlocks, int kTile>
void multiply_rows(int64_t rows, const Decoded& d, int64_t steps, const Unit<typename Arithmetic::X>* units,
                   float* sums) {
    if constexpr (kTile > 1) {
        if (rows < kTile) return multiply_rows<Arithmetic, kBlocks, kTile - 1>(rows, d, steps, units, sums);
    }
    multiply_tile<Arithmetic, kBlocks, kTile>(d, steps, units, sums);
}

// Panels first .. last - 1 times rows begin .. end - 1 of x, whole tiles. `sums`: [panel][row][kPanelRows].
template <class Arithmetic, int kBlocks>
void multiply_block(const Weight& w, const Unit<typename Arithmetic::X>* units, const Output& y, int64_t rows,
                    int64_t begin, int64_t end, int64_t first, int64_t last, Decoded& d, float* sums) {
    const int64_t panel_floats = (end - begin) * kPanelRows;
    __builtin_memset(sums, 0, static_cast<uint64_t>((last - first) * panel_floats) * sizeof *sums);
    for (int64_t s = 0; s < w.steps; s += kChunkSteps) {
        const int64_t steps = min(kChunkSteps, w.steps - s);
        for (int64_t p = first; p < last; ++p) {
            for (int64_t i = 0; i < steps; ++i) Arithmetic::decode(w, p, s + i, d.words[i], d.scales[i], kBlocks);
            for (int64_t row = begin; row < end; row += rows)
                multiply_rows<Arithmetic, kBlocks, kRows>(min(rows, end - row), d, steps,
                                                          units + row / rows * w.steps + s,
                                                          sums + (p - first) * panel_floats + (row - begin) * kPanelRows);
        }
    }
    const Finish finish(w, y, first, last, 1.0f);
    store_dots(w, y, begin, static_cast<int>(end - begin), first, last, finish, sums, panel_floats);
}

template <class Arithmetic, int kBlocks>
bool multiply_all(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first,
                  int64_t last) {
    const auto* units = reinterpret_cast<const Unit<typename Arithmetic::X>*>(prepared);
    const int64_t rows = tile_rows(x.m), block = min(x.m, kBlockRows / rows * rows);
    const int64_t floats = block * min(kPanels, last - first) * kPanelRows;
    const int64_t bytes = static_cast<int64_t>(sizeof(Decoded)) + floats * static_cast<int64_t>(sizeof(float));
    auto* d = static_cast<Decoded*>(minifloat::scratch(minifloat::kScratchThread, bytes));
    if (d == nullptr) return false;
    float* sums = reinterpret_cast<float*>(d + 1);
    for (int64_t p = first; p < last; p += kPanels)
        for (int64_t begin = 0; begin < x.m; begin += block)
            multiply_block<Arithmetic, kBlocks>(w, units, y, rows, begin, min(begin + block, x.m), p,
                                                min(p + kPanels, last), *d, sums);
    return true;
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) {
    const uint64_t unit = w.element == MINIFLOAT_E2M1 ? sizeof(Unit<E2M1Bytes::X>) : sizeof(Unit<E4M3Words::X>);
    return tiles_of(m) * w.steps * static_cast<int64_t>(unit);
}

template <class E2M1, class E4M3>
void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    if (w.element == MINIFLOAT_E2M1) {
        round_rows<E2M1>(w, x, prepared, part, parts);
    } else {
        round_rows<E4M3>(w, x, prepared, part, parts);
    }
}

template <class E2M1, class E4M3>
bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const int blocks = blocks_of(w);
    if (w.element == MINIFLOAT_E4M3 && blocks == 1) return multiply_all<E4M3, 1>(w, x, prepared, y, first, last);
    if (w.element == MINIFLOAT_E4M3) return multiply_all<E4M3, 2>(w, x, prepared, y, first, last);
    if (blocks == 2) return multiply_all<E2M1, 2>(w, x, prepared, y, first, last);
    return multiply_all<E2M1, 4>(w, x, prepared, y, first, last);
}

template <class E2M1, class E4M3>
constexpr Path kPath = {"int8", prepared_bytes, prepare<E2M1, E4M3>, multiply<E2M1, E4M3>, kPanels};

}  // namespace

extern const Path kInt8Path = kPath<E2M1Bytes, E4M3Words>;
#if defined(MINIFLOAT_AVX_VNNI)
extern const Path kInt8VnniPath = kPath<E2M1Vnni, E4M3Vnni>;
#endif

}  // namespace MINIFLOAT_ISA

#endif
