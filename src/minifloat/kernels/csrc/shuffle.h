// Shuffles of vectors of 16 bytes, the same on every instruction set.
#pragma once

#include "vec.h"

#if defined(__clang__) || __GNUC__ >= 12
#define MINIFLOAT_SHUFFLE(Type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MINIFLOAT_SHUFFLE(Type, a, b, ...) __builtin_shuffle(a, b, Type{__VA_ARGS__})
#endif

namespace MINIFLOAT_ISA {

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
