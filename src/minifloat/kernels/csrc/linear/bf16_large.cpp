// AVX512_BF16 for many rows of x. A chunk of a panel (32 rows of W, some hundred columns) is decoded into the L1 cache and
// multiplied with all rows of x, kDotRows at a time; the sums and the columns of x that belong to the chunk are in the L2
// cache.
//
// For each chunk of columns all panels of a call are processed, so that x is read from beyond L2 only once per call. Rows
// of x that do not fit L2 form another block, for which W is decoded again.
#include "../threads.h"
#include "bf16_dot.h"
#include "bf16_tiles.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kPanels = Finish::kMaxPanels;
constexpr int64_t kChunkSteps = 8;  // 32 KiB of bf16
constexpr int64_t kChunkUnits = kChunkSteps * 2;
constexpr int64_t kChunkBytes = kChunkSteps * kStepTiles * kTileBytes;
constexpr int64_t kBlockTiles = 20;  // tiles of x of a block: 240 KiB, and as much of sums
constexpr int64_t kTileSums = kDotRows * kPanelRows;

// sums [kRows][kPanelRows] (+)= kRows rows of x times decoded units, two tiles each, times `scale`.
template <int kRows, bool kScaled>
__attribute__((noinline)) void multiply_units(const uint8_t* x, int64_t unit_bytes, const uint8_t* tiles,
                                              int64_t units, bool first, const __m512 (&scale)[2], float* sums) {
    __m512 total[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < 2; ++t) {
            _mm_prefetch(reinterpret_cast<const char*>(sums + r * kPanelRows + t * kTileRows), _MM_HINT_T0);
            total[r][t] = _mm512_setzero_ps();
        }
    for (int64_t u = 0; u < units; ++u, x += unit_bytes, tiles += 2 * kTileBytes)
        for (int p = 0; p < kUnitPairs; ++p) {
            const __m512bh a = bit_cast<__m512bh>(_mm512_load_si512(tiles + p * kVectorBytes));
            const __m512bh b = bit_cast<__m512bh>(_mm512_load_si512(tiles + kTileBytes + p * kVectorBytes));
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const __m512bh factor = broadcast_pair(x + r * kVectorBytes + p * 4);
                total[r][0] = _mm512_dpbf16_ps(total[r][0], a, factor);
                total[r][1] = _mm512_dpbf16_ps(total[r][1], b, factor);
            }
        }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < 2; ++t) {
            float* to = sums + r * kPanelRows + t * kTileRows;
            if (kScaled) total[r][t] = _mm512_mul_ps(total[r][t], scale[t]);
            _mm512_store_ps(to, first ? total[r][t] : _mm512_add_ps(_mm512_load_ps(to), total[r][t]));
        }
}

template <int kRows, bool kScaled>
void multiply_rows(int rows, const uint8_t* x, int64_t unit_bytes, const uint8_t* tiles, int64_t units, bool first,
                   const __m512 (&scale)[2], float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows)
            return multiply_rows<kRows - 1, kScaled>(rows, x, unit_bytes, tiles, units, first, scale, sums);
    }
    multiply_units<kRows, kScaled>(x, unit_bytes, tiles, units, first, scale, sums);
}

template <class Format>
class Product {
  public:
    Product(const Format& format, const Weight& w, const Input& x, const uint8_t* packed, const Output& y,
            uint8_t* scratch, int64_t first, int64_t last)
        : format_(format), w_(w), x_(x), packed_(packed), y_(y), t_(dot_tiling(x.m)), first_(first), last_(last),
          decoded_(scratch), sums_(reinterpret_cast<float*>(scratch + kChunkBytes)) {}

    void run() {
        const int64_t blocks = ceil_div(t_.pairs, kBlockTiles);
        for (int64_t b = 0; b < blocks; ++b) multiply_block(t_.pairs * b / blocks, t_.pairs * (b + 1) / blocks);
    }

