// Reading x and writing y: 16- and 32-bit floats to float and back, at any alignment.
#pragma once

#include "../quantize/load.h"
#include "path.h"

namespace MINIFLOAT_ISA {

inline int dtype_bytes(int32_t dtype) { return dtype == MINIFLOAT_F32 ? 4 : 2; }

template <class Source>
inline void row_to_float(const uint8_t* src, int64_t count, float* dst) {
    for (int64_t i = 0; i < count; ++i) dst[i] = Source::to_float(src + i * Source::kBytes);
}

inline void to_float(const uint8_t* src, int32_t dtype, int64_t count, float* dst) {
    if (dtype == MINIFLOAT_BF16) row_to_float<Bf16>(src, count, dst);
    if (dtype == MINIFLOAT_F16) row_to_float<F16>(src, count, dst);
    if (dtype == MINIFLOAT_F32) row_to_float<Float32>(src, count, dst);
}

}  // namespace MINIFLOAT_ISA
