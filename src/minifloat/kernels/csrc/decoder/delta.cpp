// The gated delta rule, token by token. A range of columns of a state is read, used and written for all tokens of a
// piece before the next range, so that it stays in the first cache.
#include "parts.h"

#include "../threads.h"
#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kPieceTokens = 32;
constexpr float kNormEps = 1e-6f;  // of the norms of q and k

// Where the rows of a key head and of its value heads begin: in the products, in the channels of the convolution, and
// in the state of a sequence.
struct Places {
    const minifloat_delta& d;
    int64_t group, padded;  // value heads of a key head; v_dim rounded up

    explicit Places(const minifloat_delta& delta)
        : d(delta), group(delta.v_heads / delta.k_heads), padded(round_up(delta.v_dim, kLanes)) {}

    int64_t keys() const { return static_cast<int64_t>(d.k_heads) * d.k_dim; }
    int64_t group_columns() const { return 2 * (int64_t{d.k_dim} + group * d.v_dim); }

    int64_t q_channel(int64_t h) const { return h * d.k_dim; }
    int64_t k_channel(int64_t h) const { return keys() + h * d.k_dim; }
    int64_t v_channel(int64_t h, int64_t i) const { return 2 * keys() + (h * group + i) * d.v_dim; }

    int64_t q_column(int64_t h) const { return d.grouped ? h * group_columns() : q_channel(h); }
    int64_t k_column(int64_t h) const { return d.grouped ? h * group_columns() + d.k_dim : k_channel(h); }
    int64_t v_column(int64_t h, int64_t i) const {
        return d.grouped ? h * group_columns() + 2 * int64_t{d.k_dim} + i * d.v_dim : v_channel(h, i);
    }
    int64_t z_column(int64_t h, int64_t i) const {
        if (d.grouped) return v_column(h, i) + group * d.v_dim;
        return delta_channels(d) + (h * group + i) * d.v_dim;
    }
    int64_t b_column(int64_t h, int64_t i) const { return (d.grouped ? 2 * h * group : h * group) + i; }
    int64_t a_column(int64_t h, int64_t i) const { return b_column(h, i) + (d.grouped ? group : d.v_heads); }

    // The inputs of the convolution before the next token, oldest first, [conv_width - 1, channels]; then the states of
    // the heads, [v_heads, k_dim, padded].
    int64_t head_floats() const { return d.k_dim * padded; }
    int64_t heads_at() const { return round_up((d.conv_width - 1) * delta_channels(d), kLanes); }
};

// Memory of a thread.
struct Scratch {
    float* window;  // [conv_width - 1 + tokens, dims]: inputs of the convolution of one head
    float* q;       // [tokens, k_dim]
    float* k;       // [tokens, k_dim]
    float* qk;      // [tokens]: their products
    float* v;       // [tokens, padded]
    float* out;     // [tokens, padded]
    float* gated;   // [2, v_dim]
    float* decay;   // [tokens]
    float* beta;    // [tokens]
};

int64_t cut(const Places& p, int64_t tokens, float* memory, Scratch& s) {
    const minifloat_delta& d = p.d;
    int64_t used = 0;
    const auto take = [&](float*& pointer, int64_t count) {
        pointer = memory == nullptr ? nullptr : memory + used;
        used += round_up(count, kLanes);
    };
    take(s.window, (d.conv_width - 1 + tokens) * max(d.k_dim, d.v_dim));
    take(s.q, tokens * d.k_dim);
    take(s.k, tokens * d.k_dim);
    take(s.qk, tokens);
    take(s.v, tokens * p.padded);
    take(s.out, tokens * p.padded);
    take(s.gated, 2 * int64_t{d.v_dim});
    take(s.decay, tokens);
    take(s.beta, tokens);
    return used * static_cast<int64_t>(sizeof(float));
}

// out [tokens, stride] = silu of the convolution of `dims` channels from `channel` on, whose inputs are columns of the
// rows x; moves the window of the state.
void convolve(const minifloat_delta& d, int32_t dtype, const uint8_t* x, int64_t row_bytes, int64_t tokens,
              int64_t channel, int64_t dims, float* state, float* window, float* out, int64_t stride) {
    const int64_t channels = delta_channels(d), before = d.conv_width - 1;
    for (int64_t j = 0; j < before; ++j)
        __builtin_memcpy(window + j * dims, state + j * channels + channel, dims * sizeof(float));
    for (int64_t t = 0; t < tokens; ++t) to_float(x + t * row_bytes, dtype, dims, window + (before + t) * dims);
    const minifloat_activation silu = {MINIFLOAT_SILU, 0, 1.0f, 0.0f};
    for (int64_t t = 0; t < tokens; ++t) {
        float* row = out + t * stride;
        for (int64_t c = 0; c < dims; ++c) row[c] = 0.0f;
        for (int64_t j = 0; j < d.conv_width; ++j) {
            const float *weight = d.conv + j * channels + channel, *input = window + (t + j) * dims;
            for (int64_t c = 0; c < dims; ++c) row[c] += weight[c] * input[c];
        }
        uint8_t* bytes = reinterpret_cast<uint8_t*>(row);
        activate(silu, bytes, dims, MINIFLOAT_F32, bytes, 0, 1);
    }
    for (int64_t j = 0; j < before; ++j)
        __builtin_memcpy(state + j * channels + channel, window + (tokens + j) * dims, dims * sizeof(float));
}

