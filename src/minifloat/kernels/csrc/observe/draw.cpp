// Draws tokens from the distributions that logits are: exponentials and sums are float64.
#include "../../native/api.h"
#include "../threads.h"
#include "doubles.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kMostBlocks = 256;  // sums of a row that are kept, so that one block is summed a second time

// The weights of up to kCount tokens; 0 behind the last one.
inline F64 weights(const float* logits, int64_t count, double largest, double temperature) {
    if (count >= kCount) return exp((widen(logits) - largest) / temperature);
    float some[kCount];
    for (int lane = 0; lane < kCount; ++lane) some[lane] = lane < count ? logits[lane] : -__builtin_inff();
    return exp((widen(some) - largest) / temperature);
}

int64_t draw_row(const minifloat_draw_args& a, int64_t row) {
    const float* logits = a.logits + row * a.stride;
    const double largest = a.largest[row], temperature = a.temperatures[row];
    const int64_t vectors = (a.vocab + kCount - 1) / kCount;
    const int64_t block = (vectors + kMostBlocks - 1) / kMostBlocks * kCount;
    double sums[kMostBlocks], sum = 0.0;
    int64_t blocks = 0;
    for (int64_t first = 0; first < a.vocab; first += block) {
        F64 of_block = {};
        for (int64_t i = first; i < min<int64_t>(first + block, a.vocab); i += kCount)
            of_block += weights(logits + i, a.vocab - i, largest, temperature);
        sum += total(of_block);
        sums[blocks++] = sum;
    }
    const double wanted = a.uniforms[row] * sum;
    int64_t found = 0;
    while (sums[found] <= wanted && sums[found] < sum) ++found;
    sum = found == 0 ? 0.0 : sums[found - 1];
    int64_t last = found * block;  // the block's last token of any weight, should the sums not reach `wanted` here
    for (int64_t i = found * block; i < min<int64_t>((found + 1) * block, a.vocab); i += kCount) {
        const F64 some = weights(logits + i, a.vocab - i, largest, temperature);
        for (int lane = 0; lane < min<int64_t>(kCount, a.vocab - i); ++lane) {
            sum += some[lane];
            if (sum > wanted) return i + lane;
            if (some[lane] > 0.0) last = i + lane;
        }
    }
    return last;
}

}  // namespace

// dispatch.cpp declares this function for every instruction set.
void draw(const minifloat_draw_args& a) {
    const int64_t rows = a.rows;
    minifloat::parallel(static_cast<int>(max<int64_t>(1, min<int64_t>(a.threads, rows))), [&](int thread, int count) {
        for (int64_t row = rows * thread / count; row < rows * (thread + 1) / count; ++row)
            a.tokens[row] = draw_row(a, row);
    });
}

}  // namespace MINIFLOAT_ISA
