// A few rows of x in float32 multiply-adds, for AVX2 and for ARM: weights go from memory through registers into sums.
#include "decode.h"
#include "path.h"

#if (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__aarch64__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int kPanelParts = kPanelRows / kWidth;
constexpr int kTileParts = kTileRows / kWidth;
constexpr int kMaxRows = 4;  // rows of x that share the decoding

// Parts of a panel whose sums are in registers together.
constexpr int parts_at_once(int rows) { return rows <= 2 ? kPanelParts : kTileParts; }

// With one row, sums of alternate columns hide the latency of the multiply-add; the batch-invariant path leaves that out.
constexpr int chains_of(int rows, bool invariant) { return rows == 1 && !invariant ? 2 : 1; }

// A way of decoding: vectors of a step that are is_normal() are decoded by Normal, the others by Any, to the same values.
template <class Part>
struct Always {
    typedef Part Any;
    typedef Part Normal;
    static uint32_t normal_of(const Weight&, int64_t, int64_t) { return 0; }
    static bool is_normal(uint32_t, int) { return true; }
};

#if defined(__AVX2__)
// Normal numbers of E4M3 s eeee mmm to bf16: the exponent e becomes e + 120, so the first byte is a function of the
// highest four bits, and the second byte is e0 mmm 0000, the lowest four bits.
struct NormalE4M3Part {
    static constexpr int kCols = 4;
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            60, 61, 62, 63, 64, 65, 66, 67, 60 - 128, 61 - 128, 62 - 128, 63 - 128, 64 - 128, 65 - 128, 66 - 128,
            67 - 128));
        const __m256i low = _mm256_set1_epi8(0xf), top = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
        const __m256i codes = load_as<__m256i>(p);
        const __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
        const __m256i second = _mm256_andnot_si256(low, _mm256_slli_epi16(codes, 4));
        const __m256i k01 = _mm256_unpacklo_epi8(second, first), k23 = _mm256_unpackhi_epi8(second, first);
        cols[0] = _mm256_castsi256_ps(_mm256_slli_epi32(k01, 16));
        cols[1] = _mm256_castsi256_ps(_mm256_and_si256(k01, top));
        cols[2] = _mm256_castsi256_ps(_mm256_slli_epi32(k23, 16));
        cols[3] = _mm256_castsi256_ps(_mm256_and_si256(k23, top));
    }
};

// The same values as NormalE4M3Part where both can decode.
struct AnyE4M3Part {
    static constexpr int kCols = 4;
    static constexpr float kFactor = 1.0f;
    static void unpack(const uint8_t* p, F32 (&cols)[kCols]) {
        E4M3Part::unpack(p, cols);
        for (F32& col : cols) col *= E4M3Part::kFactor;
    }
};

struct MostlyNormal {
    typedef AnyE4M3Part Any;
    typedef NormalE4M3Part Normal;
    static uint32_t normal_of(const Weight& w, int64_t p, int64_t s) { return w.normal(p)[s]; }
    static bool is_normal(uint32_t normal, int vector) { return normal >> vector & 1; }
    // Whether distinguishing vectors pays off, judged by one step of 16: in trained weights one code in some thousand is
    // zero or subnormal; with one in a hundred the branch would be mispredicted all the time.
    static bool pays_off(const Weight& w, int64_t p) { return __builtin_popcount(normal_of(w, p, 0)) >= 15; }
};
#endif

// Hides from the compiler where x is, so that it reads x for each part of W again: kept for the next part, columns of x
// take the registers of sums.
inline const float* opaque(const float* x) {
    __asm__("" : "+r"(x));
    return x;
}

// Adds the products of a vector of kParts parts at addresses p(i) and its columns of x.
template <class Part, int kRows, int kParts, int kChains, class Address>
inline __attribute__((always_inline)) void add_vector(const Address& p, const float* x, int64_t x_stride,
                                                      F32 (&sums)[kRows][kParts][kChains]) {
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
        F32 cols[Part::kCols];
        Part::unpack(p(i), cols);
        if (kRows > 2) x = opaque(x);
#pragma GCC unroll 8
        for (int k = 0; k < Part::kCols; ++k)
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) sums[r][i][k % kChains] += cols[k] * x[r * x_stride + k];
    }
}

// out [kRows][kPanelParts] += scales times the sums of a group: kVectors vectors of each tile from `data` on, of which the
// first is vector `first_vector` of a step. Prefetches as many lines from `line` on.
template <class Decoder, int kVectors, int kRows, int kChains>
inline __attribute__((always_inline)) void add_group(const uint8_t* data, int64_t tile_bytes, const uint8_t*& line,
                                                     uint32_t normal, int first_vector, const float* x, int64_t x_stride,
                                                     const F32 (&scales)[kPanelParts], F32 (*out)[kPanelParts]) {
    typedef typename Decoder::Any Any;
    typedef typename Decoder::Normal Normal;
    constexpr int kAtOnce = parts_at_once(kRows);
    for (int first = 0; first < kPanelParts; first += kAtOnce) {
        F32 sums[kRows][kAtOnce][kChains] = {};
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
            for (int t = 0; t < kAtOnce / kTileParts; ++t, line += kVectorBytes) prefetch_ahead(line);
            const auto part = [&](int i) {
                return data + (first + i) / kTileParts * tile_bytes + v * kVectorBytes +
                       (first + i) % kTileParts * MINIFLOAT_VECTOR_BYTES;
            };
            const float* columns = x + v * Any::kCols;
            if (__builtin_expect(Decoder::is_normal(normal, first_vector + v), 1)) {
                add_vector<Normal>(part, columns, x_stride, sums);
            } else {
                add_vector<Any>(part, columns, x_stride, sums);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; ++i)
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                F32 total = sums[r][i][0];
                if (kChains == 2) total += sums[r][i][kChains - 1];
                out[r][first + i] += total * scales[first + i];
            }
    }
}

