// Rounds a weight column by column; the error of a column is fed into the columns behind it (GPTQ in its LDL form).
// Lanes are rows. The errors of a block of columns are applied together, from registers, yet each element receives them
// in ascending order, one multiplication and one addition each: the codes are the same for every block size,
// instruction set and number of threads.
#include "../quantize/encode.h"
#include "../threads.h"

namespace MINIFLOAT_ISA {
namespace {

// Columns and vectors of rows that apply() holds in registers, half or three quarters of them.
#if defined(__AVX512F__)
constexpr int kPanel = 8;
constexpr int kVectors = 3;
#else
constexpr int kPanel = 4;
constexpr int kVectors = 2;
#endif
constexpr int kTileRows = kVectors * kWidth;
// Columns whose errors are applied together to the columns behind them.
constexpr int kBlock = 128;
static_assert(kBlock % kPanel == 0, "blocks are whole panels");
// Rows that exchange their errors.
constexpr int kRowBlock = MINIFLOAT_ROW_BLOCK;
// At most this number of rows is a piece of work: feedback is read once per piece.
constexpr int64_t kChunkRows = 192;
static_assert(kChunkRows % kRowBlock == 0 && kChunkRows % kTileRows == 0, "chunks are whole blocks and tiles");

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
inline void store(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }

// The memory of one thread; rows are padded to whole tiles.
struct Scratch {
    float* work;      // [cols padded to panels][rows]
    float* scales;    // [groups][rows]
    float* original;  // [kBlock][rows]
    float* errors;    // [kBlock][rows]
    float* panel;     // [kBlock][kPanel]: a panel of feedback
    int32_t* codes;   // [rows]: of one column
    uint8_t* block;   // [kBlock][rows]: codes

    static int64_t floats(int64_t cols, int64_t groups, int64_t rows) {
        const int64_t columns = round_up(cols, kPanel) + groups + 2 * kBlock + 1 + kBlock / 4;
        return round_up(columns * rows + kBlock * kPanel, kLanes);
    }

