// A step of a packed weight as float32: what every path can fall back on.
#pragma once

#include "convert.h"

namespace MINIFLOAT_ISA {

inline float decode_e4m3(uint8_t code) {
    const int32_t magnitude = (code & 0x7f) << 20;
    const float value = bit_cast<float>(magnitude) * 0x1p120f;  // rebias; exact for subnormals too
    return code & 0x80 ? -value : value;
}

inline float decode_e2m1(uint8_t code) {
    const int32_t magnitude = (code & 0x7) << 22;
    const float value = bit_cast<float>(magnitude) * 0x1p126f;
    return code & 0x8 ? -value : value;
}

// The elements of step `s` of panel `p` times their inline or block scales, [kStepCols, kPanelRows]; row scales are not
// in it.
inline void decode_step(const Weight& w, int64_t p, int64_t s, float* out) {
    const uint8_t* step = w.panel(p) + s * w.step_bytes;
    const uint8_t* data = step + w.scale_bytes;
    for (int half = 0; half < 2; ++half) {
        for (int tile = 0; tile < 2; ++tile) {
            float* base = out + half * kHalfCols * kPanelRows + tile * kTileRows;
            if (w.element == MINIFLOAT_WEIGHT_BF16) {
                for (int v = 0; v < 16; ++v, data += kVectorBytes)
                    for (int n = 0; n < kTileRows; ++n)
                        for (int i = 0; i < 2; ++i)
                            base[(v * 2 + i) * kPanelRows + n] = Bf16::to_float(data + n * 4 + i * 2);
            } else if (w.element == MINIFLOAT_E4M3) {
                for (int v = 0; v < 8; ++v, data += kVectorBytes)
                    for (int n = 0; n < kTileRows; ++n)
                        for (int i = 0; i < 4; ++i)
                            base[(v * 4 + i) * kPanelRows + n] =
                                decode_e4m3(data[n / 4 * 16 + i / 2 * 8 + n % 4 * 2 + i % 2]);
            } else {
                for (int v = 0; v < 4; ++v, data += kVectorBytes)
                    for (int n = 0; n < kTileRows; ++n) {
                        uint32_t word;
                        __builtin_memcpy(&word, data + n * 4, 4);
                        for (int i = 0; i < 8; ++i)
                            base[(v * 8 + i) * kPanelRows + n] =
                                decode_e2m1(static_cast<uint8_t>(word >> (4 * (i % 2 * 4 + i / 2))));
                    }
            }
        }
    }
    for (int k = 0; k < kStepCols; ++k)
        for (int n = 0; n < kPanelRows; ++n) {
            float scale = 1.0f;
            if (w.grid == MINIFLOAT_GRID_E8M0)
                scale = bit_cast<float>((127 - step[k / kE8M0Cols * kPanelRows + n]) << kMantissaBits);
            if (w.grid == MINIFLOAT_GRID_E4M3) scale = decode_e4m3(step[k / kE4M3Cols * kPanelRows + n]);
            if (w.grid == MINIFLOAT_GRID_BLOCK)
                scale = w.block_scale(p, min((s * kStepCols + k) / w.block_cols, w.groups - 1))[w.block_lanes == 1 ? 0 : n];
            out[k * kPanelRows + n] *= scale;
        }
}

}  // namespace MINIFLOAT_ISA
