// Counts the magnitudes of a buffer by their leading bits as float32: 8 of the exponent and 3 of the mantissa.
#include "../../native/api.h"
#include "../quantize/load.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kBins = MINIFLOAT_HISTOGRAM_BINS;
constexpr int kBinShift = kMantissaBits - 3;
static_assert(kBins == 1 << (31 - kBinShift), "a bin for every magnitude");

constexpr int kTables = 4;
constexpr int kChunk = 1024;
constexpr int kChunksBetweenSums = 64;  // 16-bit counters: a table gets at most 64 * 1024 / 4 elements

class Tables {
  public:
    // At most kChunk elements, kChunksBetweenSums times between two flushes.
    void add(const uint16_t* bins, int count) {
        int i = 0;
        for (; i + kTables <= count; i += kTables)
            for (int t = 0; t < kTables; ++t) ++counters_[t][bins[i + t]];
        for (; i < count; ++i) ++counters_[0][bins[i]];
    }

    // Adds the counts to the result and resets them to zero.
    void flush(int64_t* totals) {
        for (int b = 0; b < kBins; ++b) {
            int64_t sum = 0;
            for (int t = 0; t < kTables; ++t) sum += counters_[t][b];
            totals[b] += sum;
        }
        __builtin_memset(counters_, 0, sizeof counters_);
    }

  private:
    uint16_t counters_[kTables][kBins] = {};
};

template <class Source>
void count_all(minifloat_histogram_args& a) {
    Tables tables;
    alignas(64) uint16_t bins[kChunk];
    int chunks = 0;
    for (int64_t begin = 0; begin < a.count; begin += kChunk) {
        const int count = static_cast<int>(min<int64_t>(kChunk, a.count - begin));
        const uint8_t* src = a.data + begin * Source::kBytes;
        for (int i = 0; i < count; ++i) {
            const int32_t bits = bit_cast<int32_t>(Source::to_float(src + static_cast<int64_t>(i) * Source::kBytes));
            bins[i] = static_cast<uint16_t>((bits & kMagnitude) >> kBinShift);
        }
        tables.add(bins, count);
        if (++chunks % kChunksBetweenSums == 0) tables.flush(a.bins);
    }
    tables.flush(a.bins);
}

}  // namespace

// dispatch.cpp declares this function for every instruction set.
void histogram(minifloat_histogram_args& args) {
    if (args.dtype == MINIFLOAT_BF16) count_all<Bf16>(args);
    if (args.dtype == MINIFLOAT_F16) count_all<F16>(args);
    if (args.dtype == MINIFLOAT_F32) count_all<Float32>(args);
}

}  // namespace MINIFLOAT_ISA
