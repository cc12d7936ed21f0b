// AVX512_BF16 for more rows of x than bf16_small.cpp takes, and not yet many: tiles of 24 rows and one vector of W,
// which is decoded in registers for each tile.
#include "bf16_chunks.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

struct MediumTiles {
    static constexpr int kRows = 24, kFewestRows = kDotRows - 1;
    static constexpr int64_t kChunkSteps = 4, kSums = kRows * kPanelRows;
    static constexpr bool kKeeps = false, kAhead = false;

    template <int kRows, class Format>
    static void multiply(const Format& format, const uint8_t* x, int64_t unit_bytes, const Units& units, Ahead&,
                         float* sums) {
        for (int t = 0; t < 2; ++t) multiply_tile<kRows>(format, x, unit_bytes, units, t, sums + t * kTileRows);
    }

  private:
    // Columns of tile `tile` of W, 16 of a panel.
    template <int kRows, class Format>
    __attribute__((noinline)) static void multiply_tile(const Format& format, const uint8_t* x, int64_t unit_bytes,
                                                        const Units& units, int tile, float* sums) {
        __m512 dots[kRows];
#pragma GCC unroll 32
        for (int r = 0; r < kRows; ++r) {
            const bool goes_on = !Format::kBlocks && !units.first;
            dots[r] = goes_on ? _mm512_load_ps(sums + r * kPanelRows) : _mm512_setzero_ps();
            if (Format::kBlocks) _mm_prefetch(reinterpret_cast<const char*>(sums + r * kPanelRows), _MM_HINT_T0);
        }
        const uint8_t* step = units.step;
        x += units.begin * unit_bytes;
        for (int64_t u = units.begin; u < units.end; ++u, x += unit_bytes) {
            const uint8_t* next = step + kChunkSteps * units.step_bytes;
            if (tile == 0 && (u & 1) == 0)
                for (int i = 0; i < units.scale_bytes; i += kVectorBytes)
                    _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T1);
            if (Format::kBlocks && u == units.middle) {
#pragma GCC unroll 32
                for (int r = 0; r < kRows; ++r) dots[r] = _mm512_mul_ps(dots[r], _mm512_set1_ps(units.ratio));
            }
            add_tile<kRows>(format, step, next - step, units.scale_bytes, static_cast<int>(u & 1), tile, x, dots);
            if (u & 1) step += units.step_bytes;
        }
        const __m512 scale = Format::kBlocks ? units.scale(tile) : _mm512_setzero_ps();
        const auto store = [&](const auto& add) {
#pragma GCC unroll 32
            for (int r = 0; r < kRows; ++r) {
                float* to = sums + r * kPanelRows;
                _mm512_store_ps(to, add(to, Format::kBlocks ? _mm512_mul_ps(dots[r], scale) : dots[r]));
            }
        };
        if (!Format::kBlocks || units.first) {
            store([](const float*, __m512 total) { return total; });
        } else {
            store([](const float* to, __m512 total) { return _mm512_add_ps(_mm512_load_ps(to), total); });
        }
    }

    // Adds the products of 32 columns, half a step, and one tile of W; prefetches those of the next chunk, which follows in
    // memory after chunk_bytes. One line per vector: in bursts of several lines, prefetches wait for each other.
    template <int kRows, class Format>
    static inline __attribute__((always_inline)) void add_tile(const Format& format, const uint8_t* step,
                                                               int64_t chunk_bytes, int32_t scale_bytes, int half,
                                                               int tile, const uint8_t* x, __m512 (&dots)[kRows]) {
        constexpr int kVectors = kUnitPairs / Format::kPairs, kGroupVectors = kVectors / Format::kGroups;
        constexpr int kTile = kVectors * kVectorBytes;
        const uint8_t* data = step + scale_bytes + (half * 2 + tile) * kTile;
        const uint8_t* scales_of_tile = step + tile * kTileRows;
        for (int g = 0; g < Format::kGroups; ++g) {
            const typename Format::Scales scales = format.scales(scales_of_tile, half, g);
#pragma GCC unroll 1
            for (int i = 0; i < kGroupVectors; ++i, data += kVectorBytes, x += Format::kPairs * 4) {
                _mm_prefetch(reinterpret_cast<const char*>(data + 2 * kTile), _MM_HINT_T0);  // of the next half step
                _mm_prefetch(reinterpret_cast<const char*>(data + chunk_bytes), _MM_HINT_T1);
                __m512i pairs[Format::kPairs];
                format.template vector<kRows>(data, scales, 0, pairs);
#pragma GCC unroll 4
                for (int p = 0; p < Format::kPairs; ++p)
#pragma GCC unroll 32
                    for (int r = 0; r < kRows; ++r)
                        dots[r] = _mm512_dpbf16_ps(dots[r], bit_cast<__m512bh>(pairs[p]),
                                                   broadcast_pair(x + r * kVectorBytes + p * 4));
            }
        }
    }
};

}  // namespace

extern const Path kBf16MediumPath = {"bf16 medium", ChunkPath<MediumTiles>::prepared_bytes, ChunkPath<MediumTiles>::prepare,
                                   ChunkPath<MediumTiles>::multiply};

}  // namespace MINIFLOAT_ISA

#endif
