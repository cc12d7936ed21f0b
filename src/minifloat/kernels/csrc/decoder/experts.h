// Routing: the experts of each token, and the order in which rows are multiplied.
#pragma once

#include "../linear/convert.h"

namespace MINIFLOAT_ISA {

// Tokens sorted by expert. Sorted row i is token rows[i]; place[t * top_k + j] is the sorted row of token t with its
// j-th expert.
struct Routing {
    float* scores;     // [T, 2, experts rounded up to kLanes]: scores, and what is compared for the choice
    float* weights;    // [T, top_k]
    int32_t* chosen;   // [T, top_k]
    int64_t* offsets;  // [experts + 1]
    int64_t* rows;     // [T * top_k]
    int64_t* place;    // [T * top_k]
};

// Chooses the experts with the largest scores, ties to the lower number. x: [T, hidden] of `dtype`.
int32_t choose_experts(const minifloat_router& router, const uint8_t* x, int32_t dtype, int64_t hidden, int64_t count,
                       int threads, Routing& routing);

// x += factor times the weighted sum of the results y [T * top_k, hidden], of `dtype`, of each token's experts.
void add_experts(const minifloat_router& router, const Routing& routing, const uint8_t* y, int32_t dtype,
                 int64_t hidden, int64_t count, int threads, float factor, float* x);

// x += factor * sigmoid(gate * input) * y if there is a gate; else x += factor * y. All [T, hidden].
void add_shared(const float* gate, const uint8_t* input, const uint8_t* y, int32_t dtype, int64_t hidden,
                int64_t count, int threads, float factor, float* x);

}  // namespace MINIFLOAT_ISA
