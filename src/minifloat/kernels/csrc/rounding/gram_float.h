// Panels of a Gram product as float32: for float32 and float16 inputs, and for bfloat16 on processors without products of
// bfloat16.
#pragma once

#include "gram.h"

namespace MINIFLOAT_ISA {

struct GramFloat {
    // Together the registers hold kLeft x kRight sums, the columns of y that one row adds to them, and an element of x.
#if defined(__AVX512F__)
    static constexpr int kLeft = 8;
    static constexpr int kVectors = 3;
#elif defined(__AVX2__)
    static constexpr int kLeft = 6;
    static constexpr int kVectors = 2;
#else
    static constexpr int kLeft = 4;
    static constexpr int kVectors = 2;
#endif
    static constexpr int kRight = kVectors * kWidth;
    static constexpr int kBytes = 4;
    // Rows of a power of two of bytes share the sets of the L1 cache, which hold the lines of this number of them.
    static constexpr int kPackRows = 8;
    static constexpr int64_t kSlabRows = 1024;
    static constexpr int64_t kDepth = 128;  // a panel of y of up to 24 KiB

    struct Scope {
        Scope() {}
    };

    static void pack_left(const GramPatch& from, int32_t dtype, uint8_t* out) { pack<kLeft>(from, dtype, out); }
    static void pack_right(const GramPatch& from, int32_t dtype, uint8_t* out) { pack<kRight>(from, dtype, out); }

    // sums[i][j] += left[t][i] * right[t][j]; the first call for a block replaces `sums`.
    static void multiply(const uint8_t* left_panel, const uint8_t* right_panel, int64_t depth, bool first,
                         float* __restrict sums) {
        const float* __restrict left = reinterpret_cast<const float*>(left_panel);
        const float* __restrict right = reinterpret_cast<const float*>(right_panel);
        F32 total[kLeft][kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kLeft; ++i)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) total[i][v] = F32{};
        for (int64_t t = 0; t < depth; ++t) {
            F32 row[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) row[v] = load(right + t * kRight + v * kWidth);
#pragma GCC unroll 8
            for (int i = 0; i < kLeft; ++i) {
                const F32 factor = broadcast(left[t * kLeft + i]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) total[i][v] += factor * row[v];
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kLeft; ++i)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                float* to = sums + i * kRight + v * kWidth;
                const F32 sum = first ? total[i][v] : load(to) + total[i][v];
                __builtin_memcpy(to, &sum, sizeof sum);
            }
    }

    static void transpose(const float* __restrict sums, float* __restrict out) {
        for (int j = 0; j < kRight; ++j)
            for (int i = 0; i < kLeft; ++i) out[j * kLeft + i] = sums[i * kRight + j];
    }

  private:
    template <int kPanel>
    static void pack(const GramPatch& from, int32_t dtype, uint8_t* out) {
        float* to = reinterpret_cast<float*>(out);
        for (int64_t t = 0; t < kPackRows; ++t, to += kPanel) {
            const uint8_t* row = from.data + t * from.stride;
            const int valid = t < from.rows ? static_cast<int>(from.cols) : 0;
            if (dtype == MINIFLOAT_BF16) {
                convert<Bf16, kPanel>(row, valid, to);
            } else if (dtype == MINIFLOAT_F16) {
                convert<F16, kPanel>(row, valid, to);
            } else {
                convert<Float32, kPanel>(row, valid, to);
            }
        }
    }

    template <class Source, int kPanel>
    static void convert(const uint8_t* __restrict row, int valid, float* __restrict to) {
        if (valid == kPanel) {
            for (int c = 0; c < kPanel; ++c) to[c] = Source::to_float(row + c * Source::kBytes);
        } else {
            for (int c = 0; c < kPanel; ++c) to[c] = c < valid ? Source::to_float(row + c * Source::kBytes) : 0.0f;
        }
    }
};

}  // namespace MINIFLOAT_ISA
