// What a way of computing the product offers to the driver (linear.cpp), which picks one per call and shares out the
// panels of the weights. Each way is a file: prepare() brings x into the form that its multiply() reads.
#pragma once

#include "layout.h"

namespace MINIFLOAT_ISA {

// Rows of x; the caller's memory, at any alignment.
struct Input {
    const uint8_t* data;
    int64_t stride;       // bytes between rows
    int32_t dtype;        // minifloat_dtype
    const int64_t* rows;  // which rows, or null: 0 .. m - 1
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
    // Memory that prepare() fills, a multiple of 64 bytes.
    int64_t (*prepared_bytes)(const Weight& w, int64_t m, int32_t x_dtype);
    // Does part `part` of `parts`; all parts are done before multiply() reads.
    void (*prepare)(const Weight& w, const Input& x, uint8_t* prepared, int part, int parts);
    // Computes the columns of y that belong to panels first .. last - 1; false: no memory.
    bool (*multiply)(const Weight& w, const Input& x, const uint8_t* prepared, const Output& y, int64_t first,
                     int64_t last);
    // How many panels of a large weight a call of multiply() should have to be worth its start.
    int64_t piece_panels = 1;
};

// The path for m rows of x, the fastest that this instruction set has for it.
const Path& choose_path(const Weight& w, int64_t m, int32_t x_dtype);

}  // namespace MINIFLOAT_ISA
