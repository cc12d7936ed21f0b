// The gated delta rule of all sequences of a step in one layer, and the convolution and norms around it;
// kernels/decoder/delta.py defines what it computes.
#pragma once

#include "../../native/api.h"
#include "../intrinsics.h"
#include "../linear/convert.h"

namespace MINIFLOAT_ISA {

// Channels of the convolution: q, k and v of all heads.
inline int64_t delta_channels(const minifloat_delta& d) {
    return 2 * static_cast<int64_t>(d.k_heads) * d.k_dim + static_cast<int64_t>(d.v_heads) * d.v_dim;
}
// Elements in a row of the result, in a row of the product of q, k, v and z, and in one of b and a.
inline int64_t delta_results(const minifloat_delta& d) { return static_cast<int64_t>(d.v_heads) * d.v_dim; }
inline int64_t delta_inputs(const minifloat_delta& d) { return delta_channels(d) + delta_results(d); }
inline int64_t delta_gates(const minifloat_delta& d) { return 2 * static_cast<int64_t>(d.v_heads); }

// From the rows of both products (of the decoder's dtype): out [T, v_heads * v_dim] of the same dtype.
int32_t delta_all(const minifloat_step_args& a, const minifloat_delta& delta, const uint8_t* qkvz, const uint8_t* ba,
                  uint8_t* out);

}  // namespace MINIFLOAT_ISA