    Scratch(float* memory, int64_t cols, int64_t groups, int64_t rows)
        : work(memory),
          scales(work + round_up(cols, kPanel) * rows),
          original(scales + groups * rows),
          errors(original + kBlock * rows),
          panel(errors + kBlock * rows),
          codes(reinterpret_cast<int32_t*>(panel + kBlock * kPanel)),
          block(reinterpret_cast<uint8_t*>(codes + rows)) {}
};

// out[column][row] of `cols` columns; rows from `valid` on repeat the last valid one, `stride` is that of `in`.
void transpose(const float* __restrict in, int64_t stride, int64_t cols, int64_t valid, int64_t rows,
               float* __restrict out) {
    constexpr int64_t kSide = 16;
    for (int64_t c0 = 0; c0 < cols; c0 += kSide) {
        const int64_t c1 = min(c0 + kSide, cols);
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = in + min(r, valid - 1) * stride;
            for (int64_t c = c0; c < c1; ++c) out[c * rows + r] = from[c];
        }
    }
}

// work[k][r] += errors[j][r] * panel[j][k], for ascending j, for a panel of columns and a tile of rows.
inline void apply_tile(const float* __restrict errors, const float* __restrict panel, int depth, int64_t rows,
                       float* __restrict work) {
    F32 sums[kPanel][kVectors];
#pragma GCC unroll 8
    for (int k = 0; k < kPanel; ++k)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[k][v] = load(work + k * rows + v * kWidth);
    for (int j = 0; j < depth; ++j) {
        F32 error[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) error[v] = load(errors + j * rows + v * kWidth);
#pragma GCC unroll 8
        for (int k = 0; k < kPanel; ++k) {
            const F32 factor = broadcast(panel[j * kPanel + k]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[k][v] += error[v] * factor;
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kPanel; ++k)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) store(work + k * rows + v * kWidth, sums[k][v]);
}

// Rounds the rows of one chunk.
class Chunk {
  public:
    Chunk(const minifloat_round_with_feedback_args& args, int64_t first, int64_t valid, int64_t rows, float* memory)
        : a_(args),
          element_(args.element),
          first_(first),
          valid_(valid),
          rows_(round_up(valid, kTileRows)),
          s_(memory, args.cols, args.groups, rows) {}

    void run() {
        const int64_t padded = round_up(a_.cols, kPanel);
        transpose(a_.weight + first_ * a_.cols, a_.cols, a_.cols, valid_, rows_, s_.work);
        for (int64_t i = a_.cols * rows_; i < padded * rows_; ++i) s_.work[i] = 0.0f;
        transpose(a_.scales + first_ * a_.groups, a_.groups, a_.groups, valid_, rows_, s_.scales);
        for (int64_t begin = 0; begin < a_.cols; begin += kBlock) {
            const int64_t end = min(begin + kBlock, a_.cols);
            transpose(a_.weight + first_ * a_.cols + begin, a_.cols, end - begin, valid_, rows_, s_.original);
            for (int64_t panel = begin; panel < end; panel += kPanel) {
                const int64_t panel_end = min(panel + kPanel, end);
                for (int64_t j = panel; j < panel_end; ++j) round_column(j, begin, panel_end);
                apply(panel, panel_end, s_.errors + (panel - begin) * rows_, panel_end, end);
            }
            store_codes(begin, end);
            apply(begin, end, s_.errors, end, a_.cols);
        }
    }

  private:
    struct Element {
        I32 code;
        F32 value;  // times the scale
    };

    Element round(F32 x, F32 scale) const {
        const I32 bits = bit_cast<I32>(x / scale);
        const I32 magnitude = min(bits & kMagnitude, broadcast(element_.max_value));
        const auto rounded = round_magnitude<F32, I32>(magnitude, element_);
        const F32 value = bit_cast<F32>(bit_cast<I32>(rounded.value) | (bits & ~kMagnitude));
        return {rounded.code | ((bits >> element_.sign_shift) & element_.sign), value * scale};
    }

    // Rounds column j of the block from `begin` on, and feeds its error into the columns up to `end`.
    void round_column(int64_t j, int64_t begin, int64_t end) {
        const float* scales = s_.scales + a_.group_of[j] * rows_;
        const float* original = s_.original + (j - begin) * rows_;
        const float* feedback = a_.feedback + j * a_.cols;
        float* errors = s_.errors + (j - begin) * rows_;
        float* work = s_.work + j * rows_;
        if (a_.row_feedback != nullptr) round_rows(scales, original, work, errors);
        for (int64_t r = 0; r < rows_; r += kWidth) {
            if (a_.row_feedback == nullptr) {
                const Element element = round(load(work + r), load(scales + r));
                MINIFLOAT_ISA::store(s_.codes + r, element.code);
                store(errors + r, load(original + r) - element.value);
            }
            const F32 error = load(errors + r);
            for (int64_t k = j + 1; k < end; ++k) {
                float* to = work + (k - j) * rows_ + r;
                store(to, load(to) + error * broadcast(feedback[k]));
            }
        }
        store_bytes(s_.codes, static_cast<int>(rows_), s_.block + (j - begin) * rows_);
    }

    // Rounds a column row by row; the blocks of rows do not depend on each other, so the processor runs them together.
    void round_rows(const float* scales, const float* original, const float* work, float* errors) {
        constexpr int kBlocks = kChunkRows / kRowBlock;
        float added[kBlocks][kRowBlock] = {};
        for (int i = 0; i < kRowBlock; ++i)
            for (int block = 0; block < kBlocks; ++block) {
                const int64_t r = block * kRowBlock + i;
                if (r >= rows_) break;
                const F32 x = broadcast(work[r] + added[block][i]);
                const Element element = round(x, broadcast(scales[r]));
                s_.codes[r] = element.code[0];
                errors[r] = original[r] - element.value[0];
                if (r >= valid_) continue;
                const F32 taken = broadcast(work[r] - element.value[0]);
                const float* feedback = a_.row_feedback + (first_ + r) * kRowBlock;
                for (int k = i / kWidth * kWidth; k < kRowBlock; k += kWidth)
                    store(added[block] + k, load(added[block] + k) + taken * load(feedback + k));
            }
    }

    // Feeds the errors of the columns first .. last - 1 into the columns begin .. end - 1.
    void apply(int64_t first, int64_t last, const float* errors, int64_t begin, int64_t end) {
        const int depth = static_cast<int>(last - first);
        for (int64_t k = begin; k < end; k += kPanel) {
            const int width = static_cast<int>(min<int64_t>(kPanel, end - k));
            for (int j = 0; j < depth; ++j) {
                const float* from = a_.feedback + (first + j) * a_.cols + k;
                float* to = s_.panel + j * kPanel;
                for (int c = 0; c < kPanel; ++c) to[c] = c < width ? from[c] : 0.0f;
            }
            for (int64_t r = 0; r < rows_; r += kTileRows)
                apply_tile(errors + r, s_.panel, depth, rows_, s_.work + k * rows_ + r);
        }
    }

    void store_codes(int64_t begin, int64_t end) {
        for (int64_t r = 0; r < valid_; ++r) {
            uint8_t* to = a_.codes + (first_ + r) * a_.cols + begin;
            for (int64_t j = 0; j < end - begin; ++j) to[j] = s_.block[j * rows_ + r];
        }
    }

    const minifloat_round_with_feedback_args& a_;
    const Format element_;
    const int64_t first_, valid_, rows_;
    const Scratch s_;
};

}  // namespace

// dispatch.cpp declares this function for every instruction set.
int32_t round_with_feedback(const minifloat_round_with_feedback_args& args) {
    if (args.rows == 0 || args.cols == 0) return MINIFLOAT_OK;
    const int64_t wanted = max<int64_t>(1, min<int64_t>(args.threads, minifloat::Schedule::kMaxThreads));
    const int64_t even = (args.rows + wanted - 1) / wanted;
    const int64_t rows = args.row_feedback != nullptr ? kChunkRows : round_up(min(kChunkRows, even), kTileRows);
    const int64_t chunks = (args.rows + rows - 1) / rows;
    const int threads = static_cast<int>(min(wanted, chunks));
    const int64_t floats = Scratch::floats(args.cols, args.groups, rows);
    void* memory = minifloat::scratch(minifloat::kScratchCall, threads * floats * static_cast<int64_t>(sizeof(float)));
    if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
    minifloat::Schedule schedule;
    schedule.reset(chunks, threads);
    minifloat::parallel(threads, [&](int thread, int) {
        float* own = static_cast<float*>(memory) + thread * floats;
        for (int64_t chunk; (chunk = schedule.next(thread)) >= 0;) {
            const int64_t first = chunk * rows;
            Chunk(args, first, min(rows, args.rows - first), rows, own).run();
        }
    });
    return MINIFLOAT_OK;
}

}  // namespace MINIFLOAT_ISA
