#include "parts.h"

#include "rows.h"

namespace MINIFLOAT_ISA {

void write_layer_inputs(const minifloat_step_args& a, int64_t index, const int32_t* rows, const uint8_t* projected,
                        uint8_t* out, int64_t begin, int64_t end) {
    constexpr int kPiece = 256;
    alignas(64) float input[kPiece], row[kPiece];
    const minifloat_decoder& d = *a.decoder;
    const minifloat_layer_inputs& inputs = *d.inputs;
    const int64_t size = inputs.size, width = d.layer_count * size, bytes = dtype_bytes(d.dtype);
    for (int64_t t = begin; t < end; ++t) {
        const int64_t token = rows == nullptr ? t : rows[t];
        const uint8_t* from = projected + (token * width + index * size) * bytes;
        const uint8_t* table = static_cast<const uint8_t*>(inputs.table) +
                               (a.tokens[token] * width + index * size) * dtype_bytes(inputs.table_dtype);
        const Moments known = moments(inputs.norm, from, d.dtype, size);
        for (int64_t i = 0; i < size; i += kPiece) {
            const int64_t n = min<int64_t>(kPiece, size - i);
            to_float(from + i * bytes, d.dtype, n, input);
            norm_part(input, inputs.norm, known, i, n);
            to_float(table + i * dtype_bytes(inputs.table_dtype), inputs.table_dtype, n, row);
            for (int64_t j = 0; j < n; ++j) input[j] = (input[j] + row[j] * inputs.table_factor) * inputs.factor;
            from_float(input, d.dtype, n, out + ((2 * t + 1) * size + i) * bytes);
        }
    }
}

}  // namespace MINIFLOAT_ISA
