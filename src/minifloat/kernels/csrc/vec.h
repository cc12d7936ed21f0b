// Vectors as wide as the instruction set of this object file allows, by the compiler's vector extensions. The same
// source is compiled once per instruction set, in a namespace named after it, and includes no standard C++ header: a
// template that two object files share would be merged by the linker, and code for one processor would run on another.
#pragma once

#include <stdint.h>

// The processor's intrinsics, without a warning about them: gcc 12 takes the deliberately undefined operands inside its
// own headers for uninitialised variables (its bug 105593).
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

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

// Shuffles of vectors of 16 bytes, the same on every instruction set.
#if defined(__clang__) || __GNUC__ >= 12
#define MINIFLOAT_SHUFFLE(Type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MINIFLOAT_SHUFFLE(Type, a, b, ...) __builtin_shuffle(a, b, Type{__VA_ARGS__})
#endif

typedef uint8_t Octets __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint64_t Doubles __attribute__((vector_size(16)));

// Exchanges rows and columns; a second call restores the first order.
inline void transpose(Words (&w)[4]) {
    const Words low01 = MINIFLOAT_SHUFFLE(Words, w[0], w[1], 0, 4, 1, 5);
    const Words low23 = MINIFLOAT_SHUFFLE(Words, w[2], w[3], 0, 4, 1, 5);
    const Words high01 = MINIFLOAT_SHUFFLE(Words, w[0], w[1], 2, 6, 3, 7);
    const Words high23 = MINIFLOAT_SHUFFLE(Words, w[2], w[3], 2, 6, 3, 7);
    w[0] = MINIFLOAT_SHUFFLE(Words, low01, low23, 0, 1, 4, 5);
    w[1] = MINIFLOAT_SHUFFLE(Words, low01, low23, 2, 3, 6, 7);
    w[2] = MINIFLOAT_SHUFFLE(Words, high01, high23, 0, 1, 4, 5);
    w[3] = MINIFLOAT_SHUFFLE(Words, high01, high23, 2, 3, 6, 7);
}

// Elements of a and b in turns: those of the first halves, and those of the second.
inline Octets zip_low(Octets a, Octets b) {
    return MINIFLOAT_SHUFFLE(Octets, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Octets zip_high(Octets a, Octets b) {
    return MINIFLOAT_SHUFFLE(Octets, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Exchanges rows and columns: each of the four passes puts rows i and i + 8 next to each other.
inline void transpose(Octets (&rows)[16]) {
#pragma GCC unroll 4
    for (int pass = 0; pass < 4; ++pass) {
        Octets next[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            next[2 * i] = zip_low(rows[i], rows[i + 8]);
            next[2 * i + 1] = zip_high(rows[i], rows[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) rows[i] = next[i];
    }
}

}  // namespace MINIFLOAT_ISA
