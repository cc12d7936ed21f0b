// Chooses the path of a call: one decision per instruction set. The limits are where measured times cross.
#include "path.h"

#if defined(MINIFLOAT_AVX_VNNI)
#include <cpuid.h>
#endif

namespace MINIFLOAT_ISA {

extern const Path kFloatPath, kFewRowsPath, kDigitsPath, kGemvPath, kGemvInt8Path, kAmxSmallPath, kAmxLargePath,
    kBf16SmallPath, kBf16MediumPath, kBf16LargePath, kMmlaPath, kInt8Path, kInt8VnniPath, kBf16InvariantPath,
    kFewRowsInvariantPath;

// Rows from which rounded inputs are faster, on instruction sets that have a kernel for them.
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(__AMX_BF16__)
#define MINIFLOAT_HAS_INT8
static int64_t least_int8_rows(const Weight& w) { return w.grid == MINIFLOAT_GRID_E8M0 ? 8 : 16; }
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MINIFLOAT_HAS_INT8
static int64_t least_int8_rows(const Weight& w) { return w.element == MINIFLOAT_E2M1 ? 2 : 5; }
#if defined(MINIFLOAT_AVX_VNNI)
static bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif
#endif

const Path* choose_int8_path([[maybe_unused]] const Weight& w, [[maybe_unused]] int64_t m,
                             [[maybe_unused]] const Allowed& allowed) {
#if defined(MINIFLOAT_HAS_INT8)
    // A group of columns that share a scale of x has one scale of W.
    const bool cut_alike = w.groups == 1 || w.block_cols % kStepCols == 0;
    if (!allowed.int8_inputs || !is_quantized(w.element) || !cut_alike || m < least_int8_rows(w)) return nullptr;
#if defined(MINIFLOAT_AVX_VNNI)
    static const bool has = has_avx_vnni();
    if (has && allowed.avx_vnni) return &kInt8VnniPath;
#endif
    return &kInt8Path;
#else
    return nullptr;
#endif
}

namespace {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

constexpr int64_t kMaxPaired = 3;  // up to it the small path has two chains of sums, and the invariant one
constexpr int64_t kMaxSmall = 12;  // rows of x that share the decoding in registers, with two vectors of W
constexpr int64_t kMaxMedium = 48;   // the same with one vector of W: two tiles

const Path& choose_invariant_bf16_path(const Weight& w, int64_t m) {
    // Where blocks of columns have scales, the other paths sum them in another order.
    if (m <= kMaxPaired || (m > kMaxSmall && w.grid == MINIFLOAT_GRID_BLOCK)) return kBf16InvariantPath;
    return m <= kMaxSmall ? kBf16SmallPath : m <= kMaxMedium ? kBf16MediumPath : kBf16LargePath;
}

#endif

// Paths in which the order of the sums of a row does not depend on the number of rows.
const Path& choose_invariant_path([[maybe_unused]] const Weight& w, [[maybe_unused]] int64_t m,
                                  [[maybe_unused]] int32_t x_dtype) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    if (x_dtype == MINIFLOAT_BF16 && !is_wide(w.element)) return choose_invariant_bf16_path(w, m);
#endif
#if defined(__AVX512F__)
    return kGemvPath;
#elif defined(__AVX2__) || defined(__aarch64__)
    return kFewRowsInvariantPath;
#else
    return kFloatPath;
#endif
}

// Paths for elements that bf16 does not hold.
const Path& choose_wide_path([[maybe_unused]] int64_t m) {
#if defined(__AVX512F__)
    return m <= 8 ? kGemvPath : kFloatPath;
#elif defined(__AVX2__) || defined(__aarch64__)
    return m <= 4 ? kFewRowsPath : kFloatPath;
#else
    return kFloatPath;
#endif
}

}  // namespace

const Path& choose_path([[maybe_unused]] const Weight& w, [[maybe_unused]] int64_t m,
                        [[maybe_unused]] int32_t x_dtype, const Allowed& allowed) {
    if (allowed.batch_invariant) return choose_invariant_path(w, m, x_dtype);
    if (is_wide(w.element)) return choose_wide_path(m);
    if (const Path* path = choose_int8_path(w, m, allowed)) return *path;
#if defined(__AVX512F__)
    [[maybe_unused]] const bool is_bf16 = x_dtype == MINIFLOAT_BF16;
#if defined(__AMX_BF16__)
    constexpr int64_t kMaxGemv = 1;
    [[maybe_unused]] constexpr int64_t kMaxGemvInt8 = 2;  // above, tiles are faster
#elif defined(__AVX512BF16__)
    // In two or three bf16 parts, x of other types would take as long as float32 multiply-adds, or longer.
    const int64_t kMaxGemv = is_bf16 ? 0 : 8;
    constexpr int64_t kMaxGemvInt8 = 3;
#else
    constexpr int64_t kMaxGemv = 8;
    [[maybe_unused]] constexpr int64_t kMaxGemvInt8 = 8;
#endif
#if defined(__AVX512VNNI__)
    // Its integers have 22 bits below the largest of a group: next to an outlier, too few for inputs of 11 or 24 bits.
    if (m <= kMaxGemvInt8 && w.element == MINIFLOAT_E2M1 && is_bf16) return kGemvInt8Path;
#endif
    if (m <= kMaxGemv) return kGemvPath;
#elif defined(__AVX2__) || defined(__aarch64__)
#if defined(__AVX2__)
    if (m == 1 && w.element == MINIFLOAT_E2M1) return kDigitsPath;
#endif
    constexpr int64_t kMaxFew = 4;  // rows that share the decoding
    if (m <= kMaxFew) return kFewRowsPath;
#endif
#if defined(__AMX_BF16__)
    constexpr int64_t kMaxSmall = 32;  // two tiles of x
    return m <= kMaxSmall ? kAmxSmallPath : kAmxLargePath;
#elif defined(__AVX512BF16__)
    // Batch-invariant where that is not slower: so are BF16 and E4M3, except blocks of columns with scales.
    if (is_bf16 && m <= kMaxPaired) return kBf16InvariantPath;
    if (is_bf16) return m <= kMaxSmall ? kBf16SmallPath : m <= kMaxMedium ? kBf16MediumPath : kBf16LargePath;
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (x_dtype == MINIFLOAT_BF16) return kMmlaPath;
#endif
    return kFloatPath;
}

}  // namespace MINIFLOAT_ISA
