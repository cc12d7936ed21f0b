// BLAKE3, the hash without a key (https://github.com/BLAKE3-team/BLAKE3-specs/blob/master/blake3.pdf).
//
// Chunks of 1 KiB, and then the parents above them, are compressed kWidth at a time, one to a lane.
#pragma once

#include "../api.h"
#include "../vec.h"

namespace MINIFLOAT_ISA {

typedef uint32_t U32 __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));

constexpr int kBlock = 64;
constexpr int kChunkBytes = 1024;
constexpr int kWords = 8;  // of a chaining value
constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;
// Chunks that are hashed to two chaining values together: their blocks and parents fill the lanes.
constexpr int kSubtree = 256;

constexpr uint32_t kInitial[kWords] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Section 2.2: the words of the message in each of the seven rounds.
constexpr uint8_t kSchedule[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

template <int kBits, class V>
inline V rotate_right(V x) {
    return (x >> kBits) | (x << (32 - kBits));
}
#if defined(__AVX512F__)
template <int kBits>
inline U32 rotate_right(U32 x) {
    return bit_cast<U32>(_mm512_ror_epi32(bit_cast<__m512i>(x), kBits));
}
#endif

template <class V>
inline void mix(V& a, V& b, V& c, V& d, V x, V y) {
    a += b + x;
    d = rotate_right<16>(d ^ a);
    c += d;
    b = rotate_right<12>(b ^ c);
    a += b + y;
    d = rotate_right<8>(d ^ a);
    c += d;
    b = rotate_right<7>(b ^ c);
}

// V is uint32_t, or U32 with one block to a lane. `value` becomes the chaining value after the block.
template <class V>
inline void compress(V (&value)[kWords], const V (&m)[16], V counter_low, V counter_high, uint32_t length,
                     uint32_t flags) {
    V v[16];
    for (int i = 0; i < kWords; ++i) v[i] = value[i];
    for (int i = 0; i < 4; ++i) v[8 + i] = V{} + kInitial[i];
    v[12] = counter_low;
    v[13] = counter_high;
    v[14] = V{} + length;
    v[15] = V{} + flags;
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
        const uint8_t* s = kSchedule[round];
        mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < kWords; ++i) value[i] = v[i] ^ v[i + 8];
}

// Word w of the block at `lanes[l]` to lane l of m[w].
inline void load_blocks(const uint8_t* const (&lanes)[kWidth], int64_t offset, U32 (&m)[16]) {
#if defined(__AVX512F__)
    __m512i v[16];
    for (int lane = 0; lane < 16; ++lane) v[lane] = _mm512_loadu_si512(lanes[lane] + offset);
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 words within every 128 bits
        const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c);
        t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d);
        t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {  // 4 x 4 groups of 128 bits
        const __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        m[i] = bit_cast<U32>(_mm512_shuffle_i32x4(a, c, 0x88));
        m[i + 4] = bit_cast<U32>(_mm512_shuffle_i32x4(b, d, 0x88));
        m[i + 8] = bit_cast<U32>(_mm512_shuffle_i32x4(a, c, 0xdd));
        m[i + 12] = bit_cast<U32>(_mm512_shuffle_i32x4(b, d, 0xdd));
    }
#else
    for (int word = 0; word < 16; ++word) {
        for (int lane = 0; lane < kWidth; ++lane) {
            uint32_t value;
            __builtin_memcpy(&value, lanes[lane] + offset + word * 4, sizeof value);
            m[word][lane] = value;
        }
    }
#endif
}

// The chaining values of `count` inputs, at most kWidth, each of `blocks` blocks; `chunk` is the number of the first
// chunk, or -1 for parents.
inline void hash_lanes(const uint8_t* data, int64_t stride, int count, int blocks, int64_t chunk,
                       uint32_t (*out)[kWords]) {
    const uint8_t* lanes[kWidth];
    U32 low = {}, high = {};
    for (int lane = 0; lane < kWidth; ++lane) {
        lanes[lane] = data + stride * (lane < count ? lane : 0);
        const uint64_t counter = chunk < 0 ? 0 : static_cast<uint64_t>(chunk) + lane;
        low[lane] = static_cast<uint32_t>(counter);
        high[lane] = static_cast<uint32_t>(counter >> 32);
    }
    U32 value[kWords], m[16];
    for (int i = 0; i < kWords; ++i) value[i] = U32{} + kInitial[i];
    for (int block = 0; block < blocks; ++block) {
        uint32_t flags = chunk < 0 ? kParent : (block == 0 ? kChunkStart : 0u);
        if (chunk >= 0 && block == blocks - 1) flags |= kChunkEnd;
        load_blocks(lanes, int64_t{block} * kBlock, m);
        compress<U32>(value, m, low, high, kBlock, flags);
    }
    for (int lane = 0; lane < count; ++lane)
        for (int i = 0; i < kWords; ++i) out[lane][i] = value[i][lane];
}

// The two chaining values below the root of a subtree of `chunks` whole chunks, a power of two from 2 to kSubtree.
inline void hash_subtree(const uint8_t* data, int chunks, uint64_t first, uint32_t (&out)[2][kWords]) {
    uint32_t values[kSubtree][kWords];
    for (int i = 0; i < chunks; i += kWidth)
        hash_lanes(data + int64_t{i} * kChunkBytes, kChunkBytes, min(kWidth, chunks - i), kChunkBytes / kBlock,
                   static_cast<int64_t>(first) + i, values + i);
    for (int count = chunks / 2; count >= 2; count /= 2)  // parents replace their children in place
        for (int i = 0; i < count; i += kWidth) {
            uint32_t parents[kWidth][kWords];
            const int lanes = min(kWidth, count - i);
            hash_lanes(reinterpret_cast<const uint8_t*>(values[2 * i]), kBlock, lanes, 1, -1, parents);
            __builtin_memcpy(values[i], parents, lanes * sizeof parents[0]);
        }
    __builtin_memcpy(out, values, sizeof out);
}

