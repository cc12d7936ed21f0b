// Casts a slab of rows: amax of each block, its scale, then codes and error statistics, while the data is in the cache.
#include "scales.h"

namespace MINIFLOAT_ISA {
namespace {

// Columns converted to float32 at a time; bounds the float32 sums of encode.h.
constexpr int kChunk = kMaxBlocks * kLanes;
// Columns of a panel of several rows: long enough runs for the processor to prefetch (measured: 1.3 times the speed of
// runs of 2 KiB), and 128 rows of 16-bit weights still fit an L2 cache.
constexpr int kPanel = 4096;

struct Scratch {
    alignas(64) float w[kChunk];
    alignas(64) int32_t codes[kChunk];
    BlockScales blocks;
};

struct Panel {
    int64_t row_begin, row_end, col_begin, col_end;
};

template <class Source>
class Slab {
  public:
    explicit Slab(minifloat_quantize_rows_args& args) : a_(args), element_(args.element) {
        searches_ = a_.scaling == MINIFLOAT_SCALE_SEARCH || a_.scaling == MINIFLOAT_SCALE_CODED_SEARCH;
        padding_ = searches_ ? static_cast<int>(a_.block_cols) : kLanes;
        const bool whole_row = a_.one_scale || (a_.block_cols >= a_.cols && !searches_);
        block_rows_ = a_.one_scale ? 1 : a_.block_rows;
        block_cols_ = whole_row ? (a_.cols + kLanes - 1) / kLanes * kLanes : a_.block_cols;
        chunk_cols_ = block_cols_ <= kChunk ? kChunk / block_cols_ * block_cols_ : kChunk;
        panel_cols_ = max(block_cols_, chunk_cols_);
        if (block_rows_ > 1 && block_cols_ <= kChunk)
            panel_cols_ = max(min<int64_t>(kPanel, kMaxBlocks * block_cols_) / chunk_cols_, int64_t{1}) * chunk_cols_;
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
        for (int64_t row = p.row_begin; row < p.row_end; ++row) measure(p, row, blocks);
        choose(p, blocks);
        store_scales(p, blocks);
        const float unit = common_unit(blocks);
        const bool clips = some_clip(blocks);
        for (int64_t row = p.row_begin; row < p.row_end; ++row)
            for (int64_t col = p.col_begin; col < p.col_end; col += chunk_cols_) encode(p, row, col, unit, clips);
    }

    const uint8_t* source(int64_t row, int64_t col) const { return a_.data + (row * a_.cols + col) * Source::kBytes; }

    // Updates the amax of the blocks with one row.
    void measure(const Panel& p, int64_t row, int blocks) {
        int32_t largest = 0;
        for (int b = 0; b < blocks; ++b) {
            const int64_t col = p.col_begin + b * block_cols_;
            const int32_t bits = Source::amax_bits(source(row, col), min(block_cols_, p.col_end - col));
            scratch_.blocks.amax[b] = max(scratch_.blocks.amax[b], bits);
            largest = max(largest, bits);
        }
        if (largest < kInfinity) return;
        nonfinite_ += count_nonfinite<Source>(source(row, p.col_begin), p.col_end - p.col_begin);
    }

    void choose(const Panel& p, int blocks) {
        BlockScales& s = scratch_.blocks;
        const int32_t measured = s.amax[0];
        if (a_.one_scale) s.amax[0] = bit_cast<int32_t>(a_.tensor_amax);
        choose_scales(s, blocks, a_, element_);
        s.amax[0] = measured;
        if (!searches_) return;
        load(p, p.row_begin, p.col_begin);
        if (a_.scaling == MINIFLOAT_SCALE_CODED_SEARCH)
            search_codes(scratch_.w, blocks, a_, element_, s);
        else if (padding_ == kLanes)
            search_scales<1>(scratch_.w, blocks, element_, s);
        else if (padding_ == 2 * kLanes)
            search_scales<2>(scratch_.w, blocks, element_, s);
    }

    // A chunk of columns as float32, padded with zeros; returns their number without padding.
    int load(const Panel& p, int64_t row, int64_t col) {
        const int columns = static_cast<int>(min<int64_t>(chunk_cols_, p.col_end - col));
        load_chunk<Source>(source(row, col), columns, padding_, scratch_.w);
        return columns;
    }

