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

template <class Row>
inline void add(float* x, const uint8_t* y, int64_t count, float factor) {
    for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, load_n(x, i, n) + load_n<Row>(y, i, n) * factor); });
}

// Sums of function(elements), as dot() sums.
template <class Row, class Function>
inline float sum_of(const uint8_t* x, int64_t count, const Function& function) {
    constexpr int kSums = 4;  // an addition takes several cycles
    F32 sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums * kWidth <= count; i += kSums * kWidth)
        for (int s = 0; s < kSums; ++s) sums[s] += function(load_n<Row>(x, i + s * kWidth, kWidth), kWidth);
    for_vectors(count - i, [&](int64_t j, int n) { sums[0] += function(load_n<Row>(x, i + j, n), n); });
    return fold<kWidth, float>((sums[0] + sums[2]) + (sums[1] + sums[3]), Add());
}

// Zero in the lanes from n on.
inline F32 first_lanes(F32 value, int n) {
    if (n == kWidth) return value;
    float lanes[kWidth] = {};
    __builtin_memcpy(lanes, &value, n * sizeof(float));
    return load(lanes);
}

template <class Row>
inline Moments moments_of(const minifloat_norm& norm, const uint8_t* x, int64_t count) {
    const float size = static_cast<float>(count);
    float mean = 0.0f;
    if (norm.centered) mean = sum_of<Row>(x, count, [](F32 v, int) { return v; }) / size;
    const float squares = sum_of<Row>(x, count, [&](F32 v, int n) {
        const F32 distance = norm.centered ? first_lanes(v - mean, n) : v;
        return distance * distance;
    });
    return {mean, 1.0f / __builtin_sqrtf(squares / size + norm.eps)};
}

inline F32 normed(F32 x, const minifloat_norm& norm, const Moments& known, int64_t i, int n) {
    if (norm.centered) x -= known.mean;
    const F32 value = x * known.inverse * load_n(norm.weight, i, n);
    return norm.bias == nullptr ? value : value + load_n(norm.bias, i, n);
}

template <class Row>
inline void add_normed(float* x, const Result& result, const uint8_t* y, int64_t count) {
    const Moments known = moments_of<Row>(*result.norm, y, count);
    for_vectors(count, [&](int64_t i, int n) {
        const F32 value = normed(load_n<Row>(y, i, n), *result.norm, known, i, n);
        store_n(x, i, n, load_n(x, i, n) + value * result.factor);
    });
}

template <class Row>
inline void norm_to(const float* x, const minifloat_norm& norm, int64_t count, uint8_t* out) {
    if (norm.weight == nullptr) {
        for_vectors(count, [&](int64_t i, int n) { store_n<Row>(out, i, n, load_n(x, i, n)); });
        return;
    }
    const Moments known = moments_of<F32Row>(norm, reinterpret_cast<const uint8_t*>(x), count);
    for_vectors(count, [&](int64_t i, int n) { store_n<Row>(out, i, n, normed(load_n(x, i, n), norm, known, i, n)); });
}

// The functions of enum minifloat_activation_kind, of a gate and what it multiplies.
struct Silu {
    F32 operator()(F32 gate, F32 up) const { return gate / (exp(-gate) + 1.0f) * up; }
};
struct Gelu {
    F32 operator()(F32 gate, F32 up) const { return gate * 0.5f * (erf(gate * 0.70710678f) + 1.0f) * up; }
};
struct GeluTanh {
    // (1 + tanh(z)) / 2 is the sigmoid of 2 z.
    F32 operator()(F32 gate, F32 up) const {
        const F32 z = (gate * gate * gate * 0.044715f + gate) * 1.5957691216f;
        return gate / (exp(-z) + 1.0f) * up;
    }
};
struct Relu {
    F32 operator()(F32 gate, F32 up) const { return max(F32{}, gate) * up; }
};
struct ReluSquared {
    F32 operator()(F32 gate, F32 up) const {
        const F32 positive = max(F32{}, gate);
        return positive * positive * up;
    }
};
struct ClampedSwiglu {
    float alpha, limit;
    F32 operator()(F32 gate, F32 up) const {
        const F32 most = broadcast(limit), bounded = min(most, gate);
        return (max(-most, min(most, up)) + 1.0f) * (bounded * sigmoid(bounded * alpha));
    }
};