// out [kRows][kPanelParts] = kRows rows of x times panel `p`. Not inlined: next to other loops the compiler spills
// registers.
template <class Decoder, int kGroupCols, int kChains, int kRows>
__attribute__((noinline)) void multiply_panel(const Weight& w, int64_t p, const float* x, int64_t x_stride,
                                              F32 (&out)[kRows][kPanelParts]) {
    constexpr int kCols = Decoder::Any::kCols, kVectors = kGroupCols / kCols;
    constexpr int64_t kTileBytes = kHalfCols / kCols * kVectorBytes;
    for (auto& row : out)
        for (F32& sum : row) sum = F32{};
    const uint8_t* step = w.panel(p);
    for (int64_t s = 0; s < w.steps; ++s, step += w.step_bytes) {
        for (int i = 0; i < w.scale_bytes; i += kVectorBytes) prefetch_ahead(step + i);
        const uint8_t* half = step + w.scale_bytes;
        const uint8_t* line = half;
        const uint32_t normal = Decoder::normal_of(w, p, s);
        for (int col = 0; col < kStepCols; col += kHalfCols, half += 2 * kTileBytes)
            for (int group = 0; group < kHalfCols; group += kGroupCols, x += kGroupCols) {
                F32 scales[kPanelParts];
                for (int i = 0; i < kPanelParts; ++i) scales[i] = scales_of(w, p, s, col + group, i * kWidth);
                add_group<Decoder, kVectors, kRows, kChains>(half + group / kCols * kVectorBytes, kTileBytes, line, normal,
                                                    (col + group) / kCols, x, x_stride, scales, out);
            }
    }
}

template <class Decoder, int kGroupCols, int kChains, int kRows>
void multiply_rows(const Weight& w, const float* x, int64_t x_stride, int64_t row, const Output& y, int64_t p) {
    F32 sums[kRows][kPanelParts];
    multiply_panel<Decoder, kGroupCols, kChains>(w, p, x + row * x_stride, x_stride, sums);
    for (int r = 0; r < kRows; ++r) {
        alignas(64) float floats[kPanelRows];
        for (int i = 0; i < kPanelParts; ++i) store_as(floats + i * kWidth, sums[r][i] * Decoder::Any::kFactor);
        store_row(w, y, p, row + r, floats);
    }
}

template <class Decoder, bool kInvariant, int kGroupCols = kHalfCols>
void multiply_all(const Weight& w, const float* x, int64_t m, const Output& y, int64_t p) {
    const int64_t x_stride = w.steps * kStepCols;
    // All rows for one panel before the next panel: rows after the first find the weights in the cache.
    for (int64_t row = 0; row < m; row += kMaxRows) {
        const int64_t rows = min<int64_t>(kMaxRows, m - row);
        if (rows == 1) multiply_rows<Decoder, kGroupCols, chains_of(1, kInvariant), 1>(w, x, x_stride, row, y, p);
        if (rows == 2) multiply_rows<Decoder, kGroupCols, 1, 2>(w, x, x_stride, row, y, p);
        if (rows == 3) multiply_rows<Decoder, kGroupCols, 1, 3>(w, x, x_stride, row, y, p);
        if (rows == 4) multiply_rows<Decoder, kGroupCols, 1, 4>(w, x, x_stride, row, y, p);
    }
}

template <bool kInvariant>
bool multiply(const Weight& w, const Input& in, const uint8_t* prepared, const Output& y, int64_t first,
              int64_t last) {
    const float* x = reinterpret_cast<const float*>(prepared);
    for (int64_t p = first; p < last; ++p) {
        if (w.element == MINIFLOAT_WEIGHT_BF16) {
            multiply_all<Always<Bf16Part>, kInvariant>(w, x, in.m, y, p);
        } else if (w.element == MINIFLOAT_WEIGHT_F16) {
            multiply_all<Always<F16Part>, kInvariant>(w, x, in.m, y, p);
        } else if (w.element == MINIFLOAT_WEIGHT_F32) {
            multiply_all<Always<F32Part>, kInvariant>(w, x, in.m, y, p);
        } else if (w.element == MINIFLOAT_E2M1 && w.grid == MINIFLOAT_GRID_E4M3) {
            multiply_all<Always<E2M1Part>, kInvariant, kE4M3Cols>(w, x, in.m, y, p);
        } else if (w.element == MINIFLOAT_E2M1) {
            multiply_all<Always<E2M1Part>, kInvariant>(w, x, in.m, y, p);
#if defined(__AVX2__)
        } else if (MostlyNormal::pays_off(w, p)) {
            multiply_all<MostlyNormal, kInvariant>(w, x, in.m, y, p);
#endif
        } else {
            multiply_all<Always<E4M3Part>, kInvariant>(w, x, in.m, y, p);
        }
    }
    return true;
}

}  // namespace

extern const Path kFewRowsPath, kFewRowsInvariantPath;
const Path kFewRowsPath = {"few rows", float_rows_bytes, to_float_rows, multiply<false>};
const Path kFewRowsInvariantPath = {"few rows invariant", float_rows_bytes, to_float_rows, multiply<true>};

}  // namespace MINIFLOAT_ISA

#endif