// x / sqrt(sum of squares + eps) * factor.
void normalize(float* x, int64_t count, float factor) {
    const float scale = factor / __builtin_sqrtf(dot(x, x, count) + kNormEps);
    for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

// One token and kVectors vectors of columns: state = decay * state + k (beta * (v - k decay * state)); out = q state.
template <int kVectors>
inline void update(float* state, int64_t stride, int64_t k_dim, const float* q, const float* k, float qk, float decay,
                   float beta, const float* v, float* out) {
    constexpr int kRows = 2;  // an addition takes several cycles
    F32 known[kRows][kVectors] = {}, read[kRows][kVectors] = {};
    int64_t i = 0;
    for (; i + kRows <= k_dim; i += kRows)
        for (int r = 0; r < kRows; ++r)
            for (int n = 0; n < kVectors; ++n) {
                const F32 row = load(state + (i + r) * stride + n * kWidth);
                known[r][n] += row * k[i + r];
                read[r][n] += row * q[i + r];
            }
    for (; i < k_dim; ++i)
        for (int n = 0; n < kVectors; ++n) {
            const F32 row = load(state + i * stride + n * kWidth);
            known[0][n] += row * k[i];
            read[0][n] += row * q[i];
        }
    F32 change[kVectors];
    for (int n = 0; n < kVectors; ++n) {
        change[n] = (load(v + n * kWidth) - (known[0][n] + known[1][n]) * decay) * beta;
        store_as(out + n * kWidth, (read[0][n] + read[1][n]) * decay + change[n] * qk);
    }
    for (i = 0; i < k_dim; ++i)
        for (int n = 0; n < kVectors; ++n) {
            float* at = state + i * stride + n * kWidth;
            store_as(at, load(at) * decay + change[n] * k[i]);
        }
}

// All tokens of a piece in one head.
void recur(const Places& p, const Scratch& s, int64_t tokens, float* state) {
    constexpr int kVectors = 2;
    const int64_t k_dim = p.d.k_dim;
    const auto columns = [&](auto run, int64_t at) {
        for (int64_t t = 0; t < tokens; ++t)
            run(state + at, s.q + t * k_dim, s.k + t * k_dim, t, s.v + t * p.padded + at, s.out + t * p.padded + at);
    };
    int64_t at = 0;
    for (; at + kVectors * kWidth <= p.padded; at += kVectors * kWidth)
        columns([&](float* from, const float* q, const float* k, int64_t t, const float* v, float* out) {
            update<kVectors>(from, p.padded, k_dim, q, k, s.qk[t], s.decay[t], s.beta[t], v, out);
        }, at);
    for (; at < p.padded; at += kWidth)
        columns([&](float* from, const float* q, const float* k, int64_t t, const float* v, float* out) {
            update<1>(from, p.padded, k_dim, q, k, s.qk[t], s.decay[t], s.beta[t], v, out);
        }, at);
}

float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

struct Work {
    const minifloat_step_args& a;
    const Places& p;
    const uint8_t *qkvz, *ba;
    uint8_t* out;
};

// How far each token lets the state decay, and how much of its correction it writes.
void gates(const Work& w, const Scratch& s, int64_t first, int64_t tokens, int64_t h, int64_t i) {
    const minifloat_delta& d = w.p.d;
    const int32_t dtype = w.a.decoder->dtype;
    const int64_t bytes = dtype_bytes(dtype), head = h * w.p.group + i;
    for (int64_t t = 0; t < tokens; ++t) {
        const uint8_t* row = w.ba + (first + t) * delta_gates(d) * bytes;
        float a, b;
        to_float(row + w.p.a_column(h, i) * bytes, dtype, 1, &a);
        to_float(row + w.p.b_column(h, i) * bytes, dtype, 1, &b);
        s.decay[t] = __builtin_expf(-d.decay[head] * softplus(a + d.dt_bias[head]));
        s.beta[t] = 1.0f / (1.0f + __builtin_expf(-b));
    }
}

// out = norm(result) * silu(z), of one value head.
void write_results(const Work& w, const Scratch& s, int64_t first, int64_t tokens, int64_t h, int64_t i) {
    const minifloat_delta& d = w.p.d;
    const int32_t dtype = w.a.decoder->dtype;
    const int64_t bytes = dtype_bytes(dtype), dims = d.v_dim;
    const minifloat_activation silu = {MINIFLOAT_SILU, 1, 1.0f, 0.0f};
    for (int64_t t = 0; t < tokens; ++t) {
        const uint8_t* row = w.qkvz + (first + t) * delta_inputs(d) * bytes;
        to_float(row + w.p.z_column(h, i) * bytes, dtype, dims, s.gated);
        float* result = s.gated + dims;
        __builtin_memcpy(result, s.out + t * w.p.padded, dims * sizeof(float));
        norm_part(result, d.norm, moments(d.norm, reinterpret_cast<uint8_t*>(result), MINIFLOAT_F32, dims), 0, dims);
        uint8_t* gated = reinterpret_cast<uint8_t*>(s.gated);
        activate(silu, gated, dims, MINIFLOAT_F32, gated, 0, 1);
        from_float(s.gated, dtype, dims,
                   w.out + ((first + t) * delta_results(d) + (h * w.p.group + i) * dims) * bytes);
    }
}

// The tokens of sequence s in key head h.
void run_head(const Work& w, Scratch& s, int32_t sequence, int64_t h) {
    const Places& p = w.p;
    const minifloat_delta& d = p.d;
    const int32_t dtype = w.a.decoder->dtype;
    const int64_t begin = w.a.starts[sequence], end = w.a.starts[sequence + 1];
    const int64_t row_bytes = delta_inputs(d) * dtype_bytes(dtype);
    float* state = w.a.states + w.a.slots[sequence] * w.a.state_floats + d.state_before;
    float* heads = state + p.heads_at();
    if (w.a.positions[begin] == 0) {
        const int64_t channels = delta_channels(d);
        for (int64_t j = 0; j + 1 < d.conv_width; ++j) {
            __builtin_memset(state + j * channels + p.q_channel(h), 0, d.k_dim * sizeof(float));
            __builtin_memset(state + j * channels + p.k_channel(h), 0, d.k_dim * sizeof(float));
            __builtin_memset(state + j * channels + p.v_channel(h, 0), 0, p.group * d.v_dim * sizeof(float));
        }
        __builtin_memset(heads + h * p.group * p.head_floats(), 0, p.group * p.head_floats() * sizeof(float));
    }
    for (int64_t first = begin; first < end; first += kPieceTokens) {
        const int64_t tokens = min(kPieceTokens, end - first);
        const uint8_t* rows = w.qkvz + first * row_bytes;
        const auto read = [&](int64_t column, int64_t channel, int64_t dims, float* out, int64_t stride) {
            convolve(d, dtype, rows + column * dtype_bytes(dtype), row_bytes, tokens, channel, dims, state, s.window, out,
                     stride);
        };
        read(p.q_column(h), p.q_channel(h), d.k_dim, s.q, d.k_dim);
        read(p.k_column(h), p.k_channel(h), d.k_dim, s.k, d.k_dim);
        for (int64_t t = 0; t < tokens; ++t) {
            normalize(s.q + t * d.k_dim, d.k_dim, 1.0f / __builtin_sqrtf(static_cast<float>(d.k_dim)));
            normalize(s.k + t * d.k_dim, d.k_dim, 1.0f);
            s.qk[t] = dot(s.q + t * d.k_dim, s.k + t * d.k_dim, d.k_dim);
        }
        for (int64_t i = 0; i < p.group; ++i) {
            gates(w, s, first, tokens, h, i);
            read(p.v_column(h, i), p.v_channel(h, i), d.v_dim, s.v, p.padded);
            recur(p, s, tokens, heads + (h * p.group + i) * p.head_floats());
            write_results(w, s, first, tokens, h, i);
        }
    }
}

}  // namespace

