// AMX for more than 32 rows of x.
#include "../threads.h"
#include "amx.h"
#include "bf16_tiles.h"

#if defined(__AMX_BF16__)

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kGroupPanels = 8, kLargeGroupPanels = 16;
constexpr int64_t kPiecePanels = kGroupPanels + kLargeGroupPanels;
constexpr int64_t kBlockBytes = 512 << 10;  // bytes of x per chunk
constexpr int kPairFloats = 4 * kTileFloats;
// Scratch in one 2 MB page: walks through 4 KB pages would cost more than the memory.
constexpr int64_t kScratchBytes = 2 << 20;

// Steps of a chunk: up to 36 KiB of bf16, three quarters of the L1 cache, which x bypasses. Chunks are about equally long,
// because the sums are loaded and stored once in each.
inline int64_t chunk_steps(const Weight& w, const Tiling& t) {
    const int64_t most = t.pairs > 2 ? 9 : 5;
    return ceil_div(w.steps, ceil_div(w.steps, most));
}

// Where x has so few columns that enough of its rows stay in the L2 cache with the sums of a group, x is cut into such
// rows and read from memory once.
constexpr int64_t kCachedBytes = 800 << 10, kMostCachedBytes = 1350 << 10;
constexpr int64_t kLeastCachedPairs = 10;  // with fewer, decoding W again costs more than reading x again
// Larger weights are read once for all rows of x instead.
constexpr int64_t kMostWeightBytes = 8 << 20;

// Pairs of tiles of x that stay in the L2 cache; 0 where they would be too few.
inline int64_t cached_pairs(const Weight& w, int planes) {
    const int64_t x_bytes = units_of(w) * 2 * planes * kTileBytes;
    const int64_t pair_bytes = x_bytes + kGroupPanels * kPairFloats * static_cast<int64_t>(sizeof(float));
    const int64_t pairs = max(kCachedBytes / pair_bytes, kLeastCachedPairs);
    const bool small = w.panels * w.panel_bytes <= kMostWeightBytes;
    return small && pairs * pair_bytes <= kMostCachedBytes ? pairs : 0;
}

// Panels that read a chunk of x one after the other. Groups are larger where each reads it from memory.
inline int64_t group_panels(const Weight& w, const Tiling& t) {
    if (chunk_steps(w, t) == w.steps || cached_pairs(w, t.planes) > 0) return kGroupPanels;
    return packed_x_bytes(w, t) > 2 * kBlockBytes ? kLargeGroupPanels : kGroupPanels;
}

// Rows of x as blocks of pairs of tiles.
struct Blocks {
    int64_t pairs;  // of a block
    int64_t count;

    Blocks(const Weight& w, const Tiling& t) {
        const int64_t cached = cached_pairs(w, t.planes);
        const int64_t fitting = max<int64_t>(1, kBlockBytes / (chunk_steps(w, t) * 2 * t.unit_bytes()));
        count = cached > 0 ? max<int64_t>(1, (t.pairs + cached / 2) / cached) : ceil_div(t.pairs, fitting);
        pairs = ceil_div(t.pairs, count);
    }
};

int64_t decoded_bytes(const Weight& w, const Tiling& t) { return chunk_steps(w, t) * kStepTiles * kTileBytes; }

int64_t scratch_bytes(const Weight& w, const Tiling& t) {
    const int64_t pairs = 1 + group_panels(w, t) * Blocks(w, t).pairs;
    return 2 * decoded_bytes(w, t) + pairs * kPairFloats * static_cast<int64_t>(sizeof(float));
}

// The position of the loops: block of rows, group of panels, chunk of columns, panel.
struct Place {
    int64_t block, group, chunk, panel;
};

struct Loops {
    int64_t first, last;  // panels
    int64_t group_panels, blocks, chunks;

    int64_t group_end(const Place& at) const { return min(at.group + group_panels, last); }
    bool done(const Place& at) const { return at.block == blocks; }

    Place next(Place at) const {
        if (++at.panel < group_end(at)) return at;
        at.panel = at.group;
        if (++at.chunk < chunks) return at;
        at.chunk = 0;
        at.panel = at.group = group_end(at);
        if (at.group < last) return at;
        at.panel = at.group = first;
        ++at.block;
        return at;
    }
};

inline void load_sums(const float* sums) {
    _tile_loadd(0, sums, kVectorBytes);
    _tile_loadd(1, sums + kTileFloats, kVectorBytes);
    _tile_loadd(2, sums + 2 * kTileFloats, kVectorBytes);
    _tile_loadd(3, sums + 3 * kTileFloats, kVectorBytes);
}