    void store_scales(const Panel& p, int blocks) {
        const int64_t grid_row = a_.one_scale ? 0 : p.row_begin / block_rows_;
        const int64_t first = grid_row * grid_cols_ + p.col_begin / block_cols_;
        const BlockScales& s = scratch_.blocks;
        if (stores_float32(a_.scaling))
            __builtin_memcpy(static_cast<float*>(a_.scales) + first, s.scale, blocks * sizeof(float));
        else
            store_bytes(s.code, blocks, static_cast<uint8_t*>(a_.scales) + first);
    }

    // The power of two that scales the largest weight of a panel to about 1. Weights more than about 2**60 below the
    // largest then count as zeros in the sums.
    float common_unit(int blocks) const {
        int32_t largest = 0;
        for (int b = 0; b < blocks; ++b) largest = max(largest, scratch_.blocks.amax[b]);
        return bit_cast<float>(max(kMaxE8M0 - (largest >> kMantissaBits), 1) << kMantissaBits);
    }

    // Whether an element may saturate, judged by the largest of each block.
    bool some_clip(int blocks) const {
        const BlockScales& s = scratch_.blocks;
        int32_t largest = 0;
        for (int b = 0; b < blocks; ++b)
            largest = max(largest, bit_cast<int32_t>(bit_cast<float>(s.amax[b]) / s.scale[b]));
        return largest > element_.saturation;
    }

    void encode(const Panel& p, int64_t row, int64_t col, float unit, bool clips) {
        const int columns = load(p, row, col);
        const int count = (columns + kLanes - 1) / kLanes * kLanes;
        const int step = static_cast<int>(min<int64_t>(block_cols_, kChunk));
        const int64_t first = (col - p.col_begin) / block_cols_;
        const float* scales = scratch_.blocks.scale + first;
        const float* inverses = scratch_.blocks.inverse + first;
        const bool power_of_two = a_.scaling >= MINIFLOAT_SCALE_FLOOR && a_.scaling <= MINIFLOAT_SCALE_SEARCH;
        const auto cast_chunk = power_of_two ? (clips ? encode_chunk<true, true> : encode_chunk<true, false>)
                                             : (clips ? encode_chunk<false, true> : encode_chunk<false, false>);
        cast_chunk(scratch_.w, count, step, scales, inverses, unit, element_, scratch_.codes, sums_);
        const int64_t index = row * a_.cols + col;
        if (a_.element.bits == 4)
            store_nibbles(scratch_.codes, columns, a_.codes + index / 2);
        else
            store_bytes(scratch_.codes, columns, a_.codes + index);
    }

    minifloat_quantize_rows_args& a_;
    const Format element_;
    int64_t block_rows_, block_cols_, chunk_cols_, panel_cols_, grid_cols_;
    bool searches_;
    int padding_;
    Scratch scratch_;
    Sums sums_;
    int64_t nonfinite_ = 0;
};

template <class Source>
int32_t finite_amax_bits(const uint8_t* src, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = bit_cast<int32_t>(Source::to_float(src + i * Source::kBytes)) & kMagnitude;
        largest = max(largest, magnitude < kInfinity ? magnitude : 0);
    }
    return largest;
}

template <class Source>
void measure_all(minifloat_amax_args& a) {
    int32_t largest = 0;
    a.nonfinite = 0;
    for (int64_t begin = 0; begin < a.count; begin += kChunk) {
        const int64_t count = min<int64_t>(kChunk, a.count - begin);
        const uint8_t* src = a.data + begin * Source::kBytes;
        int32_t bits = Source::amax_bits(src, count);
        if (bits >= kInfinity) {
            bits = finite_amax_bits<Source>(src, count);
            a.nonfinite += count_nonfinite<Source>(src, count);
        }
        largest = max(largest, bits);
    }
    a.amax = bit_cast<float>(largest);
}

}  // namespace

// dispatch.cpp declares these two functions for every instruction set.
void quantize_rows(minifloat_quantize_rows_args& args) {
    if (args.dtype == MINIFLOAT_BF16) Slab<Bf16>(args).run();
    if (args.dtype == MINIFLOAT_F16) Slab<F16>(args).run();
    if (args.dtype == MINIFLOAT_F32) Slab<Float32>(args).run();
}

void amax(minifloat_amax_args& args) {
    if (args.dtype == MINIFLOAT_BF16) measure_all<Bf16>(args);
    if (args.dtype == MINIFLOAT_F16) measure_all<F16>(args);
    if (args.dtype == MINIFLOAT_F32) measure_all<Float32>(args);
}

}  // namespace MINIFLOAT_ISA
