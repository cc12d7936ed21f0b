// Routing to experts.
#include "parts.h"

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

// scores [count] to probabilities; `count` rounded up to whole vectors may be written.
void softmax(float* scores, int count) {
    const int padded = static_cast<int>(round_up(count, kLanes));
    float largest = scores[0], total = 0.0f;
    for (int e = 1; e < count; ++e) largest = max(scores[e], largest);
    for (int e = count; e < padded; ++e) scores[e] = 0.0f;
    for (int e = 0; e < padded; e += kWidth) store_as(scores + e, exp(load(scores + e) - largest));
    for (int e = 0; e < count; ++e) total += scores[e];
    for (int e = 0; e < count; ++e) scores[e] /= total;
}

int largest_of(const float* values, int begin, int end) {
    int best = begin;
    for (int e = begin + 1; e < end; ++e)
        if (values[e] > values[best]) best = e;
    return best;
}

// Leaves out the groups whose best experts, one or two of them, have the smallest sums.
void keep_best_groups(const minifloat_router& router, float* choice) {
    const int size = router.experts / router.groups;
    const float none = -__builtin_inff();
    for (int left = router.groups - router.groups_kept; left > 0; --left) {
        int worst = -1;
        float lowest = 0.0f;
        for (int g = 0; g < router.groups; ++g) {
            float* group = choice + g * size;
            const int first = largest_of(group, 0, size);
            const float best = group[first];
            if (best == none) continue;
            group[first] = none;
            const float sum = size > 1 && router.group_best > 1 ? best + group[largest_of(group, 0, size)] : best;
            group[first] = best;
            if (worst < 0 || sum <= lowest) {
                worst = g;
                lowest = sum;
            }
        }
        for (int e = 0; worst >= 0 && e < size; ++e) choice[worst * size + e] = none;
    }
}

// Turns products with the router into scores and what is compared for the choice.
void rate(const minifloat_router& router, float* scores, float* choice) {
    const int count = router.experts;
    for (int e = 0; router.bias != nullptr && e < count; ++e) scores[e] += router.bias[e];
    if (router.kind == MINIFLOAT_ROUTER_SOFTMAX) softmax(scores, count);
    if (router.kind == MINIFLOAT_ROUTER_SIGMOID)
        for (int e = 0; e < count; e += kWidth) store_as(scores + e, sigmoid(load(scores + e)));
    for (int e = 0; e < count; ++e) choice[e] = scores[e] + (router.correction == nullptr ? 0.0f : router.correction[e]);
    if (router.groups > 1) keep_best_groups(router, choice);
}

// Chooses the top_k largest, and removes them from `choice`.
void take(const minifloat_router& router, const float* scores, float* choice, int32_t* chosen, float* weights) {
    float total = 0.0f;
    for (int32_t j = 0; j < router.top_k; ++j) {
        chosen[j] = largest_of(choice, 0, router.experts);
        weights[j] = scores[chosen[j]];
        choice[chosen[j]] = -__builtin_inff();
        total += weights[j];
    }
    if (router.kind == MINIFLOAT_ROUTER_SOFTMAX_CHOSEN) {
        for (int32_t j = 0; j < router.top_k; ++j) choice[j] = weights[j];
        softmax(choice, router.top_k);
        for (int32_t j = 0; j < router.top_k; ++j) weights[j] = choice[j];
    } else if (router.normalize) {
        for (int32_t j = 0; j < router.top_k; ++j) weights[j] /= total;
    }
    for (int32_t j = 0; router.factor != 1.0f && j < router.top_k; ++j) weights[j] *= router.factor;
    for (int32_t j = 0; router.scales != nullptr && j < router.top_k; ++j) weights[j] *= router.scales[chosen[j]];
}

// The products of all tokens with the router, `stride` apart.
int32_t score_all(const minifloat_router& router, const uint8_t* x, int32_t dtype, int64_t hidden, int64_t count,
                  int threads, int64_t stride, float* scores) {
    const uint8_t* rows = static_cast<const uint8_t*>(router.weight);
    const int64_t row_bytes = hidden * dtype_bytes(router.dtype);
    const int64_t groups = ceil_div(count, kTogether), parts = ceil_div(router.experts, kExpertsOfPart);
    int32_t failed = 0;
    share(threads, groups * parts, hidden * kExpertsOfPart, [&](int64_t begin, int64_t end) {
        const int64_t bytes = kTogether * hidden * static_cast<int64_t>(sizeof(float));
        float* inputs = static_cast<float*>(minifloat::scratch(minifloat::kScratchThread, bytes));
        if (inputs == nullptr) return __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t t = i / parts * kTogether, first = i % parts * kExpertsOfPart;
            const int n = static_cast<int>(min<int64_t>(kTogether, count - t));
            if (i == begin || i % parts == 0) to_float(x + t * hidden * dtype_bytes(dtype), dtype, n * hidden, inputs);
            for (int64_t e = first; e < min<int64_t>(first + kExpertsOfPart, router.experts); ++e)
                score(inputs, hidden, n, rows + e * row_bytes, router.dtype, stride, scores + t * stride + e);
        }
    });
    return failed ? MINIFLOAT_NO_MEMORY : MINIFLOAT_OK;
}

void sort(const minifloat_router& experts, int64_t count, Routing& r) {
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

int32_t choose_experts(const minifloat_router& router, const uint8_t* x, int32_t dtype, int64_t hidden, int64_t count,
                       int threads, Routing& routing) {
    const int64_t padded = round_up(router.experts, kLanes);
    const int32_t status = score_all(router, x, dtype, hidden, count, threads, 2 * padded, routing.scores);
    if (status != MINIFLOAT_OK) return status;
    share(threads, count, static_cast<int64_t>(router.experts) * router.top_k, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* scores = routing.scores + 2 * t * padded;
            rate(router, scores, scores + padded);
            take(router, scores, scores + padded, routing.chosen + t * router.top_k,
                 routing.weights + t * router.top_k);
        }
    });
    sort(router, count, routing);
    return MINIFLOAT_OK;
}

void add_experts(const minifloat_router& experts, const Routing& routing, const uint8_t* y, int32_t dtype,
                 int64_t hidden, int64_t count, int threads, float factor, float* x) {
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    share(threads, count, hidden * experts.top_k, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * experts.top_k; i < end * experts.top_k; ++i)
            add_scaled(x + i / experts.top_k * hidden, y + routing.place[i] * row_bytes, dtype, hidden,
                       routing.weights[i] * factor);
    });
}

void add_shared(const float* gate, const uint8_t* input, const uint8_t* y, int32_t dtype, int64_t hidden,
                int64_t count, int threads, float factor, float* x) {
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
            const float open = gate == nullptr ? 1.0f : 1.0f / (1.0f + exp(broadcast(-product))[0]);
            add_scaled(x + t * hidden, y + t * row_bytes, dtype, hidden, open * factor);
        }
    });
}

}  // namespace MINIFLOAT_ISA