inline void compress_block(uint32_t (&value)[kWords], const uint8_t* block, uint64_t counter, uint32_t length,
                           uint32_t flags) {
    uint32_t m[16];
    __builtin_memcpy(m, block, sizeof m);
    compress<uint32_t>(value, m, static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), length, flags);
}

// The chaining value of the buffered chunk, which may be partial; kRoot in `flags` makes it the hash.
inline void hash_buffer(const minifloat_blake3& s, uint32_t flags, uint32_t (&value)[kWords]) {
    for (int i = 0; i < kWords; ++i) value[i] = kInitial[i];
    for (int32_t begin = 0; begin == 0 || begin < s.buffered; begin += kBlock) {
        uint8_t block[kBlock] = {};
        const int32_t length = min(s.buffered - begin, int32_t{kBlock});
        __builtin_memcpy(block, s.buffer + begin, length);
        const bool last = begin + kBlock >= s.buffered;
        compress_block(value, block, s.chunks, length, (begin == 0 ? kChunkStart : 0) | (last ? kChunkEnd | flags : 0));
    }
}

inline void hash_parent(const uint32_t* left, const uint32_t* right, uint32_t flags, uint32_t (&value)[kWords]) {
    uint8_t block[kBlock];
    __builtin_memcpy(block, left, kBlock / 2);
    __builtin_memcpy(block + kBlock / 2, right, kBlock / 2);
    for (int i = 0; i < kWords; ++i) value[i] = kInitial[i];
    compress_block(value, block, 0, kBlock, kParent | flags);
}

// Merges the complete subtrees on the stack, of which there is one for every bit of the number of chunks below. Called
// when more input is known to follow, because the last merge is the root's.
inline void merge(minifloat_blake3& s, uint64_t chunks) {
    while (s.depth > __builtin_popcountll(chunks)) {
        uint32_t value[kWords];
        hash_parent(s.stack[s.depth - 2], s.stack[s.depth - 1], 0, value);
        --s.depth;
        __builtin_memcpy(s.stack[s.depth - 1], value, sizeof value);
    }
}

inline void push(minifloat_blake3& s, const uint32_t (&value)[kWords], uint64_t chunks) {
    merge(s, chunks);
    __builtin_memcpy(s.stack[s.depth++], value, sizeof value);
}

inline void add_bytes(minifloat_blake3& s, const uint8_t* data, int64_t bytes) {
    if (s.buffered > 0) {
        const int64_t taken = min(int64_t{kChunkBytes} - s.buffered, bytes);
        __builtin_memcpy(s.buffer + s.buffered, data, taken);
        s.buffered += static_cast<int32_t>(taken);
        data += taken;
        bytes -= taken;
        if (bytes == 0) return;
        uint32_t value[kWords];
        hash_buffer(s, 0, value);
        push(s, value, s.chunks);
        ++s.chunks;
        s.buffered = 0;
    }
    while (bytes > 2 * kChunkBytes) {
        int chunks = kSubtree;
        while (int64_t{chunks} * kChunkBytes > bytes || (s.chunks & (chunks - 1)) != 0) chunks /= 2;
        if (chunks == 1) {
            uint32_t value[1][kWords];
            hash_lanes(data, 0, 1, kChunkBytes / kBlock, static_cast<int64_t>(s.chunks), value);
            push(s, value[0], s.chunks);
        } else {
            uint32_t values[2][kWords];
            hash_subtree(data, chunks, s.chunks, values);
            push(s, values[0], s.chunks);
            push(s, values[1], s.chunks + chunks / 2);
        }
        s.chunks += chunks;
        data += int64_t{chunks} * kChunkBytes;
        bytes -= int64_t{chunks} * kChunkBytes;
    }
    while (bytes > 0) {  // at most two chunks, the last of which stays in the buffer
        merge(s, s.chunks);
        const int64_t taken = min(int64_t{kChunkBytes}, bytes);
        __builtin_memcpy(s.buffer, data, taken);
        s.buffered = static_cast<int32_t>(taken);
        data += taken;
        bytes -= taken;
        if (bytes == 0) return;
        uint32_t value[kWords];
        hash_buffer(s, 0, value);
        push(s, value, s.chunks);
        ++s.chunks;
        s.buffered = 0;
    }
}

inline void finish(const minifloat_blake3& s, uint32_t (&value)[kWords]) {
    if (s.depth == 0) return hash_buffer(s, kRoot, value);
    int below;
    if (s.buffered > 0) {
        hash_buffer(s, 0, value);
        below = s.depth;
    } else {
        below = s.depth - 1;
        __builtin_memcpy(value, s.stack[below], sizeof value);
    }
    for (; below > 0; --below) {
        uint32_t parent[kWords];
        hash_parent(s.stack[below - 1], value, below == 1 ? kRoot : 0, parent);
        __builtin_memcpy(value, parent, sizeof value);
    }
}

}  // namespace MINIFLOAT_ISA
