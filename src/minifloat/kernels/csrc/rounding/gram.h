// The Gram product out += x^T y, divided into panels and blocks that fit the caches. Each element sums its rows in
// ascending order within a slab, and `out` receives one slab after the other: the bits depend neither on the blocks nor
// on the number of threads.
#pragma once

#include "../linear/convert.h"
#include "../threads.h"

namespace MINIFLOAT_ISA {

// Rows of x and y that a thread packs at a time.
constexpr int64_t kBandRows = 32;

// x or y, [rows, cols] of `dtype`, rows `stride` bytes apart.
struct GramInput {
    const uint8_t* data;
    int64_t cols, stride;
    int32_t dtype;

    int64_t panels(int64_t width) const { return (cols + width - 1) / width; }
};

// Rows and columns of an input that go into a panel, of which `rows` (none if it is negative) and `cols` exist.
struct GramPatch {
    const uint8_t* data;  // of the first element
    int64_t stride;
    int64_t rows, cols;
};

// The panels of x (left) and y (right) of one slab, and the division of the result into blocks.
//
// Kernel has: kLeft and kRight, the columns of a panel; kSlabRows and kDepth, multiples of kBandRows: the rows of a
// slab, and those that pass at a time; kBytes, of a packed element; pack_left() and pack_right(), which fill kPackRows
// rows of a panel; multiply() and transpose(); Scope, of which an object exists while a thread multiplies.
template <class Kernel>
class Gram {
  public:
    explicit Gram(const minifloat_gram_args& a)
        : x_{a.x, a.x_cols, a.x_stride * dtype_bytes(a.dtype), a.dtype},
          y_{a.y, a.y_cols, a.y_stride * dtype_bytes(a.dtype), a.dtype},
          out_(a.out),
          rows_(a.rows),
          symmetric_(a.symmetric != 0),
          threads_(static_cast<int>(max<int64_t>(1, min<int64_t>(a.threads, minifloat::Schedule::kMaxThreads)))),
          left_panels_(x_.panels(Kernel::kLeft)),
          right_panels_(y_.panels(Kernel::kRight)) {
        int64_t side = kMaxSide;
        while (side > kMinSide && blocks_of(side) < kBlocksPerThread * threads_) side /= 2;
        left_block_ = max<int64_t>(1, side / Kernel::kLeft);
        right_block_ = max<int64_t>(1, side / Kernel::kRight);
        left_blocks_ = (left_panels_ + left_block_ - 1) / left_block_;
        right_blocks_ = (right_panels_ + right_block_ - 1) / right_block_;
    }

