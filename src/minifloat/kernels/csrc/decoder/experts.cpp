// Routing to experts. The router is small compared with the experts, but it is float32 and read completely for every
// token, so several tokens share one reading.
#include "experts.h"

#include "../threads.h"
#include "math.h"
#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kTogether = 4;  // tokens that share a reading of the router
constexpr int kExpertsOfPart = 16;

// The products of one router row with `count` tokens, at most kTogether, whose rows are `hidden` apart.
void score(const float* x, int64_t hidden, int count, const uint8_t* row, int32_t dtype, int64_t stride, float* out) {
    constexpr int kPiece = 512;
    alignas(64) float weights[kPiece];
    float sums[kTogether] = {};
    for (int64_t i = 0; i < hidden; i += kPiece) {
        const int64_t n = min<int64_t>(kPiece, hidden - i);
        to_float(row + i * dtype_bytes(dtype), dtype, n, weights);
        for (int t = 0; t < count; ++t) sums[t] += dot(x + t * hidden + i, weights, n);
    }
    for (int t = 0; t < count; ++t) out[t * stride] = sums[t];
}

// scores [experts] to probabilities; `experts` rounded up to whole vectors may be written.
void softmax(float* scores, int experts) {
    const int padded = static_cast<int>(round_up(experts, kLanes));
    float largest = scores[0], total = 0.0f;
    for (int e = 1; e < experts; ++e) largest = max(scores[e], largest);
    for (int e = experts; e < padded; ++e) scores[e] = 0.0f;
    for (int e = 0; e < padded; e += kWidth) store_as(scores + e, exp(load(scores + e) - largest));
    for (int e = 0; e < experts; ++e) total += scores[e];
    for (int e = 0; e < experts; ++e) scores[e] /= total;
}

// Chooses the top_k largest probabilities, and removes them from `probabilities`.
void take(const minifloat_experts& experts, float* probabilities, int32_t* chosen, float* weights) {
    float total = 0.0f;
    for (int32_t j = 0; j < experts.top_k; ++j) {
        int32_t best = 0;
        for (int32_t e = 1; e < experts.experts; ++e)
            if (probabilities[e] > probabilities[best]) best = e;
        chosen[j] = best;
        weights[j] = probabilities[best];
        probabilities[best] = -1.0f;
        total += weights[j];
    }
    for (int32_t j = 0; experts.normalize && j < experts.top_k; ++j) weights[j] /= total;
}

// The products of all tokens with the router, [T, padded].
int32_t score_all(const minifloat_experts& experts, const uint8_t* x, int32_t dtype, int64_t hidden, int64_t count,
                  int threads, int64_t padded, float* scores) {
    const uint8_t* router = static_cast<const uint8_t*>(experts.router);
    const int64_t row_bytes = hidden * dtype_bytes(experts.router_dtype);
    const int64_t groups = ceil_div(count, kTogether), parts = ceil_div(experts.experts, kExpertsOfPart);
    int32_t failed = 0;
    share(threads, groups * parts, hidden * kExpertsOfPart, [&](int64_t begin, int64_t end) {
        const int64_t bytes = kTogether * hidden * static_cast<int64_t>(sizeof(float));
        float* inputs = static_cast<float*>(minifloat::scratch(minifloat::kScratchThread, bytes));
        if (inputs == nullptr) return __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t t = i / parts * kTogether, first = i % parts * kExpertsOfPart;
            const int n = static_cast<int>(min<int64_t>(kTogether, count - t));
            if (i == begin || i % parts == 0) to_float(x + t * hidden * dtype_bytes(dtype), dtype, n * hidden, inputs);
            for (int64_t e = first; e < min<int64_t>(first + kExpertsOfPart, experts.experts); ++e)
                score(inputs, hidden, n, router + e * row_bytes, experts.router_dtype, padded, scores + t * padded + e);
        }
    });
    return failed ? MINIFLOAT_NO_MEMORY : MINIFLOAT_OK;
}

void sort(const minifloat_experts& experts, int64_t count, Routing& r) {
    const int64_t rows = count * experts.top_k;
    for (int32_t e = 0; e <= experts.experts; ++e) r.offsets[e] = 0;
    for (int64_t i = 0; i < rows; ++i) ++r.offsets[r.chosen[i] + 1];
    for (int32_t e = 0; e < experts.experts; ++e) r.offsets[e + 1] += r.offsets[e];
    // Each offset moves to the end of its expert, which is where the next one begins.
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = r.offsets[r.chosen[i]]++;
        r.place[i] = row;
        r.rows[row] = i / experts.top_k;
    }
    for (int32_t e = experts.experts; e > 0; --e) r.offsets[e] = r.offsets[e - 1];
    r.offsets[0] = 0;
}

}  // namespace

int32_t choose_experts(const minifloat_experts& experts, const uint8_t* x, int32_t dtype, int64_t hidden,
                       int64_t count, int threads, Routing& routing) {
    const int64_t padded = round_up(experts.experts, kLanes);
    const int32_t status = score_all(experts, x, dtype, hidden, count, threads, padded, routing.scores);
    if (status != MINIFLOAT_OK) return status;
    share(threads, count, experts.experts * experts.top_k, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* scores = routing.scores + t * padded;
            softmax(scores, experts.experts);
            take(experts, scores, routing.chosen + t * experts.top_k, routing.weights + t * experts.top_k);
        }
    });
    sort(experts, count, routing);
    return MINIFLOAT_OK;
}

void add_experts(const minifloat_experts& experts, const Routing& routing, const uint8_t* y, int32_t dtype,
                 int64_t hidden, int64_t count, int threads, float* x) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    share(threads, count, hidden * experts.top_k, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * experts.top_k; i < end * experts.top_k; ++i)
            add_scaled(x + i / experts.top_k * hidden, y + routing.place[i] * row_bytes, dtype, hidden,
                       routing.weights[i]);
    });
}

void add_shared(const float* gate, const uint8_t* input, const uint8_t* y, int32_t dtype, int64_t hidden,
                int64_t count, int threads, float* x) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    share(threads, count, 2 * hidden, [&](int64_t begin, int64_t end) {
        constexpr int kPiece = 512;
        alignas(64) float piece[kPiece];
        for (int64_t t = begin; t < end; ++t) {
            float product = 0.0f;
            for (int64_t i = 0; gate != nullptr && i < hidden; i += kPiece) {
                const int64_t n = min<int64_t>(kPiece, hidden - i);
                to_float(input + t * row_bytes + i * dtype_bytes(dtype), dtype, n, piece);
                product += dot(piece, gate + i, n);
            }
            const float factor = gate == nullptr ? 1.0f : 1.0f / (1.0f + exp(broadcast(-product))[0]);
            add_scaled(x + t * hidden, y + t * row_bytes, dtype, hidden, factor);
        }
    });
}

}  // namespace MINIFLOAT_ISA
