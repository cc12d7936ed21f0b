// AVX512_BF16 for many rows of x: tiles of 12 rows and two vectors of W.
#include "bf16_chunks.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

// Keeps the decoded vectors of a unit.
struct StoreDecoded {
    uint8_t* tiles;
    void line(const uint8_t* p) const { _mm_prefetch(reinterpret_cast<const char*>(p + kNearBytes), _MM_HINT_T0); }
    void keep(int tile, int pair, __m512i w) const {
        _mm512_store_si512(tiles + tile * kTileBytes + pair * kVectorBytes, w);
    }
};

struct Large {
    static constexpr int kRows = kDotRows, kFewestRows = 1;
    static constexpr int64_t kChunkSteps = 8, kSums = kRows * kPanelRows;
    static constexpr bool kKeeps = true, kAhead = true;

    // sums [kRows][kPanelRows] (+)= kRows rows of x times units, times their scales. One chain of sums, as in
    // bf16_small.cpp.
    template <int kRows, class Format>
    __attribute__((noinline)) static void multiply(const Format& format, const uint8_t* x, int64_t unit_bytes,
                                                   const Units& units, Ahead& ahead, float* sums) {
        DotSums<kRows, 1> dots;
        if (Format::kBlocks || units.first) {
            dots.clear();
        } else {
            dots.load(sums);
        }
        for (int i = 0; Format::kBlocks && i < kRows * kPanelRows; i += kTileRows)
            _mm_prefetch(reinterpret_cast<const char*>(sums + i), _MM_HINT_T0);
        const uint8_t* step = units.step;
        uint8_t* tiles = units.tiles + units.begin * 2 * kTileBytes;
        x += units.begin * unit_bytes;
        if (!units.decoded) {
            for (int64_t u = units.begin; u < units.end; ++u, x += unit_bytes, tiles += 2 * kTileBytes) {
                ahead.w.unit();
                ahead.x.unit();
                if (Format::kBlocks && u == units.middle) dots.multiply(units.ratio);
                add_half<kRows>(format, step, units.scale_bytes, static_cast<int>(u & 1), x, dots, StoreDecoded{tiles});
                if (u & 1) step += units.step_bytes;
            }
        } else {
            for (int64_t u = units.begin; u < units.end; ++u, x += unit_bytes, tiles += 2 * kTileBytes) {
                ahead.w.unit();
                ahead.x.unit();
                if (Format::kBlocks && u == units.middle) dots.multiply(units.ratio);
                for (int p = 0; p < kUnitPairs; ++p) {
                    const uint8_t* w = tiles + p * kVectorBytes;
                    const __m512bh a = bit_cast<__m512bh>(_mm512_load_si512(w));
                    const __m512bh b = bit_cast<__m512bh>(_mm512_load_si512(w + kTileBytes));
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; ++r) {
                        const __m512bh factor = broadcast_pair(x + r * kVectorBytes + p * 4);
                        dots.v[r][0][0] = _mm512_dpbf16_ps(dots.v[r][0][0], a, factor);
                        dots.v[r][1][0] = _mm512_dpbf16_ps(dots.v[r][1][0], b, factor);
                    }
                }
            }
        }
        if (!Format::kBlocks || units.first) {
            store<kRows, Format>(dots, units, sums, [](const float*, __m512 total) { return total; });
        } else {
            store<kRows, Format>(dots, units, sums,
                                 [](const float* to, __m512 total) { return _mm512_add_ps(_mm512_load_ps(to), total); });
        }
    }

  private:
    // sums = add(sums, dots times the scales of the units)
    template <int kRows, class Format, class Add>
    static inline __attribute__((always_inline)) void store(const DotSums<kRows, 1>& dots, const Units& units,
                                                            float* sums, const Add& add) {
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
            const __m512 scale = Format::kBlocks ? units.scale(t) : _mm512_setzero_ps();
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* to = sums + r * kPanelRows + t * kTileRows;
                const __m512 total = dots.total(r, t);
                _mm512_store_ps(to, add(to, Format::kBlocks ? _mm512_mul_ps(total, scale) : total));
            }
        }
    }
};

}  // namespace

extern const Path kBf16LargePath = {"bf16 large", ChunkPath<Large>::prepared_bytes, ChunkPath<Large>::prepare,
                                    ChunkPath<Large>::multiply, kPanels};

}  // namespace MINIFLOAT_ISA

#endif