int32_t delta_all(const minifloat_step_args& a, const minifloat_delta& delta, const uint8_t* qkvz, const uint8_t* ba,
                  uint8_t* out) {
    const Places places(delta);
    const Work work = {a, places, qkvz, ba, out};
    int64_t longest = 0;
    for (int32_t s = 0; s < a.sequences; ++s) longest = max<int64_t>(longest, a.starts[s + 1] - a.starts[s]);
    longest = min(longest, kPieceTokens);
    int32_t status = MINIFLOAT_OK;
    const int64_t elements = 4 * places.group * places.head_floats() * a.token_count / a.sequences;
    // The heads of all sequences, sequence by sequence for each head: each thread gets heads of every sequence.
    share(a.threads, int64_t{delta.k_heads} * a.sequences, elements, [&](int64_t begin, int64_t end) {
        Scratch scratch = {};
        const int64_t bytes = cut(places, longest, nullptr, scratch);
        float* memory = static_cast<float*>(minifloat::scratch(minifloat::kScratchThread, bytes));
        if (memory == nullptr) {
            __atomic_store_n(&status, MINIFLOAT_NO_MEMORY, __ATOMIC_RELAXED);
            return;
        }
        __builtin_memset(memory, 0, bytes);  // what pads rows is a number
        cut(places, longest, memory, scratch);
        for (int64_t i = begin; i < end; ++i)
            run_head(work, scratch, static_cast<int32_t>(i % a.sequences), i / a.sequences);
    });
    return status;
}

}  // namespace MINIFLOAT_ISA
