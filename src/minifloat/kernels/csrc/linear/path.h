// The interface of a path, one way of computing the product. The driver chooses a path per call; prepare() converts x
// into the form that multiply() reads.
#pragma once

#include "layout.h"

namespace MINIFLOAT_ISA {

// Rows of x in the caller's memory, at any alignment.
struct Input {
    const uint8_t* data;
    int64_t stride;       // bytes between rows
    int32_t dtype;        // minifloat_dtype
    const int64_t* rows;  // indices of the rows, or null for 0 .. m - 1
    int64_t m;

    const uint8_t* row(int64_t i) const { return data + (rows ? rows[i] : i) * stride; }
};

// Where the result of one weight goes: [m, weight.rows] of `dtype`.
struct Output {
    uint8_t* data;
    int64_t stride;  // bytes between rows
    int32_t dtype;
    const uint8_t* bias;  // [weight.rows] of bias_dtype, or null
    int32_t bias_dtype;
};

struct Path {
    const char* name;
    // Size of the memory that prepare() fills, a multiple of 64 bytes.
    int64_t (*prepared_bytes)(const Weight& w, int64_t m, int32_t x_dtype);
    // Prepares part `part` of `parts`; multiply() runs after all parts.
    void (*prepare)(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts);
    // Computes the columns of y that belong to panels first .. last - 1; returns false if there is no memory.
    bool (*multiply)(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first,
                     int64_t last);
    // Panels of a large weight per call of multiply(), so that its fixed cost is small.
    int64_t piece_panels = 1;
    // Rows of x whose prepared form should stay in the L2 cache while a thread multiplies them with all of its panels; 0
    // if no number is worth it. Null: always 0.
    int64_t (*cached_rows)(const Weight& w, int32_t x_dtype) = nullptr;
};

// What a caller allows a path to do.
struct Allowed {
    bool int8_inputs;      // paths may round x,
    bool avx_vnni;         // and use AVX-VNNI then, which changes no bit
    bool batch_invariant;  // one path for every m, which gives a row the same bits whatever the others are
};

// Returns the fastest path of this instruction set for m rows of x. Batch-invariant calls do not round x.
const Path& choose_path(const Weight& w, int64_t m, int32_t x_dtype, const Allowed& allowed);

// Returns the path that rounds x for m rows, or null where there is none, or where it is slower than the others.
const Path* choose_int8_path(const Weight& w, int64_t m, const Allowed& allowed);

// Prefetch distances of a line of weights that is read once, in the order of memory: into the L2 cache early enough for the latency of memory, then into L1. For E4M3 with AVX-512 the near prefetch alone
// reaches 83% of the read bandwidth, both 96%.
constexpr int64_t kFarBytes = 3072;
constexpr int64_t kNearBytes = 512;

inline void prefetch_ahead(const uint8_t* p) {
    __builtin_prefetch(p + kNearBytes, 0, 3);
    __builtin_prefetch(p + kFarBytes, 0, 2);
}

}  // namespace MINIFLOAT_ISA
