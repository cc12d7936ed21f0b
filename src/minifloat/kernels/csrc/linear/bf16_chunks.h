// The order of products of the AVX512_BF16 paths for more rows of x than bf16_small.cpp takes. Sums of a chunk go on
// where those of the chunk before ended, in one chain of dot products: the order of bf16_small.cpp's batch-invariant
// path.
#pragma once

#include "../threads.h"
#include "bf16_dot.h"
#include "bf16_tiles.h"

#if defined(__AVX512BF16__)

namespace MINIFLOAT_ISA {

constexpr int64_t kPanels = Finish::kMaxPanels;
constexpr int64_t kFewRows = 48;
constexpr int64_t kBlockRows = 384;        // rows of x of a block: 384 KiB of sums, 384 KiB of x
constexpr int64_t kBytesInL2 = 512 << 10;  // of x, which stay in the L2 cache from one chunk of columns to its next use
constexpr float kSmallestScale = 0x1p-100f;  // of blocks whose sums are joined: ratios of subnormal numbers are not exact
constexpr int64_t kScratchBytes = 2 << 20;  // in one 2 MB page

// Memory that is prefetched into the L2 cache, some lines per unit.
struct Stream {
    const uint8_t *next, *end;
    int64_t bytes;  // per unit

    Stream() : next(nullptr), end(nullptr), bytes(0) {}
    Stream(const uint8_t* from, int64_t count, int64_t units)
        : next(from), end(from + count), bytes(round_up(ceil_div(count, units), kVectorBytes)) {}

    void unit() {
        for (const uint8_t* stop = min(next + bytes, end); next < stop; next += kVectorBytes)
            _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    }
};

// The next chunk of W, and the columns of x that the next column of chunks needs.
struct Ahead {
    Stream w, x;
};

// Units of a chunk with one scale per row of W, or without scales.
struct Units {
    const uint8_t* step;  // of the first unit, packed
    uint8_t* tiles;       // of the chunk, decoded
    bool decoded;         // whether `tiles` are filled
    int32_t step_bytes, scale_bytes;
    int64_t begin, end;  // of the chunk
    int64_t middle;      // up to it, sums are multiplied by `ratio`; `end` if all units have one scale
    float ratio;
    bool first;  // of all columns
    const float* scales;
    int32_t scale_lanes;

    __m512 scale(int tile) const {
        return scale_lanes == 1 ? _mm512_set1_ps(*scales) : _mm512_loadu_ps(scales + tile * kTileRows);
    }
};

template <class Kernel>
constexpr int64_t kChunkUnits = Kernel::kChunkSteps * 2;
template <class Kernel>
constexpr int64_t kChunkBytes = Kernel::kChunkSteps * kStepTiles * kTileBytes;

template <class Kernel, int kRows = Kernel::kRows, class Format>
void multiply_rows(int rows, const Format& format, const uint8_t* x, int64_t unit_bytes, const Units& units,
                   Ahead& ahead, float* sums) {
    if constexpr (kRows > Kernel::kFewestRows) {
        if (rows < kRows) return multiply_rows<Kernel, kRows - 1>(rows, format, x, unit_bytes, units, ahead, sums);
    }
    Kernel::template multiply<kRows>(format, x, unit_bytes, units, ahead, sums);
}

// The product of x and some panels. Kernel says how many rows a tile of x has, how many steps a chunk has (kChunkSteps),
// whether the first tile decodes for the others (kKeeps) and whether it prefetches what Ahead says (kAhead), and multiplies
// units of a chunk.
template <class Kernel, class Format>
class Product {
  public:
    Product(const Format& format, const Weight& w, const Input& x, const uint8_t* packed, const Output& y,
            uint8_t* scratch, int64_t first, int64_t last)
        : format_(format), w_(w), x_(x), packed_(packed), y_(y), t_(dot_tiling(x.m, Kernel::kRows)), first_(first),
          last_(last), decoded_(scratch), sums_(reinterpret_cast<float*>(scratch + kChunkBytes<Kernel>)) {}

    void run() {
        const int64_t blocks = ceil_div(t_.pairs, kBlockRows / Kernel::kRows);
        for (int64_t b = 0; b < blocks; ++b) multiply_block(t_.pairs * b / blocks, t_.pairs * (b + 1) / blocks);
    }

  private:
    void multiply_block(int64_t begin, int64_t end) {
        const int64_t panel_floats = (end - begin) * Kernel::kSums;
        for (int64_t s = 0; s < w_.steps; s += Kernel::kChunkSteps)
            for (int64_t p = first_; p < last_; ++p)
                multiply_chunk(p, s, begin, end, sums_ + (p - first_) * panel_floats);
        const Finish finish(w_, y_, first_, last_, Format::kFactor);
        for (int64_t tile = begin; tile < end; ++tile)
            store_dots(w_, y_, tile * t_.rows, rows_of(t_, x_.m, tile), first_, last_, finish,
                       sums_ + (tile - begin) * Kernel::kSums, panel_floats);
    }

    int64_t steps_at(int64_t s) const { return min(Kernel::kChunkSteps, w_.steps - s); }
    const uint8_t* step(int64_t p, int64_t s) const { return w_.panel(p) + s * w_.step_bytes; }