  private:
    void multiply_block(int64_t begin, int64_t end) {
        const int64_t panel_floats = (end - begin) * kTileSums;
        for (int64_t s = 0; s < w_.steps; s += kChunkSteps)
            for (int64_t p = first_; p < last_; ++p)
                multiply_chunk(p, s, min(kChunkSteps, w_.steps - s), begin, end,
                               sums_ + (p - first_) * panel_floats);
        const Finish finish(w_, y_, first_, last_, Format::kFactor);
        for (int64_t tile = begin; tile < end; ++tile)
            store_dots(w_, y_, tile * t_.rows, rows_of(t_, x_.m, tile), first_, last_, finish,
                       sums_ + (tile - begin) * kTileSums, panel_floats);
    }

    // Multiplies steps s .. s + steps - 1 of a panel with tiles begin .. end - 1 of x.
    void multiply_chunk(int64_t p, int64_t s, int64_t steps, int64_t begin, int64_t end, float* sums) {
        const uint8_t* const tiles = decode(p, s, steps);
        const int64_t units = steps * 2, tile_bytes = units * t_.unit_bytes();
        const uint8_t* x = packed_ + s * 2 * t_.pairs * t_.unit_bytes() + begin * tile_bytes;
        for (int64_t tile = begin; tile < end; ++tile, x += tile_bytes, sums += kTileSums) {
            const int rows = rows_of(t_, x_.m, tile);
            if (Format::kBlocks) {
                multiply_groups(rows, p, s * 2, units, x, tiles, sums);
            } else {
                const __m512 none[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
                multiply_rows<kDotRows, false>(rows, x, t_.unit_bytes(), tiles, units, s == 0, none, sums);
            }
        }
    }

    const uint8_t* decode(int64_t p, int64_t s, int64_t steps) const {
        const uint8_t* step = w_.panel(p) + s * w_.step_bytes;
        if (!Format::kDecodes) return step;
        for (int64_t i = 0; i < steps; ++i, step += w_.step_bytes)
            for (int tile = 0; tile < kStepTiles; ++tile)
                format_.tile(step, tile, decoded_ + (i * kStepTiles + tile) * kTileBytes, prefetch_ahead);
        return decoded_;
    }

    // Multiplies the parts of a chunk that belong to each block of columns, one after the other.
    void multiply_groups(int rows, int64_t p, int64_t origin, int64_t units, const uint8_t* x, const uint8_t* tiles,
                         float* sums) const {
        const int64_t group_units = w_.block_cols / kHalfCols;
        for (int64_t u = 0; u < units;) {
            const int64_t group = min((origin + u) / group_units, w_.groups - 1);
            const int64_t end = group + 1 < w_.groups ? min(units, (group + 1) * group_units - origin) : units;
            const float* scales = w_.block_scale(p, group);
            __m512 scale[2];
            for (int t = 0; t < 2; ++t)
                scale[t] = w_.block_lanes == 1 ? _mm512_set1_ps(*scales) : _mm512_loadu_ps(scales + t * kTileRows);
            multiply_rows<kDotRows, true>(rows, x + u * t_.unit_bytes(), t_.unit_bytes(), tiles + u * 2 * kTileBytes,
                                          end - u, origin + u == 0, scale, sums);
            u = end;
        }
    }

    const Format& format_;
    const Weight& w_;
    const Input& x_;
    const uint8_t* packed_;
    const Output& y_;
    const Tiling t_;
    const int64_t first_, last_;
    uint8_t* const decoded_;
    float* const sums_;
};

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return packed_x_bytes(w, dot_tiling(m)); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    pack_x(w, x, dot_tiling(x.m), kChunkUnits, prepared, part, parts);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const int64_t tiles = min(kBlockTiles, ceil_div(x.m, kDotRows));
    for (int64_t begin = first; begin < last; begin += kPanels) {
        const int64_t end = min(begin + kPanels, last);
        const int64_t bytes = kChunkBytes + (end - begin) * tiles * kTileSums * static_cast<int64_t>(sizeof(float));
        uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
        if (memory == nullptr) return false;
        with_format(w, begin, [&](const auto& format) {
            Product(format, w, x, prepared, y, memory, begin, end).run();
            return true;
        });
    }
    return true;
}

}  // namespace

extern const Path kBf16LargePath = {"bf16 large", prepared_bytes, prepare, multiply, kPanels};

}  // namespace MINIFLOAT_ISA

#endif