template <class Row, class Activation>
inline void activate_rows(const Activation& function, bool gated, const uint8_t* x, int64_t count, uint8_t* out,
                          int64_t begin, int64_t end) {
    const int64_t row_bytes = count * Row::kBytes;
    for (int64_t t = begin; t < end; ++t) {
        const uint8_t* gate = x + (gated ? 2 : 1) * t * row_bytes;
        for_vectors(count, [&](int64_t i, int n) {
            const F32 up = gated ? load_n<Row>(gate + row_bytes, i, n) : F32{} + 1.0f;
            store_n<Row>(out + t * row_bytes, i, n, function(load_n<Row>(gate, i, n), up));
        });
    }
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

void embed(const void* table, int32_t dtype, const int32_t* tokens, int64_t hidden, float factor, float* x,
           int64_t begin, int64_t end) {
    const uint8_t* rows = static_cast<const uint8_t*>(table);
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    for (int64_t t = begin; t < end; ++t) {
        to_float(rows + tokens[t] * row_bytes, dtype, hidden, x + t * hidden);
        if (factor != 1.0f) scale_and_cap(x + t * hidden, hidden, factor, 0.0f);
    }
}

void add_result(float* x, const Result& result, int64_t hidden, int32_t dtype, int64_t begin, int64_t end) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    for (int64_t t = begin; t < end && result.y != nullptr; ++t) {
        const uint8_t* y = result.y + t * row_bytes;
        if (result.norm == nullptr || result.norm->weight == nullptr) {
            add_scaled(x + t * hidden, y, dtype, hidden, result.factor);
        } else {
            with_rows_of(dtype, [&](auto kind) { add_normed<decltype(kind)>(x + t * hidden, result, y, hidden); });
        }
    }
}

void add_and_norm(float* x, const Result& result, const minifloat_norm& norm, int64_t hidden, int32_t dtype,
                  uint8_t* out, int64_t begin, int64_t end) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    for (int64_t t = begin; t < end; ++t) {
        add_result(x, result, hidden, dtype, t, t + 1);
        with_rows_of(dtype, [&](auto kind) {
            norm_to<decltype(kind)>(x + t * hidden, norm, hidden, out + t * row_bytes);
        });
    }
}

Moments moments(const minifloat_norm& norm, const uint8_t* row, int32_t dtype, int64_t count) {
    Moments known = {};
    with_rows_of(dtype, [&](auto kind) { known = moments_of<decltype(kind)>(norm, row, count); });
    return known;
}

void norm_part(float* x, const minifloat_norm& norm, const Moments& known, int64_t offset, int64_t count) {
    for_vectors(count, [&](int64_t i, int n) {
        F32 value = load_n(x, i, n);
        if (norm.centered) value -= known.mean;
        value = value * known.inverse * load_n(norm.weight, offset + i, n);
        if (norm.bias != nullptr) value += load_n(norm.bias, offset + i, n);
        store_n(x, i, n, value);
    });
}

void turns(const int32_t* positions, const minifloat_rotary& rotary, float* out, int64_t begin, int64_t end) {
    const int64_t half = rotary.rotary / 2;
    for (int64_t t = begin; t < end; ++t) {
        float* row = out + t * rotary.rotary;
        for (int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(positions[t]) * rotary.inv_freq[i];
            row[i] = __builtin_cosf(angle) * rotary.scaling;
            row[half + i] = __builtin_sinf(angle) * rotary.scaling;
        }
    }
}

void rotate(float* x, const float* turn, const minifloat_rotary& rotary) {
    const int64_t half = rotary.rotary / 2;
    if (rotary.interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = first * turn[i] - second * turn[half + i];
            x[2 * i + 1] = second * turn[i] + first * turn[half + i];
        }
        return;
    }
    for_vectors(half, [&](int64_t i, int n) {
        const F32 cosine = load_n(turn, i, n), sine = load_n(turn + half, i, n);
        const F32 first = load_n(x, i, n), second = load_n(x + half, i, n);
        store_n(x, i, n, first * cosine - second * sine);
        store_n(x + half, i, n, second * cosine + first * sine);
    });
}

void activate(const minifloat_activation& activation, const uint8_t* x, int64_t count, int32_t dtype, uint8_t* out,
              int64_t begin, int64_t end) {
    const bool gated = activation.gated != 0;
    with_rows_of(dtype, [&](auto row) {
        typedef decltype(row) Row;
        const auto run = [&](const auto& function) { activate_rows<Row>(function, gated, x, count, out, begin, end); };
        switch (activation.kind) {
            case MINIFLOAT_SILU: return run(Silu());
            case MINIFLOAT_GELU: return run(Gelu());
            case MINIFLOAT_GELU_TANH: return run(GeluTanh());
            case MINIFLOAT_RELU: return run(Relu());
            case MINIFLOAT_RELU_SQUARED: return run(ReluSquared());
            default: return run(ClampedSwiglu{activation.alpha, activation.limit});
        }
    });
}

void scale_and_cap(float* x, int64_t count, float factor, float cap) {
    if (cap == 0.0f) {
        for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, load_n(x, i, n) * factor); });
        return;
    }
    for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, tanh(load_n(x, i, n) * factor / cap) * cap); });
}

void multiply_by_sigmoid(float* x, const float* gate, int64_t count) {
    for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, load_n(x, i, n) * sigmoid(load_n(gate, i, n))); });
}

void clip(float* x, int64_t count, float limit) {
    const F32 most = broadcast(limit);
    for_vectors(count, [&](int64_t i, int n) { store_n(x, i, n, max(-most, min(most, load_n(x, i, n)))); });
}

}  // namespace MINIFLOAT_ISA