    // What follows steps s .. of panel p, of which `units` units are multiplied meanwhile with tiles begin .. end - 1.
    Ahead ahead_of(int64_t p, int64_t s, int64_t begin, int64_t end, int64_t units) const {
        Ahead ahead;
        if (!Kernel::kAhead) return ahead;
        const int64_t after = s + Kernel::kChunkSteps < w_.steps ? s + Kernel::kChunkSteps : 0;
        const bool same = p + 1 < last_;
        const int64_t next = same ? s : after, panel = same ? p + 1 : after > 0 ? first_ : last_;
        if (panel < w_.panels) ahead.w = Stream(step(panel, next), steps_at(next) * w_.step_bytes, units);
        if (packed_x_bytes(w_, t_) > kBytesInL2) {  // each panel prefetches its share
            const int64_t bytes = (end - begin) * steps_at(after) * 2 * t_.unit_bytes();
            const int64_t share = round_up(ceil_div(bytes, last_ - first_), kVectorBytes);
            const int64_t from = min((p - first_) * share, bytes);
            ahead.x = Stream(x_at(after, begin) + from, min(share, bytes - from), units);
        }
        return ahead;
    }

    // The columns from step s of tiles `tile` .. of x.
    const uint8_t* x_at(int64_t s, int64_t tile) const {
        return packed_ + (s * t_.pairs + tile * steps_at(s)) * 2 * t_.unit_bytes();
    }

    // Multiplies the chunk from step s of a panel with tiles begin .. end - 1 of x.
    void multiply_chunk(int64_t p, int64_t s, int64_t begin, int64_t end, float* sums) {
        const int64_t units = steps_at(s) * 2, tile_bytes = units * t_.unit_bytes();
        const uint8_t* x = x_at(s, begin);
        Ahead ahead = ahead_of(p, s, begin, end, units * (end - begin));
        Units parts[kChunkUnits<Kernel>];
        const int count = parts_of(p, s, units, parts);
        for (int64_t tile = begin; tile < end; ++tile, x += tile_bytes, sums += Kernel::kSums) {
            const int rows = rows_of(t_, x_.m, tile);
            for (int i = 0; i < count; ++i) {
                parts[i].decoded = !Format::kDecodes || (Kernel::kKeeps && tile > begin);
                multiply_rows<Kernel>(rows, format_, x, t_.unit_bytes(), parts[i], ahead, sums);
            }
        }
    }

    // Cuts a chunk into the parts that belong to each block of columns and returns their number.
    int parts_of(int64_t p, int64_t s, int64_t units, Units (&parts)[kChunkUnits<Kernel>]) const {
        const int64_t origin = s * 2;
        int count = 0;
        Units part = {};
        part.step_bytes = w_.step_bytes;
        part.scale_bytes = w_.scale_bytes;
        part.scale_lanes = w_.block_lanes;
        // Packed BF16 needs no decoding.
        part.tiles = Format::kDecodes ? decoded_ : const_cast<uint8_t*>(step(p, s));
        for (int64_t u = 0; u < units; u = part.end) {
            part.begin = u;
            part.end = units;
            if (Format::kBlocks) {
                const int64_t block_units = w_.block_cols / kHalfCols;
                const int64_t group = min((origin + u) / block_units, w_.groups - 1);
                if (group + 1 < w_.groups) part.end = min(units, (group + 1) * block_units - origin);
                part.scales = w_.block_scale(p, group);
            }
            part.middle = part.end;
            if (Format::kBlocks && part.end < units) join(p, units, origin, part);
            part.first = origin + u == 0;
            part.step = step(p, s + u / 2);
            parts[count++] = part;
        }
        return count;
    }

    // Extends units to the next block of columns, if the ratio of their scales costs no accuracy: sums are then in
    // memory half as often.
    void join(int64_t p, int64_t units, int64_t origin, Units& part) const {
        constexpr float kMostRatio = 256.0f;
        const int64_t block_units = w_.block_cols / kHalfCols, group = (origin + part.end) / block_units;
        if (w_.block_lanes != 1 || group >= w_.groups) return;
        const float* next = w_.block_scale(p, group);
        const float ratio = *part.scales / *next;
        if (!(ratio <= kMostRatio && ratio >= 1.0f / kMostRatio && *next >= kSmallestScale)) return;
        part.ratio = ratio;
        part.scales = next;
        part.end = group + 1 < w_.groups ? min(units, (group + 1) * block_units - origin) : units;
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

template <class Kernel, class Format>
void run(const Format& format, const Weight& w, const Input& x, const uint8_t* packed, const Output& y,
         uint8_t* scratch, int64_t first, int64_t last) {
    Product<Kernel, Format>(format, w, x, packed, y, scratch, first, last).run();
}

// The functions of a Path.
template <class Kernel>
struct ChunkPath {
    static int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) {
        return packed_x_bytes(w, dot_tiling(m, Kernel::kRows));
    }

    static void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
        pack_x(w, x, dot_tiling(x.m, Kernel::kRows), kChunkUnits<Kernel>, prepared, part, parts);
    }

    static bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first,
                         int64_t last) {
        const int64_t panels = x.m <= kFewRows ? 1 : kPanels;
        const int64_t tiles = min(kBlockRows / Kernel::kRows, ceil_div(x.m, Kernel::kRows));
        const int64_t floats = tiles * min(panels, last - first) * Kernel::kSums;
        const int64_t bytes = max(kScratchBytes, kChunkBytes<Kernel> + floats * static_cast<int64_t>(sizeof(float)));
        uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
        if (memory == nullptr) return false;
        return with_format(w, first, [&](const auto& format) {
            for (int64_t begin = first; begin < last; begin += panels)
                run<Kernel>(format, w, x, prepared, y, memory, begin, min(begin + panels, last));
            return true;
        });
    }
};

}  // namespace MINIFLOAT_ISA

#endif
