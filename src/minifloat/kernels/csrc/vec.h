// Vectors as wide as the instruction set of this object file allows, by the compiler's vector extensions. The same
// source is compiled once per instruction set, in a namespace named after it, and includes no standard C++ header: a
// template that two object files share would be merged by the linker, and code for one processor would run on another.
#pragma once

#include <stdint.h>

#include "intrinsics.h"

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
// Lanes of a vector, at most kLanes, so that the narrowest block fills a vector.
typedef int16_t I16 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES < 32 ? MINIFLOAT_VECTOR_BYTES : 32)));

// Sums have this number of lanes on every instruction set, so that the results are the same.
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

#if defined(__AVX512F__)
// The same in one instruction: gcc compares and blends.
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
#endif

inline F32 load(const float* p) {
    F32 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
inline void store(int32_t* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }
inline F32 broadcast(float x) { return x - F32{}; }
inline I32 broadcast(int32_t x) { return x - I32{}; }

// Folds the upper half of the lanes onto the lower half until one is left. For sums this order is part of the result.
template <int kCount, class T, class Vector, class Combine>
inline T fold(Vector v, Combine combine) {
    if constexpr (kCount == 4) {
        return combine(combine(v[0], v[2]), combine(v[1], v[3]));
    } else {
        typedef T Half __attribute__((vector_size(sizeof(Vector) / 2)));
        Half halves[2];
        __builtin_memcpy(halves, &v, sizeof v);
        return fold<kCount / 2, T>(combine(halves[0], halves[1]), combine);
    }
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};

struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return max(a, b);
    }
};

template <class T, class Vector>
inline T sum_lanes(const Vector (&parts)[kParts]) {
    if constexpr (kParts == 1) return fold<kWidth, T>(parts[0], Add());
    if constexpr (kParts == 2) return fold<kWidth, T>(parts[0] + parts[1], Add());
    if constexpr (kParts == 4) return fold<kWidth, T>((parts[0] + parts[2]) + (parts[1] + parts[3]), Add());
}

}  // namespace MINIFLOAT_ISA