inline void store_sums(float* sums) {
    _tile_stored(0, sums, kVectorBytes);
    _tile_stored(1, sums + kTileFloats, kVectorBytes);
    _tile_stored(2, sums + 2 * kTileFloats, kVectorBytes);
    _tile_stored(3, sums + 3 * kTileFloats, kVectorBytes);
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// x is loaded with a non-temporal hint: it is read from L2 each time and leaves L1 to W.
inline void multiply_unit(const Tiling& t, const uint8_t* x, const uint8_t* tiles) {
    const int tile_bytes = t.rows * kVectorBytes;
    const uint8_t* other = x + t.planes * tile_bytes;
    for (int plane = 0; plane < t.planes; ++plane, x += tile_bytes, other += tile_bytes) {
        _tile_stream_loadd(4, x, kVectorBytes);
        _tile_loadd(6, tiles, kVectorBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tiles + kTileBytes, kVectorBytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, other, kVectorBytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Decodes the tiles of one chunk, one per call, while another chunk is multiplied.
template <class Format>
class Decoder {
  public:
    Decoder(const Format& format, const uint8_t* chunk, int32_t step_bytes, int64_t steps, uint8_t* out, int64_t ahead)
        : format_(format), step_(chunk), step_bytes_(step_bytes), left_(steps * kStepTiles), out_(out), ahead_(ahead) {}

    int64_t left() const { return left_; }

    void tile() {
        format_.tile(step_, index_, out_, [this](const uint8_t* p) {
            _mm_prefetch(reinterpret_cast<const char*>(p + ahead_), _MM_HINT_T1);
        });
        out_ += kTileBytes;
        --left_;
        if (++index_ == kStepTiles) {
            index_ = 0;
            step_ += step_bytes_;
        }
    }

  private:
    const Format& format_;
    const uint8_t* step_;
    int64_t step_bytes_, left_;
    uint8_t* out_;
    int64_t ahead_;
    int index_ = 0;
};

template <class Format>
class Product {
  public:
    Product(const Format& format, const Weight& w, const Input& x, const uint8_t* packed, const Output& y,
            uint8_t* scratch, int64_t first, int64_t last)
        : format_(format), w_(w), x_(x), packed_(packed), y_(y), t_(tiling(x.m, x.dtype)), blocks_(w, t_),
          chunk_steps_(chunk_steps(w, t_)),
          loops_{first, last, group_panels(w, t_), blocks_.count, ceil_div(w.steps, chunk_steps_)},
          decoded_{scratch, scratch + decoded_bytes(w, t_)},
          block_(reinterpret_cast<float*>(scratch + 2 * decoded_bytes(w, t_))),
          sums_(block_ + kPairFloats) {}

    void run() {
        Place at = {0, loops_.first, 0, loops_.first};
        Decoder<Format> start = decoder(at, loops_.next(at), decoded_[0]);
        while (start.left() > 0) start.tile();
        for (int buffer = 0; !loops_.done(at); buffer ^= 1) {
            const Place next = loops_.next(at);
            const Place after = loops_.done(next) ? next : loops_.next(next);
            Decoder<Format> ahead = decoder(next, after, decoded_[buffer ^ 1]);
            multiply_chunk(at, Format::kDecodes ? decoded_[buffer] : chunk(at), ahead);
            at = next;
        }
    }

  private:
    int64_t steps(const Place& at) const { return min(chunk_steps_, w_.steps - at.chunk * chunk_steps_); }
    const uint8_t* chunk(const Place& at) const {
        return w_.panel(at.panel) + at.chunk * chunk_steps_ * w_.step_bytes;
    }

    Decoder<Format> decoder(const Place& at, const Place& after, uint8_t* out) const {
        const int64_t ahead = loops_.done(after) ? 0 : chunk(after) - chunk(at);
        return {format_, chunk(at), w_.step_bytes, loops_.done(at) ? 0 : steps(at), out, ahead};
    }

    void multiply_chunk(const Place& at, const uint8_t* tiles, Decoder<Format>& ahead) {
        const int64_t first = at.block * blocks_.pairs, count = min(blocks_.pairs, t_.pairs - first);
        const int64_t units = steps(at) * 2;
        const int64_t pair_bytes = units * t_.unit_bytes();
        const uint8_t* x = packed_ + at.chunk * chunk_steps_ * 2 * t_.pairs * t_.unit_bytes() + first * pair_bytes;
        float* sums = sums_ + (at.panel - at.group) * blocks_.pairs * kPairFloats;
        const int64_t share = ceil_div(ahead.left(), count);
        for (int64_t pair = 0; pair < count; ++pair, x += pair_bytes, sums += kPairFloats) {
            const int64_t keep = max<int64_t>(0, ahead.left() - share);
            publish();
            if (Format::kBlocks) {
                multiply_blocks(at, units, x, tiles, sums, ahead, keep);
            } else {
                if (at.chunk == 0) {
                    zero_sums();
                } else {
                    load_sums(sums);
                }
                multiply_units(0, units, x, tiles, ahead, keep);
                store_sums(sums);
            }
            while (ahead.left() > keep) ahead.tile();
        }
        if (at.chunk + 1 == loops_.chunks && at.panel + 1 == loops_.group_end(at)) store_group(at, first, count);
    }

    void store_group(const Place& at, int64_t first, int64_t count) {
        const int64_t panel_floats = blocks_.pairs * kPairFloats;
        for (int64_t panel = at.group; panel < loops_.group_end(at); panel += Finish::kMaxPanels) {
            const int64_t last = min<int64_t>(panel + Finish::kMaxPanels, loops_.group_end(at));
            const Finish finish(w_, y_, panel, last, Format::kFactor);
            for (int64_t pair = 0; pair < count; ++pair)
                store_panels(w_, y_, x_.m, t_, panel, last, first + pair, finish,
                             sums_ + (panel - at.group) * panel_floats + pair * kPairFloats, panel_floats);
        }
    }

    void multiply_units(int64_t begin, int64_t end, const uint8_t* x, const uint8_t* tiles, Decoder<Format>& ahead,
                        int64_t keep) {
        for (int64_t u = begin; u < end; ++u) {
            if (ahead.left() > keep) ahead.tile();
            multiply_unit(t_, x + u * t_.unit_bytes(), tiles + u * 2 * kTileBytes);
        }
    }

    // Multiplies the parts of the chunk that belong to each block of columns, one after the other.
    void multiply_blocks(const Place& at, int64_t units, const uint8_t* x, const uint8_t* tiles, float* sums,
                         Decoder<Format>& ahead, int64_t keep) {
        const int64_t block_units = w_.block_cols / kHalfCols, origin = at.chunk * chunk_steps_ * 2;
        int64_t group = 0;
        bool first = false;
        int waiting = 0;
        const auto add = [&] {
            const int tile = 2 * t_.tiles - waiting--;
            add_tile(w_, at.panel, group, t_, first, tile, block_, sums);
        };
        for (int64_t u = 0; u < units;) {
            const int64_t next = min((origin + u) / block_units, w_.groups - 1);
            const int64_t end = next + 1 < w_.groups ? min(units, (next + 1) * block_units - origin) : units;
            zero_sums();
            for (int64_t begin = u; begin < end; ++begin) {
                multiply_units(begin, begin + 1, x, tiles, ahead, keep);
                if (waiting > 0) add();
            }
            while (waiting > 0) add();
            store_sums(block_);
            group = next;
            first = origin + u == 0;
            waiting = 2 * t_.tiles;
            u = end;
        }
        while (waiting > 0) add();
    }

    const Format& format_;
    const Weight& w_;
    const Input& x_;
    const uint8_t* packed_;
    const Output& y_;
    const Tiling t_;
    const Blocks blocks_;
    const int64_t chunk_steps_;
    const Loops loops_;
    uint8_t* const decoded_[2];
    float* const block_;
    float* const sums_;
};

int64_t cached_rows(const Weight& w, int32_t x_dtype) {
    return cached_pairs(w, tiling(1, x_dtype).planes) * 2 * kTileRows;
}

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t x_dtype) { return packed_x_bytes(w, tiling(m, x_dtype)); }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    const Tiling t = tiling(x.m, x.dtype);
    pack_x(w, x, t, chunk_steps(w, t) * 2, prepared, part, parts);
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const Tiling t = tiling(x.m, x.dtype);
    const int64_t bytes = max(scratch_bytes(w, t), kScratchBytes);
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchThread, bytes));
    if (memory == nullptr) return false;
    const Tiles tiles(linear_tiles(t.rows));
    return with_format(w, first, [&](const auto& format) {
        Product(format, w, x, prepared, y, memory, first, last).run();
        return true;
    });
}

}  // namespace

extern const Path kAmxLargePath = {"amx large", prepared_bytes, prepare, multiply, kPiecePanels, cached_rows};

}  // namespace MINIFLOAT_ISA

#endif
