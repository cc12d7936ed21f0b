// The portable path: x and W in float32, one multiply-add per element, for every instruction set and every M.
#include "../threads.h"
#include "convert.h"
#include "decode.h"
#include "path.h"

namespace MINIFLOAT_ISA {
namespace {

int64_t padded_cols(const Weight& w) { return w.steps * kStepCols; }

int64_t prepared_bytes(const Weight& w, int64_t m, int32_t) { return m * padded_cols(w) * 4; }

void prepare(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts) {
    float* rows = reinterpret_cast<float*>(prepared);
    for (int64_t i = x.m * part / parts; i < x.m * (part + 1) / parts; ++i) {
        float* row = rows + i * padded_cols(w);
        to_float(x.row(i), x.dtype, w.cols, row);
        for (int64_t k = w.cols; k < padded_cols(w); ++k) row[k] = 0.0f;
    }
}

bool multiply(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first, int64_t last) {
    const float* rows = reinterpret_cast<const float*>(prepared);
    float* sums = static_cast<float*>(minifloat::scratch(minifloat::kScratchThread, x.m * kPanelRows * 4));
    if (sums == nullptr) return false;
    alignas(64) float step[kStepCols * kPanelRows];
    for (int64_t p = first; p < last; ++p) {
        __builtin_memset(sums, 0, x.m * kPanelRows * 4);
        for (int64_t s = 0; s < w.steps; ++s) {
            decode_step(w, p, s, step);
            for (int64_t i = 0; i < x.m; ++i) {
                const float* xs = rows + i * padded_cols(w) + s * kStepCols;
                float* out = sums + i * kPanelRows;
                for (int k = 0; k < kStepCols; ++k)
                    for (int n = 0; n < kPanelRows; ++n) out[n] += xs[k] * step[k * kPanelRows + n];
            }
        }
        for (int64_t i = 0; i < x.m; ++i) store_row(w, y, p, i, sums + i * kPanelRows);
    }
    return true;
}

}  // namespace

extern const Path kFloatPath = {"float", prepared_bytes, prepare, multiply};

}  // namespace MINIFLOAT_ISA
