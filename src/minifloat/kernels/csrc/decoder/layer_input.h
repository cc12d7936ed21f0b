// The inputs of layers: what a layer reads of a token besides the residual stream (api.h: minifloat_layer_inputs).
#pragma once

#include "../../native/api.h"

namespace MINIFLOAT_ISA {

// Writes the inputs of layer `index` into the second halves of rows [gate | input] of 2 * size elements of the decoder's
// dtype. Row t is token rows[t]; if `rows` is null, token t. `projected`: [T, layers * size] of the dtype.
void write_layer_inputs(const minifloat_step_args& a, int64_t index, const int32_t* rows, const uint8_t* projected,
                        uint8_t* out, int64_t begin, int64_t end);

}  // namespace MINIFLOAT_ISA
