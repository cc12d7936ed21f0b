// The operations of a step on rows between its linears. Rows are contiguous; the functions process rows `begin` to
// `end` - 1.
#pragma once

#include "../../native/api.h"
#include "../linear/convert.h"
#include "../threads.h"

namespace MINIFLOAT_ISA {

// Elements that are worth an additional thread: some microseconds of work.
constexpr int64_t kElementsPerThread = 16 << 10;

// Calls function(begin, end) for ranges that cover `rows`, on several threads if there is enough work.
template <class Function>
inline void share(int threads, int64_t rows, int64_t elements_per_row, const Function& function) {
    const int64_t useful = rows * elements_per_row / kElementsPerThread;
    const int team = static_cast<int>(max<int64_t>(1, min(min<int64_t>(threads, rows), useful)));
    if (team == 1) return function(int64_t{0}, rows);
    minifloat::parallel(team, [&](int thread, int count) {
        function(rows * thread / count, rows * (thread + 1) / count);
    });
}

// Rows of a table as float32, times a factor.
void embed(const void* table, int32_t dtype, const int32_t* tokens, int64_t hidden, float factor, float* x,
           int64_t begin, int64_t end);

// A result that is added to the residual stream: x += factor * norm(y).
struct Result {
    const uint8_t* y;  // rows of the decoder's dtype; null: there is none
    const minifloat_norm* norm;
    float factor;
};

// Adds the result to x; then out (of `dtype`) = norm(x), or x where there is no norm.
void add_and_norm(float* x, const Result& result, const minifloat_norm& norm, int64_t hidden, int32_t dtype,
                  uint8_t* out, int64_t begin, int64_t end);

// x += the result.
void add_result(float* x, const Result& result, int64_t hidden, int32_t dtype, int64_t begin, int64_t end);

// What a norm subtracts from a row of `dtype`, and what it multiplies by besides its weight.
struct Moments {
    float mean, inverse;
};
Moments moments(const minifloat_norm& norm, const uint8_t* row, int32_t dtype, int64_t count);

// A norm, in place, of `count` elements of a row of which the moments are known; `offset` elements of the weight precede.
void norm_part(float* x, const minifloat_norm& norm, const Moments& known, int64_t offset, int64_t count);

// Cosines, then sines, [rotary / 2] each, of every position.
void turns(const int32_t* positions, const minifloat_rotary& rotary, float* out, int64_t begin, int64_t end);

// Rotates the pairs of dimensions of one head.
void rotate(float* x, const float* turn, const minifloat_rotary& rotary);

// out = function(gate) * up for rows [gate | up] of 2 * count elements, or function(x) for rows of `count`.
void activate(const minifloat_activation& activation, const uint8_t* x, int64_t count, int32_t dtype, uint8_t* out,
              int64_t begin, int64_t end);

// x = cap * tanh(x * factor / cap); without a cap x * factor.
void scale_and_cap(float* x, int64_t count, float factor, float cap);

// x *= sigmoid(gate).
void multiply_by_sigmoid(float* x, const float* gate, int64_t count);

// Clamps every element to -limit .. limit; NaN stays.
void clip(float* x, int64_t count, float limit);

// `count` floats to as many elements of `dtype`.
void from_float(const float* src, int32_t dtype, int64_t count, uint8_t* dst);

// x += factor * y.
void add_scaled(float* x, const uint8_t* y, int32_t dtype, int64_t count, float factor);

// The sum of products.
float dot(const float* a, const float* b, int64_t count);

}  // namespace MINIFLOAT_ISA