    int32_t run() {
        const int64_t slab = min(Kernel::kSlabRows, padded(rows_));
        left_bytes_ = slab * Kernel::kLeft * Kernel::kBytes;
        right_bytes_ = slab * Kernel::kRight * Kernel::kBytes;
        const int64_t packed = left_panels_ * left_bytes_ + right_panels_ * right_bytes_;
        const int64_t sums = left_block_ * right_block_ * kPair + kPair;
        const int64_t bytes = packed + threads_ * sums * static_cast<int64_t>(sizeof(float));
        left_ = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchCall, bytes));
        if (left_ == nullptr) return MINIFLOAT_NO_MEMORY;
        right_ = left_ + left_panels_ * left_bytes_;
        float* const all_sums = reinterpret_cast<float*>(right_ + right_panels_ * right_bytes_);
        for (int64_t row = 0; row < rows_; row += Kernel::kSlabRows) {
            const int64_t count = min(Kernel::kSlabRows, rows_ - row);
            each(padded(count) / kBandRows, [&](int64_t band, int) { pack(row, count, band * kBandRows); });
            minifloat::Schedule schedule;
            schedule.reset(left_blocks_ * right_blocks_, threads_);
            minifloat::parallel(threads_, [&](int thread, int) {
                const typename Kernel::Scope scope;
                for (int64_t block; (block = schedule.next(thread)) >= 0;)
                    multiply(block, padded(count), all_sums + thread * sums);
            });
        }
        return MINIFLOAT_OK;
    }

  private:
    static constexpr int64_t kMaxSide = 512;  // columns of x and y of a block: 1 MiB of sums
    static constexpr int64_t kMinSide = 128;
    static constexpr int64_t kBlocksPerThread = 8;
    static constexpr int64_t kPair = Kernel::kLeft * Kernel::kRight;
    static_assert(Kernel::kSlabRows % Kernel::kDepth == 0 && Kernel::kDepth % kBandRows == 0, "whole bands");

    static int64_t padded(int64_t rows) { return (rows + kBandRows - 1) / kBandRows * kBandRows; }

    int64_t blocks_of(int64_t side) const {
        return ((x_.cols + side - 1) / side) * ((y_.cols + side - 1) / side) / (symmetric_ ? 2 : 1);
    }

    template <class Function>
    void each(int64_t pieces, const Function& function) {
        minifloat::Schedule schedule;
        schedule.reset(pieces, threads_);
        minifloat::parallel(threads_, [&](int thread, int) {
            for (int64_t piece; (piece = schedule.next(thread)) >= 0;) function(piece, thread);
        });
    }

    static GramPatch patch(const GramInput& input, int64_t row, int64_t rows, int64_t col, int64_t width) {
        return {input.data + row * input.stride + col * dtype_bytes(input.dtype), input.stride, rows,
                min(width, input.cols - col)};
    }

    // Packs a band of a slab that begins at `row` and has `count` rows; zeros fill up the band and the panels.
    void pack(int64_t row, int64_t count, int64_t band) {
        for (int64_t t = band; t < band + kBandRows; t += Kernel::kPackRows) {
            const int64_t rows = min<int64_t>(Kernel::kPackRows, count - t);
            for (int64_t p = 0; p < left_panels_; ++p)
                Kernel::pack_left(patch(x_, row + t, rows, p * Kernel::kLeft, Kernel::kLeft), x_.dtype,
                                  left_ + p * left_bytes_ + t * Kernel::kLeft * Kernel::kBytes);
            for (int64_t p = 0; p < right_panels_; ++p)
                Kernel::pack_right(patch(y_, row + t, rows, p * Kernel::kRight, Kernel::kRight), y_.dtype,
                                   right_ + p * right_bytes_ + t * Kernel::kRight * Kernel::kBytes);
        }
    }

    // Whether all elements of a pair of panels are below the diagonal, where the transposed sums go.
    bool is_below(int64_t left, int64_t right) const {
        return symmetric_ && (right + 1) * Kernel::kRight <= left * Kernel::kLeft;
    }

    void multiply(int64_t block, int64_t rows, float* sums) {
        const int64_t left = block / right_blocks_ * left_block_, right = block % right_blocks_ * right_block_;
        const int64_t left_end = min(left + left_block_, left_panels_);
        const int64_t right_end = min(right + right_block_, right_panels_);
        if (is_below(left, right_end - 1)) return;
        for (int64_t row = 0; row < rows; row += Kernel::kDepth) {
            const int64_t depth = min(Kernel::kDepth, rows - row);
            for (int64_t r = right; r < right_end; ++r) {
                const uint8_t* const from = right_ + r * right_bytes_ + row * Kernel::kRight * Kernel::kBytes;
                for (int64_t l = left; l < left_end; ++l)
                    if (!is_below(l, r))
                        Kernel::multiply(left_ + l * left_bytes_ + row * Kernel::kLeft * Kernel::kBytes, from, depth,
                                       row == 0, sums + ((r - right) * left_block_ + l - left) * kPair);
            }
        }
        float* const transposed = sums + left_block_ * right_block_ * kPair;
        for (int64_t l = left; l < left_end; ++l)
            for (int64_t r = right; r < right_end; ++r)
                if (!is_below(l, r)) add(l, r, sums + ((r - right) * left_block_ + l - left) * kPair, transposed);
    }

    // Adds the sums of a pair of panels to the result; of a symmetric one those above the diagonal to both halves.
    void add(int64_t left, int64_t right, const float* sums, float* transposed) {
        const int64_t i0 = left * Kernel::kLeft, i1 = min(i0 + Kernel::kLeft, x_.cols);
        const int64_t j0 = right * Kernel::kRight, j1 = min(j0 + Kernel::kRight, y_.cols);
        for (int64_t i = i0; i < i1; ++i) {
            const int64_t begin = symmetric_ ? max(i, j0) : j0;
            add_row(out_ + i * y_.cols + begin, sums + (i - i0) * Kernel::kRight + begin - j0, j1 - begin);
        }
        if (!symmetric_) return;
        Kernel::transpose(sums, transposed);
        for (int64_t j = j0; j < j1; ++j)
            add_row(out_ + j * y_.cols + i0, transposed + (j - j0) * Kernel::kLeft, min(i1, j) - i0);
    }

    static void add_row(float* __restrict out, const float* __restrict sums, int64_t count) {
        for (int64_t k = 0; k < count; ++k) out[k] += sums[k];
    }

    const GramInput x_, y_;
    float* const out_;
    const int64_t rows_;
    const bool symmetric_;
    const int threads_;
    const int64_t left_panels_, right_panels_;
    int64_t left_block_, right_block_, left_blocks_, right_blocks_;  // panels of a block; blocks of the result
    int64_t left_bytes_ = 0, right_bytes_ = 0;                      // of a panel
    uint8_t *left_ = nullptr, *right_ = nullptr;
};

}  // namespace MINIFLOAT_ISA
