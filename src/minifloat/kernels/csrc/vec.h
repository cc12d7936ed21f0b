// Vectors of the width that the instruction set of this object file has, by the compiler's vector extensions.
//
// The same source is compiled once per instruction set. Everything lives in a namespace named after it, and no
// standard C++ header is included: a function template that two object files share would be merged by the linker,
// and code for one processor would run on another.
#pragma once

#include <stdint.h>

#if !defined(MINIFLOAT_ISA)
#error "MINIFLOAT_ISA names the namespace of this object file; CMakeLists.txt defines it"
#endif

namespace MINIFLOAT_ISA {

#if defined(__AVX512F__)
#define MINIFLOAT_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define MINIFLOAT_VECTOR_BYTES 32
#else
#define MINIFLOAT_VECTOR_BYTES 16
#endif

typedef float F32 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));

// Sums are kept in this many lanes on every instruction set, so that they come out the same everywhere.
constexpr int kLanes = 16;
constexpr int kWidth = MINIFLOAT_VECTOR_BYTES / 4;
constexpr int kParts = kLanes / kWidth;

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// Scalars and vectors alike; with NaN the second argument is returned.
template <class T>
inline T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
inline T max(T a, T b) {
    return a > b ? a : b;
}

inline F32 load(const float* p) {
    F32 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
inline void store(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }
inline F32 broadcast(float x) { return x - F32{}; }
inline I32 broadcast(int32_t x) { return x - I32{}; }

// The fixed tree: the upper half onto the lower half until one number is left.
template <class T, class Vector>
inline T sum_lanes(const Vector (&parts)[kParts]) {
    T lane[kLanes];
    __builtin_memcpy(lane, parts, sizeof lane);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}

inline int32_t max_lanes(I32 v) {
    int32_t lane[kWidth];
    __builtin_memcpy(lane, &v, sizeof lane);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = max(lane[i], lane[i + half]);
    return lane[0];
}

}  // namespace MINIFLOAT_ISA
