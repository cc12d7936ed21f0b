// Casts a slab of rows: amax of each block, its scale, then codes and error statistics, while the data is in cache.
//
// The slab is cut into panels: one row of blocks high, and as wide as fits a chunk of scratch memory (or one block).
// A panel is read twice, once for amax and once for the codes; the second time from L1 or L2.
#include "search.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kChunk = kMaxBlocks * kLanes;  // columns converted to float32 at a time

struct Scratch {
    alignas(64) float w[kChunk];
    alignas(64) int32_t codes[kChunk];
    BlockScales blocks;
};

inline int32_t amax_bits(const float* w, int count) {
    I32 largest = {};
    for (int i = 0; i < count; i += kWidth) largest = max(largest, bit_cast<I32>(load(w + i)) & kMagnitude);
    return max_lanes(largest);
}

int64_t count_nonfinite(const float* w, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; ++i) total += (bit_cast<int32_t>(w[i]) & kMagnitude) >= kInfinity;
    return total;
}

struct Panel {
    int64_t row_begin, row_end, col_begin, col_end;
};

template <class Source>
class Slab {
  public:
    explicit Slab(minifloat_quantize_rows_args& args) : a_(args), element_(args.element) {
        searches_ = a_.scaling == MINIFLOAT_SCALE_SEARCH;
        padding_ = searches_ ? static_cast<int>(a_.block_cols) : kLanes;
        const bool whole_row = a_.one_scale || (a_.block_cols >= a_.cols && !searches_);
        block_rows_ = a_.one_scale ? 1 : a_.block_rows;
        block_cols_ = whole_row ? (a_.cols + kLanes - 1) / kLanes * kLanes : a_.block_cols;
        panel_cols_ = block_cols_ <= kChunk ? kChunk / block_cols_ * block_cols_ : block_cols_;
        grid_cols_ = (a_.cols + block_cols_ - 1) / block_cols_;
    }

    void run() {
        for (int64_t row = 0; row < a_.rows; row += block_rows_)
            for (int64_t col = 0; col < a_.cols; col += panel_cols_)
                cast({row, min(row + block_rows_, a_.rows), col, min(col + panel_cols_, a_.cols)});
        a_.signal = a_.noise = 0.0;
        a_.saturated = sums_.saturated;
        a_.flushed = sums_.flushed;
        a_.nonfinite = nonfinite_;
        for (int lane = 0; lane < kLanes; ++lane) {
            a_.signal += sums_.signal[lane];
            a_.noise += sums_.noise[lane];
        }
    }

  private:
    void cast(const Panel& p) {
        BlockScales& s = scratch_.blocks;
        const int blocks = static_cast<int>((p.col_end - p.col_begin + block_cols_ - 1) / block_cols_);
        for (int b = 0; b < blocks; ++b) s.amax[b] = 0;
        for (int64_t row = p.row_begin; row < p.row_end; ++row)
            for (int64_t col = p.col_begin; col < p.col_end; col += kChunk) measure(p, row, col);
        if (a_.one_scale) s.amax[0] = bit_cast<int32_t>(a_.tensor_amax);
        choose_scales(s, blocks, a_, element_);
        if (searches_ && padding_ == kLanes) search_scales<1>(scratch_.w, blocks, element_, s);
        if (searches_ && padding_ == 2 * kLanes) search_scales<2>(scratch_.w, blocks, element_, s);
        store_scales(p, blocks);
        const float unit = common_unit(blocks);
        const bool in_scratch = p.row_end - p.row_begin == 1 && p.col_end - p.col_begin <= kChunk;
        for (int64_t row = p.row_begin; row < p.row_end; ++row)
            for (int64_t col = p.col_begin; col < p.col_end; col += kChunk) encode(p, row, col, unit, in_scratch);
    }

    int chunk_columns(const Panel& p, int64_t col) const {
        return static_cast<int>(min<int64_t>(kChunk, p.col_end - col));
    }

    int load(const Panel& p, int64_t row, int64_t col) {
        const uint8_t* src = a_.data + (row * a_.cols + col) * Source::kBytes;
        return load_chunk<Source>(src, chunk_columns(p, col), padding_, scratch_.w);
    }

