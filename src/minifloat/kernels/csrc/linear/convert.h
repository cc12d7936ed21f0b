// Reading x and writing y: 16- and 32-bit floats to float32 and back, at any alignment, a vector at a time.
#pragma once

#include "../vec.h"
#include "../quantize/load.h"
#include "path.h"

namespace MINIFLOAT_ISA {

typedef uint16_t U16 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES / 2)));
typedef uint32_t U32 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));

inline int dtype_bytes(int32_t dtype) { return dtype == MINIFLOAT_F32 ? 4 : 2; }

template <class Vector>
inline Vector load_as(const void* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class Vector>
inline void store_as(void* p, Vector v) {
    __builtin_memcpy(p, &v, sizeof v);
}

// Lanes of `a` where `mask` has all bits set, of `b` where it has no bit set.
inline U32 select(U32 mask, U32 a, U32 b) { return (a & mask) | (b & ~mask); }

// kWidth elements of a dtype as float32, and back.
struct Bf16Row {
    static constexpr int kBytes = 2;
    static F32 load(const uint8_t* p) { return bit_cast<F32>(__builtin_convertvector(load_as<U16>(p), U32) << 16); }
    static void store(uint8_t* p, F32 value) {
        const U32 bits = bit_cast<U32>(value);
        const U32 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        const U32 nan = bit_cast<U32>(value != value);
        store_as(p, __builtin_convertvector(select(nan, bits >> 16 | 0x40u, rounded), U16));
    }
};

struct F16Row {
    static constexpr int kBytes = 2;
#if defined(__AVX512F__)
    static F32 load(const uint8_t* p) { return _mm512_cvtph_ps(load_as<__m256i>(p)); }
    static void store(uint8_t* p, F32 value) { store_as(p, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__)
    static F32 load(const uint8_t* p) { return _mm256_cvtph_ps(load_as<__m128i>(p)); }
    static void store(uint8_t* p, F32 value) { store_as(p, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
#else
    static F32 load(const uint8_t* p) {
        const U32 half = __builtin_convertvector(load_as<U16>(p), U32);
        const U32 magnitude = half & 0x7fffu;
        const U32 rebias = U32{} + (uint32_t{kBias - 15} << kMantissaBits);
        const U32 infinite = bit_cast<U32>(bit_cast<I32>(magnitude) >= 0x7c00);
        const U32 normal = (magnitude << 13) + rebias + (infinite & rebias);
        const U32 subnormal = bit_cast<U32>(__builtin_convertvector(bit_cast<I32>(magnitude), F32) * 0x1p-24f);
        const U32 small = bit_cast<U32>(bit_cast<I32>(magnitude) < 0x400);
        return bit_cast<F32>(select(small, subnormal, normal) | (half & 0x8000u) << 16);
    }
    static void store(uint8_t* p, F32 value) {
        const U32 bits = bit_cast<U32>(value);
        const U32 magnitude = bits & 0x7fffffffu;
        const I32 ordered = bit_cast<I32>(magnitude);
        const U32 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
        // The adder rounds to the steps of 2^-24 that subnormals have.
        const U32 subnormal = bit_cast<U32>(bit_cast<F32>(magnitude) + 0.5f) - 0x3f000000u;
        U32 half = select(bit_cast<U32>(ordered < 0x38800000), subnormal, normal);
        half = select(bit_cast<U32>(ordered >= 0x477ff000), U32{} + 0x7c00u, half);
        half = select(bit_cast<U32>(ordered > kInfinity), U32{} + 0x7e00u, half);
        store_as(p, __builtin_convertvector(half | (bits >> 16 & 0x8000u), U16));
    }
#endif
};

struct F32Row {
    static constexpr int kBytes = 4;
    static F32 load(const uint8_t* p) { return load_as<F32>(p); }
    static void store(uint8_t* p, F32 value) { store_as(p, value); }
};

// The first `count` lanes, at most kWidth; the others are zero, or not written.
template <class Row>
inline F32 load_some(const uint8_t* p, int64_t count) {
    uint8_t bytes[kWidth * Row::kBytes] = {};
    __builtin_memcpy(bytes, p, count * Row::kBytes);
    return Row::load(bytes);
}
template <class Row>
inline void store_some(uint8_t* p, F32 value, int64_t count) {
    uint8_t bytes[kWidth * Row::kBytes];
    Row::store(bytes, value);
    __builtin_memcpy(p, bytes, count * Row::kBytes);
}

template <class Row>
inline void row_to_float(const uint8_t* src, int64_t count, float* dst) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store_as(dst + i, Row::load(src + i * Row::kBytes));
    const F32 rest = load_some<Row>(src + i * Row::kBytes, count - i);
    __builtin_memcpy(dst + i, &rest, (count - i) * sizeof(float));
}

// `count` elements of `dtype`, and no byte behind them, to as many floats.
inline void to_float(const uint8_t* src, int32_t dtype, int64_t count, float* dst) {
    if (dtype == MINIFLOAT_BF16) row_to_float<Bf16Row>(src, count, dst);
    if (dtype == MINIFLOAT_F16) row_to_float<F16Row>(src, count, dst);
    if (dtype == MINIFLOAT_F32) row_to_float<F32Row>(src, count, dst);
}

// Input of paths that multiply float32: [m, columns of all steps], zeros behind the last column of x.
inline int64_t float_rows_bytes(const Weight& w, int64_t m, int32_t) {
    return m * w.steps * kStepCols * static_cast<int64_t>(sizeof(float));
}

inline void to_float_rows(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    const int64_t padded = w.steps * kStepCols;
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i) {
        float* row = reinterpret_cast<float*>(prepared) + i * padded;
        to_float(x.row(i), x.dtype, w.cols, row);
        for (int64_t k = w.cols; k < padded; ++k) row[k] = 0.0f;
    }
}

// The factors and the biases of the sums of some panels, a float per column of y.
struct Finish {
    static constexpr int kMaxPanels = 8;
    alignas(64) float scale[kMaxPanels * kPanelRows], bias[kMaxPanels * kPanelRows];

    Finish(const Weight& w, const Output& y, int64_t first, int64_t last, float factor) {
        const int64_t col = first * kPanelRows, count = min(last * kPanelRows, w.rows) - col;
        for (int64_t n = 0; n < (last - first) * kPanelRows; ++n) {
            scale[n] = w.row_scale(first)[n] * factor;
            bias[n] = -0.0f;  // keeps a sum of minus zero
        }
        if (y.bias != nullptr) to_float(y.bias + col * dtype_bytes(y.bias_dtype), y.bias_dtype, count, bias);
    }
};

template <class Row>
inline void store_row_as(const float* sums, const Finish& finish, int count, uint8_t* out) {
    for (int n = 0; n < count; n += kWidth) {
        const F32 value = load(sums + n) * load(finish.scale + n) + load(finish.bias + n);
        if (n + kWidth <= count) {
            Row::store(out + n * Row::kBytes, value);
        } else {
            store_some<Row>(out + n * Row::kBytes, value, count - n);
        }
    }
}

// Row `i` of y at panel `p`: sums [kPanelRows] times the row scales, plus the bias, rounded once.
inline void store_row(const Weight& w, const Output& y, int64_t p, int64_t i, const float* sums) {
    const int64_t begin = p * kPanelRows;
    const int count = static_cast<int>(min<int64_t>(kPanelRows, w.rows - begin));
    const Finish finish(w, y, p, p + 1, 1.0f);
    uint8_t* out = y.data + i * y.stride + begin * dtype_bytes(y.dtype);
    if (y.dtype == MINIFLOAT_BF16) store_row_as<Bf16Row>(sums, finish, count, out);
    if (y.dtype == MINIFLOAT_F16) store_row_as<F16Row>(sums, finish, count, out);
    if (y.dtype == MINIFLOAT_F32) store_row_as<F32Row>(sums, finish, count, out);
}

template <class Row>
inline void store_dots_as(const Weight& w, const Output& y, int64_t row, int rows, int64_t first, int64_t last,
                          const Finish& finish, const float* sums, int64_t panel_floats) {
    for (int r = 0; r < rows; ++r) {
        uint8_t* out = y.data + (row + r) * y.stride + first * kPanelRows * Row::kBytes;
        int64_t left = w.rows - first * kPanelRows;
        for (int64_t p = 0; p < last - first; ++p)
            for (int n = 0; n < kPanelRows && left > 0; n += kWidth, left -= kWidth, out += kWidth * Row::kBytes) {
                const int64_t col = p * kPanelRows + n;
                const F32 value = load(sums + p * panel_floats + r * kPanelRows + n) * load(finish.scale + col) +
                                  load(finish.bias + col);
                if (left >= kWidth) {
                    Row::store(out, value);
                } else {
                    store_some<Row>(out, value, left);
                }
            }
    }
}

// Stores the columns of y of panels first .. last - 1 for `rows` rows from `row` on. `sums` are those of the first panel,
// [rows][kPanelRows]; the sums of the next panel follow after `panel_floats`.
inline void store_dots(const Weight& w, const Output& y, int64_t row, int rows, int64_t first, int64_t last,
                       const Finish& finish, const float* sums, int64_t panel_floats) {
    const auto store = [&](auto type) {
        store_dots_as<decltype(type)>(w, y, row, rows, first, last, finish, sums, panel_floats);
    };
    if (y.dtype == MINIFLOAT_BF16) store(Bf16Row());
    if (y.dtype == MINIFLOAT_F16) store(F16Row());
    if (y.dtype == MINIFLOAT_F32) store(F32Row());
}

}  // namespace MINIFLOAT_ISA
