// Rounds the inputs of a linear to a format of at most 8 bits: scale, code and value of the code in one pass over the
// rows, so that neither scales nor codes go through memory. Elements are divided by the scale, as in
// numerics/activation.py: a product with its reciprocal would round some ties otherwise.
#include "../threads.h"
#include "scales.h"

namespace MINIFLOAT_ISA {
namespace {

using minifloat::Schedule;

constexpr int kChunk = 1024;                 // columns converted at a time; they stay in the L1 cache
constexpr int64_t kPieceElements = 1 << 14;   // elements per piece of work (some microseconds): whole rows, at least one
constexpr int64_t kThreadElements = 1 << 15;  // elements that are worth an additional thread

// A block with NaN or Inf has a scale of NaN or Inf, which makes every element NaN: finite / Inf * Inf is NaN too.
inline float scale_of(int32_t amax, const minifloat_round_inputs_args& a) {
    if (amax >= kInfinity) return bit_cast<float>(amax);
    return float32_scale(amax, a.element.max, a.zero_scale);
}

inline F32 round_vector(F32 x, F32 scale, const Format& fmt) {
    const I32 bits = bit_cast<I32>(x / scale);
    const I32 magnitude = bits & kMagnitude;
    const auto r = round_magnitude<F32, I32>(min(magnitude, broadcast(fmt.max_value)), fmt);
    const I32 nan = magnitude > kInfinity;  // all bits set where the element is NaN
    return bit_cast<F32>(bit_cast<I32>(r.value) | (bits & ~kMagnitude) | nan) * scale;
}

template <class Source>
class Inputs {
  public:
    explicit Inputs(const minifloat_round_inputs_args& args) : a_(args), element_(args.element) {
        piece_rows_ = max(kPieceElements / a_.cols, int64_t{1});
        const int64_t worth = min<int64_t>(a_.threads, a_.rows * a_.cols / kThreadElements);
        threads_ = static_cast<int>(min<int64_t>(max<int64_t>(worth, 1), Schedule::kMaxThreads));
    }

    void run() {
        if (a_.scaling == MINIFLOAT_INPUT_BLOCK) {
            for_rows([&](int, int64_t row) { round_blocks(row); });
            return;
        }
        const float scale = a_.scaling == MINIFLOAT_INPUT_GIVEN ? *a_.scale : scale_of(amax(), a_);
        for_rows([&](int, int64_t row) { round(source(row, 0), a_.cols, scale, result(row, 0)); });
    }

  private:
    const uint8_t* source(int64_t row, int64_t col) const { return a_.x + (row * a_.x_stride + col) * Source::kBytes; }
    float* result(int64_t row, int64_t col) const { return a_.y + row * a_.cols + col; }

    // Calls function(thread, row) for every row.
    template <class Function>
    void for_rows(const Function& function) const {
        Schedule schedule;
        schedule.reset((a_.rows + piece_rows_ - 1) / piece_rows_, threads_);
        minifloat::parallel(threads_, [&](int thread, int) {
            for (int64_t piece; (piece = schedule.next(thread)) >= 0;) {
                const int64_t end = min(a_.rows, (piece + 1) * piece_rows_);
                for (int64_t row = piece * piece_rows_; row < end; ++row) function(thread, row);
            }
        });
    }

    // The amax of the whole tensor, as the bits of a float32.
    int32_t amax() const {
        int32_t largest[Schedule::kMaxThreads] = {};
        for_rows([&](int thread, int64_t row) {
            largest[thread] = max(largest[thread], Source::amax_bits(source(row, 0), a_.cols));
        });
        for (int t = 1; t < threads_; ++t) largest[0] = max(largest[0], largest[t]);
        return largest[0];
    }

    void round_blocks(int64_t row) const {
        for (int64_t col = 0; col < a_.cols; col += a_.block_cols) {
            const int64_t count = min(a_.block_cols, a_.cols - col);
            const uint8_t* src = source(row, col);
            round(src, count, scale_of(Source::amax_bits(src, count), a_), result(row, col));
        }
    }

    void round(const uint8_t* src, int64_t count, float scale, float* dst) const {
        alignas(64) float w[kChunk];
        const F32 scales = broadcast(scale);
        for (int64_t begin = 0; begin < count; begin += kChunk) {
            const int columns = static_cast<int>(min<int64_t>(kChunk, count - begin));
            load_chunk<Source>(src + begin * Source::kBytes, columns, kWidth, w);
            for (int i = 0; i < columns; i += kWidth) {
                const F32 y = round_vector(load(w + i), scales, element_);
                const int left = min(kWidth, columns - i);
                if (left == kWidth)
                    __builtin_memcpy(dst + begin + i, &y, sizeof y);
                else
                    __builtin_memcpy(dst + begin + i, &y, left * sizeof(float));
            }
        }
    }

    const minifloat_round_inputs_args& a_;
    const Format element_;
    int64_t piece_rows_;
    int threads_;
};

}  // namespace

// dispatch.cpp declares this function for every instruction set.
void round_inputs(const minifloat_round_inputs_args& args) {
    if (args.dtype == MINIFLOAT_BF16) Inputs<Bf16>(args).run();
    if (args.dtype == MINIFLOAT_F16) Inputs<F16>(args).run();
    if (args.dtype == MINIFLOAT_F32) Inputs<Float32>(args).run();
}

}  // namespace MINIFLOAT_ISA