    // Raises the amax of the blocks that this chunk of a row belongs to.
    void measure(const Panel& p, int64_t row, int64_t col) {
        const int count = load(p, row, col);
        const int step = static_cast<int>(min<int64_t>(block_cols_, kChunk));
        int32_t largest = 0;
        for (int begin = 0, block = 0; begin < count; begin += step, ++block) {
            const int32_t bits = amax_bits(scratch_.w + begin, min(step, count - begin));
            scratch_.blocks.amax[block] = max(scratch_.blocks.amax[block], bits);
            largest = max(largest, bits);
        }
        if (largest >= kInfinity) nonfinite_ += count_nonfinite(scratch_.w, count);
    }

    void store_scales(const Panel& p, int blocks) {
        const int64_t grid_row = a_.one_scale ? 0 : p.row_begin / block_rows_;
        const int64_t first = grid_row * grid_cols_ + p.col_begin / block_cols_;
        const BlockScales& s = scratch_.blocks;
        if (a_.scaling == MINIFLOAT_SCALE_FLOAT32)
            __builtin_memcpy(static_cast<float*>(a_.scales) + first, s.scale, blocks * sizeof(float));
        else
            store_bytes(s.code, blocks, static_cast<uint8_t*>(a_.scales) + first);
    }

    // The power of two that brings the largest of weights and scales of a panel near 1.
    float common_unit(int blocks) const {
        const BlockScales& s = scratch_.blocks;
        int32_t largest = 0;
        for (int b = 0; b < blocks; ++b) largest = max(largest, max(s.amax[b], bit_cast<int32_t>(s.scale[b])));
        return bit_cast<float>(max(kMaxE8M0 - (largest >> kMantissaBits), 1) << kMantissaBits);
    }

    void encode(const Panel& p, int64_t row, int64_t col, float unit, bool in_scratch) {
        const int columns = chunk_columns(p, col);
        const int count = in_scratch ? (columns + kLanes - 1) / kLanes * kLanes : load(p, row, col);
        const int step = static_cast<int>(min<int64_t>(block_cols_, kChunk));
        const BlockScales& s = scratch_.blocks;
        if (a_.scaling >= MINIFLOAT_SCALE_FLOOR)
            encode_chunk<true>(scratch_.w, count, step, s.scale, s.inverse, unit, element_, scratch_.codes, sums_);
        else
            encode_chunk<false>(scratch_.w, count, step, s.scale, s.scale, unit, element_, scratch_.codes, sums_);
        const int64_t index = row * a_.cols + col;
        if (a_.element.bits == 4)
            store_nibbles(scratch_.codes, columns, a_.codes + index / 2);
        else
            store_bytes(scratch_.codes, columns, a_.codes + index);
    }

    minifloat_quantize_rows_args& a_;
    const Format element_;
    int64_t block_rows_, block_cols_, panel_cols_, grid_cols_;
    bool searches_;
    int padding_;
    Scratch scratch_;
    Sums sums_;
    int64_t nonfinite_ = 0;
};

template <class Source>
void measure_all(minifloat_amax_args& a) {
    alignas(64) float w[kChunk];
    int32_t largest = 0;
    a.nonfinite = 0;
    for (int64_t begin = 0; begin < a.count; begin += kChunk) {
        const int columns = static_cast<int>(min<int64_t>(kChunk, a.count - begin));
        const int count = load_chunk<Source>(a.data + begin * Source::kBytes, columns, kLanes, w);
        int32_t bits = amax_bits(w, count);
        if (bits >= kInfinity) {
            bits = 0;
            for (int i = 0; i < count; ++i) {
                const int32_t magnitude = bit_cast<int32_t>(w[i]) & kMagnitude;
                bits = max(bits, magnitude < kInfinity ? magnitude : 0);
            }
            a.nonfinite += count_nonfinite(w, count);
        }
        largest = max(largest, bits);
    }
    a.amax = bit_cast<float>(largest);
}

}  // namespace

// dispatch.cpp declares these two for every instruction set.
void quantize_rows(minifloat_quantize_rows_args& args) {
    if (args.dtype == MINIFLOAT_BF16) Slab<Bf16>(args).run();
    if (args.dtype == MINIFLOAT_F16) Slab<F16>(args).run();
    if (args.dtype == MINIFLOAT_F32) Slab<F32Source>(args).run();
}

void amax(minifloat_amax_args& args) {
    if (args.dtype == MINIFLOAT_BF16) measure_all<Bf16>(args);
    if (args.dtype == MINIFLOAT_F16) measure_all<F16>(args);
    if (args.dtype == MINIFLOAT_F32) measure_all<F32Source>(args);
}

}  // namespace MINIFLOAT_ISA
