// Norms, rotation and activations: each a pass over a row that is in the first cache.
#include "rows.h"

#include "math.h"

namespace MINIFLOAT_ISA {
namespace {

// Calls function with the row type of a dtype.
template <class Function>
inline void with_rows_of(int32_t dtype, const Function& function) {
    if (dtype == MINIFLOAT_BF16) function(Bf16Row());
    if (dtype == MINIFLOAT_F16) function(F16Row());
    if (dtype == MINIFLOAT_F32) function(F32Row());
}

// Calls function(i, n) for vectors of `count` elements, n < kWidth for the last where they do not fill it.
template <class Function>
inline void for_vectors(int64_t count, const Function& function) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) function(i, kWidth);
    if (i < count) function(i, static_cast<int>(count - i));
}

template <class Row>
inline F32 load_n(const uint8_t* p, int64_t i, int n) {
    p += i * Row::kBytes;
    return n == kWidth ? Row::load(p) : load_some<Row>(p, n);
}
template <class Row>
inline void store_n(uint8_t* p, int64_t i, int n, F32 value) {
    p += i * Row::kBytes;
    if (n == kWidth) {
        Row::store(p, value);
    } else {
        store_some<Row>(p, value, n);
    }
}
inline F32 load_n(const float* p, int64_t i, int n) {
    return load_n<F32Row>(reinterpret_cast<const uint8_t*>(p), i, n);
}
inline void store_n(float* p, int64_t i, int n, F32 value) {
    store_n<F32Row>(reinterpret_cast<uint8_t*>(p), i, n, value);
}

inline float inverse_length(float squares, int64_t count, float eps) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(count) + eps);
}

template <class Row>
inline void add(float* x, const uint8_t* y, int64_t count, float factor) {
    for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, load_n(x, i, n) + load_n<Row>(y, i, n) * factor); });
}

template <class Row>
inline void scale_to(const float* x, const float* weight, int64_t count, float factor, uint8_t* out) {
    for_vectors(count, [&](int64_t i, int n) {
        store_n<Row>(out, i, n, load_n(x, i, n) * factor * load_n(weight, i, n));
    });
}

}  // namespace

float dot(const float* a, const float* b, int64_t count) {
    constexpr int kSums = 4;  // an addition takes several cycles
    F32 sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums * kWidth <= count; i += kSums * kWidth)
        for (int s = 0; s < kSums; ++s) sums[s] += load(a + i + s * kWidth) * load(b + i + s * kWidth);
    for_vectors(count - i, [&](int64_t j, int n) { sums[0] += load_n(a, i + j, n) * load_n(b, i + j, n); });
    return fold<kWidth, float>((sums[0] + sums[2]) + (sums[1] + sums[3]), Add());
}

void from_float(const float* src, int32_t dtype, int64_t count, uint8_t* dst) {
    with_rows_of(dtype, [&](auto row) {
        for_vectors(count, [&](int64_t i, int n) { store_n<decltype(row)>(dst, i, n, load_n(src, i, n)); });
    });
}

void add_scaled(float* x, const uint8_t* y, int32_t dtype, int64_t count, float factor) {
    with_rows_of(dtype, [&](auto row) { add<decltype(row)>(x, y, count, factor); });
}

void embed(const void* table, int32_t dtype, const int32_t* tokens, int64_t hidden, float* x, int64_t begin,
           int64_t end) {
    const uint8_t* rows = static_cast<const uint8_t*>(table);
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    for (int64_t t = begin; t < end; ++t) to_float(rows + tokens[t] * row_bytes, dtype, hidden, x + t * hidden);
}

void add_and_norm(float* x, const uint8_t* y, const float* weight, int64_t hidden, float eps, int32_t dtype,
                  uint8_t* out, int64_t begin, int64_t end) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    for (int64_t t = begin; t < end; ++t) {
        float* row = x + t * hidden;
        if (y != nullptr) add_scaled(row, y + t * row_bytes, dtype, hidden, 1.0f);
        const float factor = inverse_length(dot(row, row, hidden), hidden, eps);
        with_rows_of(dtype, [&](auto kind) {
            scale_to<decltype(kind)>(row, weight, hidden, factor, out + t * row_bytes);
        });
    }
}

void norm(float* x, const float* weight, int64_t count, float eps) {
    const float factor = inverse_length(dot(x, x, count), count, eps);
    scale_to<F32Row>(x, weight, count, factor, reinterpret_cast<uint8_t*>(x));
}

void turns(const int32_t* positions, const float* inv_freq, int64_t rotary, float scaling, float* out, int64_t begin,
           int64_t end) {
    const int64_t half = rotary / 2;
    for (int64_t t = begin; t < end; ++t) {
        float* row = out + t * rotary;
        for (int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[t]) * inv_freq[i];
            row[i] = __builtin_cosf(angle) * scaling;
            row[half + i] = __builtin_sinf(angle) * scaling;
        }
    }
}

void rotate(float* x, const float* turn, int64_t rotary) {
    const int64_t half = rotary / 2;
    for_vectors(half, [&](int64_t i, int n) {
        const F32 cosine = load_n(turn, i, n), sine = load_n(turn + half, i, n);
        const F32 first = load_n(x, i, n), second = load_n(x + half, i, n);
        store_n(x, i, n, first * cosine - second * sine);
        store_n(x + half, i, n, second * cosine + first * sine);
    });
}

void silu_and_multiply(const uint8_t* gate_up, int64_t count, int32_t dtype, uint8_t* out, int64_t begin,
                       int64_t end) {
    with_rows_of(dtype, [&](auto row) {
        typedef decltype(row) Row;
        const int64_t row_bytes = count * Row::kBytes;
        for (int64_t t = begin; t < end; ++t) {
            const uint8_t* gate = gate_up + 2 * t * row_bytes;
            for_vectors(count, [&](int64_t i, int n) {
                const F32 g = load_n<Row>(gate, i, n), u = load_n<Row>(gate + row_bytes, i, n);
                store_n<Row>(out + t * row_bytes, i, n, g / (exp(-g) + 1.0f) * u);
            });
        }
    });
}

}  // namespace MINIFLOAT_ISA
