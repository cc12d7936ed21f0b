// AMX for up to 32 rows of x, where the time is that of reading the weights: a step is decoded while the tiles of the
// one before it are multiplied, and the sums of a panel stay in the tile registers from its first column to its last.
#include "../threads.h"
#include "amx_decode.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int kAhead = 3072;  // bytes of weights between prefetching and reading

constexpr int kStepBytes = kStepTiles * kTileBytes;  // decoded
constexpr int kPairFloats = 4 * kTileFloats;

template <bool kTwo>
inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool kTwo>
inline void take_sums(float* out) {
    _tile_stored(0, out, kVectorBytes);
    _tile_stored(1, out + kTileFloats, kVectorBytes);
    if (kTwo) {
        _tile_stored(2, out + 2 * kTileFloats, kVectorBytes);
        _tile_stored(3, out + 3 * kTileFloats, kVectorBytes);
    }
}

// One unit: 32 columns of x, behind each other its tiles and their planes, times two tiles of W.
template <bool kTwo>
inline const uint8_t* multiply_unit(const Tiling& t, const uint8_t* x, const uint8_t* tiles) {
    const int tile_bytes = t.rows * kVectorBytes;
    _tile_loadd(6, tiles, kVectorBytes);
    _tile_loadd(7, tiles + kTileBytes, kVectorBytes);
    for (int plane = 0; plane < t.planes; ++plane, x += tile_bytes) {
        _tile_loadd(4, x, kVectorBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (kTwo) {
            _tile_loadd(5, x + t.planes * tile_bytes, kVectorBytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    return kTwo ? x + t.planes * tile_bytes : x;
}

template <bool kTwo, class Format>
void multiply_panels(const Format& format, const Weight& w, const Tiling& t, const Input& x, const uint8_t* packed,
                     const Output& y, int64_t first, int64_t last) {
    alignas(64) uint8_t decoded[2][Format::kDecodes ? kStepBytes : kVectorBytes];
    alignas(64) float sums[kPairFloats], block[kPairFloats];
    const uint8_t* step = w.panel(first);
    const uint8_t* end = w.panel(last);
    const int64_t block_units = w.block_cols / kHalfCols;
    int buffer = 0;
    if (Format::kDecodes)
        for (int i = 0; i < kStepTiles; ++i) format.template tile<_MM_HINT_T0>(step, i, decoded[0] + i * kTileBytes, kAhead);
    for (int64_t p = first; p < last; ++p) {
        const uint8_t* xs = packed;
        int64_t left = block_units, group = 0;
        zero_sums<kTwo>();
        for (int64_t s = 0; s < w.steps; ++s, step += w.step_bytes, buffer ^= 1) {
            const uint8_t* next = Format::kDecodes ? step + w.step_bytes : step;
            const uint8_t* tiles = Format::kDecodes ? decoded[buffer] : step;
            publish();
            if (next < end)
                for (int i = 0; i < kStepTiles; ++i)
                    format.template tile<_MM_HINT_T0>(next, i, decoded[buffer ^ 1] + i * kTileBytes, kAhead);
            for (int half = 0; half < 2; ++half) {
                xs = multiply_unit<kTwo>(t, xs, tiles + half * 2 * kTileBytes);
                if (Format::kBlocks && --left == 0 && group + 1 < w.groups) {
                    take_sums<kTwo>(block);
                    zero_sums<kTwo>();
                    add_block(w, p, group, t, group == 0, block, sums);
                    left = block_units;
                    ++group;
                }
            }
        }
        take_sums<kTwo>(Format::kBlocks ? block : sums);
        if (Format::kBlocks) add_block(w, p, group, t, group == 0, block, sums);
        store_tiles(w, y, x.m, t, p, 0, Format::kFactor, sums);
    }
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t x_dtype) { return packed_x_bytes(w, tiling(m, x_dtype)); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    pack_x(w, x, units_of(w), prepared, part, parts);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const Tiling t = tiling(x.m, x.dtype);
    const Tiles tiles(t.rows);
    return with_format(w, [&](const auto& format) {
        if (t.tiles == 1) {
            multiply_panels<false>(format, w, t, x, prepared, y, first, last);
        } else {
            multiply_panels<true>(format, w, t, x, prepared, y, first, last);
        }
        return true;
    });
}

}  // namespace

extern const Path kAmxSmallPath = {"amx small", prepared_bytes, prepare, multiply};

}  // namespace MINIFLOAT_ISA

#endif
