// Reads memory once, front to back, and adds it up: the time that a kernel needs at least to read its weights.
#include "../../native/api.h"
#include "../threads.h"
#include "../vec.h"

namespace MINIFLOAT_ISA {
namespace {

typedef uint64_t Words __attribute__((vector_size(MINIFLOAT_VECTOR_BYTES)));

constexpr int64_t kLine = 64;
constexpr int64_t kBlock = 4 * kLine;
// Prefetches as the kernels do; linear/avx512.h gives the reason.
constexpr int64_t kNear = 512, kFar = 3072;

// Adds up whole blocks. Prefetching past the end of the memory is allowed: it does not fault.
uint64_t sum(const uint8_t* data, int64_t blocks) {
    constexpr int kVectors = kBlock / MINIFLOAT_VECTOR_BYTES;
    Words sums[kVectors] = {};
    for (int64_t b = 0; b < blocks; ++b, data += kBlock) {
        for (int64_t line = 0; line < kBlock; line += kLine) {
            __builtin_prefetch(data + kNear + line, 0, 3);
            __builtin_prefetch(data + kFar + line, 0, 2);
        }
        for (int i = 0; i < kVectors; ++i) {
            Words words;
            __builtin_memcpy(&words, data + i * MINIFLOAT_VECTOR_BYTES, sizeof words);
            sums[i] += words;
        }
    }
    for (int i = 1; i < kVectors; ++i) sums[0] += sums[i];
    uint64_t total = 0;
    for (int lane = 0; lane < MINIFLOAT_VECTOR_BYTES / 8; ++lane) total += sums[0][lane];
    return total;
}

}  // namespace

void read(minifloat_read_args& a) {
    const int64_t blocks = a.bytes / kBlock;
    uint64_t total = 0;
    minifloat::parallel(a.threads, [&](int thread, int count) {
        const int64_t first = blocks * thread / count, last = blocks * (thread + 1) / count;
        __atomic_fetch_add(&total, sum(a.data + first * kBlock, last - first), __ATOMIC_RELAXED);
    });
    for (int64_t i = blocks * kBlock; i < a.bytes; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, a.data + i, sizeof word);
        total += word;
    }
    a.sum = total;
}

}  // namespace MINIFLOAT_ISA
