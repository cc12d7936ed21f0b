// The operations of a step on rows between its linears. Rows are contiguous; the functions process rows `begin` to
// `end` - 1.
#pragma once

#include "../api.h"
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

// Copies rows of a table as float32.
void embed(const void* table, int32_t dtype, const int32_t* tokens, int64_t hidden, float* x, int64_t begin,
           int64_t end);

// x += y, where y (of `dtype`) is not null; then out (of `dtype`) = x / sqrt(mean of squares + eps) * weight.
void add_and_norm(float* x, const uint8_t* y, const float* weight, int64_t hidden, float eps, int32_t dtype,
                  uint8_t* out, int64_t begin, int64_t end);

// The same norm of one row of float32, in place.
void norm(float* x, const float* weight, int64_t count, float eps);

// Cosines, then sines, [rotary / 2] each, of every position.
void turns(const int32_t* positions, const float* inv_freq, int64_t rotary, float scaling, float* out, int64_t begin,
           int64_t end);

// Rotates dimensions i and i + rotary / 2 of one head.
void rotate(float* x, const float* turn, int64_t rotary);

// out = silu(gate) * up for rows [gate | up] of 2 * count elements.
void silu_and_multiply(const uint8_t* gate_up, int64_t count, int32_t dtype, uint8_t* out, int64_t begin, int64_t end);

// `count` floats to as many elements of `dtype`.
void from_float(const float* src, int32_t dtype, int64_t count, uint8_t* dst);

// x += factor * y.
void add_scaled(float* x, const uint8_t* y, int32_t dtype, int64_t count, float factor);

// The sum of products.
float dot(const float* a, const float* b, int64_t count);

}  // namespace MINIFLOAT_ISA
