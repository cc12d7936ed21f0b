// Compares the distributions of two models over a vocabulary: totals, the sum of their Kullback-Leibler divergence, first
// choices. Logits are float32; exponentials and sums are float64, so that equal logits give a divergence of exactly 0.
#include "../../native/api.h"
#include "../threads.h"
#include "doubles.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kUnroll = 2;  // sums that do not wait for each other
constexpr int kMostTop = MINIFLOAT_DIVERGENCE_TOP;
constexpr int64_t kChunk = 4 * kWidth;
constexpr float kInfinite = __builtin_inff();

// The largest logits of a row in falling order; of equal ones, those of the first tokens.
struct Top {
    int64_t size, filled = 0;
    float logits[kMostTop] = {};
    int32_t tokens[kMostTop] = {};

    bool takes(float logit) const { return filled < size || logit > logits[size - 1]; }
    void add(float logit, int64_t token) {
        if (!takes(logit)) return;
        int64_t at = filled < size ? filled++ : size - 1;
        for (; at > 0 && logit > logits[at - 1]; --at) logits[at] = logits[at - 1], tokens[at] = tokens[at - 1];
        logits[at] = logit;
        tokens[at] = static_cast<int32_t>(token);
    }
};

// Returns whether the row holds no NaN and its largest logit is finite.
bool find_top(const float* row, int64_t vocab, Top& top) {
    I32 unordered = {};
    int64_t i = 0;
    for (; i + kChunk <= vocab; i += kChunk) {
        F32 largest = load(row + i);
        unordered |= largest != largest;
        for (int64_t j = kWidth; j < kChunk; j += kWidth) {
            const F32 v = load(row + i + j);
            unordered |= v != v;
            largest = max(largest, v);
        }
        if (!top.takes(fold<kWidth, float>(largest, Max()))) continue;
        for (int64_t j = i; j < i + kChunk; ++j) top.add(row[j], j);
    }
    bool ordered = true;
    for (; i < vocab; ++i) {
        ordered &= row[i] == row[i];
        top.add(row[i], i);
    }
    for (int lane = 0; lane < kWidth; ++lane) ordered &= unordered[lane] == 0;
    return ordered && top.logits[0] > -kInfinite && top.logits[0] < kInfinite;
}

// Sums over a vocabulary: the weights of both models, e^(logit - largest), and those of p times the difference.
struct Sums {
    F64 p = {}, q = {}, difference = {};

    void add(F64 x, F64 y) {
        const F64 weight = exp(x);
        p += weight;
        q += exp(y);
        // 0 times infinity is 0
        difference += bit_cast<F64>(bit_cast<I64>(weight * (x - y)) & (weight > F64{}));
    }
};

void compare_row(const minifloat_divergence_args& a, int64_t row) {
    const float *p = a.p + row * a.vocab, *q = a.q + row * a.vocab;
    Top of_p = {a.top}, of_q = {a.top};
    const bool finite_p = find_top(p, a.vocab, of_p), finite_q = find_top(q, a.vocab, of_q);
    const double largest_p = of_p.logits[0], largest_q = of_q.logits[0];
    Sums sums[kUnroll];
    int64_t i = 0;
    for (; i + kUnroll * kCount <= a.vocab; i += kUnroll * kCount)
        for (int u = 0; u < kUnroll; ++u)
            sums[u].add(widen(p + i + u * kCount) - largest_p, widen(q + i + u * kCount) - largest_q);
    for (; i < a.vocab; i += kCount) {
        float rest[2][kCount];
        for (int lane = 0; lane < kCount; ++lane) {
            const bool inside = i + lane < a.vocab;
            rest[0][lane] = inside ? p[i + lane] : -kInfinite;
            rest[1][lane] = inside ? q[i + lane] : -kInfinite;
        }
        sums[0].add(widen(rest[0]) - largest_p, widen(rest[1]) - largest_q);
    }
    const double not_finite = __builtin_nan("");
    double* result = a.sums + row * 3;
    result[0] = finite_p ? total(sums[0].p + sums[1].p) : not_finite;
    result[1] = finite_q ? total(sums[0].q + sums[1].q) : not_finite;
    result[2] = finite_p && finite_q ? total(sums[0].difference + sums[1].difference) : not_finite;
    for (int64_t k = 0; k < a.top; ++k) {
        a.p_logits[row * a.top + k] = of_p.logits[k];
        a.q_logits[row * a.top + k] = of_q.logits[k];
        a.p_tokens[row * a.top + k] = of_p.tokens[k];
        a.q_tokens[row * a.top + k] = of_q.tokens[k];
    }
}

}  // namespace

// dispatch.cpp declares this function for every instruction set.
void divergence(const minifloat_divergence_args& a) {
    const int64_t rows = a.rows;
    minifloat::parallel(static_cast<int>(max<int64_t>(1, min<int64_t>(a.threads, rows))), [&](int thread, int count) {
        for (int64_t row = rows * thread / count; row < rows * (thread + 1) / count; ++row) compare_row(a, row);
    });
}

}  // namespace MINIFLOAT_ISA
