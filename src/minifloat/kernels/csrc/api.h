// The C interface of libminifloat_native: what ctypes sees (native.py mirrors it field by field).
//
// Every call is a pure function of its arguments: no global state, no threads of its own, no allocation, so any
// number of threads may call at once. Arguments are validated in Python; the checks here only guard memory.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MINIFLOAT_API __attribute__((visibility("default")))

// Raised whenever a struct or the meaning of a field changes, so that a stale library is noticed and not called.
#define MINIFLOAT_ABI_VERSION 2

enum minifloat_status {
    MINIFLOAT_OK = 0,
    MINIFLOAT_UNSUPPORTED_ISA = 1,  // no such instruction set in this build, or not on this processor
    MINIFLOAT_BAD_ARGUMENT = 2,     // an enumerator or a size out of range
};

// Little-endian source elements.
enum minifloat_dtype { MINIFLOAT_BF16 = 0, MINIFLOAT_F16 = 1, MINIFLOAT_F32 = 2 };

// How the amax of a block becomes its scale; the semantics are those of minifloat/quantize/scale.py.
enum minifloat_scaling {
    MINIFLOAT_SCALE_FLOAT32 = 0,  // amax / element.max
    MINIFLOAT_SCALE_CODED = 1,    // divisor * (amax / element.max), rounded to `scale` (NVFP4)
    MINIFLOAT_SCALE_FLOOR = 2,    // E8M0, four rules
    MINIFLOAT_SCALE_EVEN = 3,
    MINIFLOAT_SCALE_RCEIL = 4,
    MINIFLOAT_SCALE_SEARCH = 5,
};

// The facts of a signed format of at most 8 bits that rounding needs; formats.py declares them.
struct minifloat_format {
    int32_t bits;
    int32_t mantissa_bits;
    int32_t emin;  // exponent of the smallest normal value
    float max;     // largest finite value
};

struct minifloat_quantize_rows_args {
    const uint8_t* data;  // [rows, cols] of `dtype`, row-major, any alignment
    int64_t rows, cols;
    int64_t block_rows, block_cols;  // elements that share a scale; block_cols a multiple of 16, or >= cols
    int32_t dtype;                   // minifloat_dtype
    int32_t scaling;                 // minifloat_scaling
    struct minifloat_format element;
    struct minifloat_format scale;  // only of MINIFLOAT_SCALE_CODED
    float divisor;                  // only of MINIFLOAT_SCALE_CODED
    float zero_scale;               // scale of a block of zeros, of FLOAT32 and CODED
    int32_t one_scale;              // not 0: every element is scaled by `tensor_amax`, the grid is [1, 1]
    float tensor_amax;
    uint8_t* codes;  // [rows, cols], or [rows, cols / 2] where element.bits == 4 (low nibble = even column)
    void* scales;    // [ceil(rows / block_rows), ceil(cols / block_cols)]: float for FLOAT32, else uint8_t
    // Results.
    double signal, noise;
    int64_t saturated, flushed;
    int64_t nonfinite;
};

struct minifloat_amax_args {
    const uint8_t* data;  // `count` elements of `dtype`, any alignment
    int64_t count;
    int32_t dtype;
    // Results.
    float amax;         // of the finite elements; 0 when there are none
    int64_t nonfinite;  // NaN and Inf
};

// Bins of minifloat_histogram: one for each of the leading 11 bits of a float32 without its sign.
#define MINIFLOAT_HISTOGRAM_BINS 2048

struct minifloat_histogram_args {
    const uint8_t* data;  // `count` elements of `dtype`, any alignment
    int64_t count;
    int32_t dtype;
    int64_t* bins;  // [MINIFLOAT_HISTOGRAM_BINS], added to; Inf and NaN fill the last 8
};

MINIFLOAT_API int32_t minifloat_abi_version(void);

// The instruction sets of this build, fastest first: index 0 .. count - 1.
MINIFLOAT_API int32_t minifloat_isa_count(void);
MINIFLOAT_API const char* minifloat_isa_name(int32_t isa);
MINIFLOAT_API int32_t minifloat_isa_supported(int32_t isa);

MINIFLOAT_API int32_t minifloat_quantize_rows(int32_t isa, struct minifloat_quantize_rows_args* args);
MINIFLOAT_API int32_t minifloat_amax(int32_t isa, struct minifloat_amax_args* args);
MINIFLOAT_API int32_t minifloat_histogram(int32_t isa, struct minifloat_histogram_args* args);

#ifdef __cplusplus
}
#endif
