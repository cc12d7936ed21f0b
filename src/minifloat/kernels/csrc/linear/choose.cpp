// Chooses the path of a call: one decision per instruction set.
#include "path.h"

namespace MINIFLOAT_ISA {

extern const Path kFloatPath, kAvx2Path, kGemvPath, kGemvInt8Path, kAmxSmallPath, kAmxLargePath;

const Path& choose_path([[maybe_unused]] const Weight& w, [[maybe_unused]] int64_t m,
                        [[maybe_unused]] int32_t x_dtype) {
#if defined(__AVX512F__)
#if defined(__AMX_BF16__)
    constexpr int64_t kMaxGemv = 1;
    [[maybe_unused]] constexpr int64_t kMaxGemvInt8 = 2;  // above, tiles are faster
#else
    constexpr int64_t kMaxGemv = 8;
    [[maybe_unused]] constexpr int64_t kMaxGemvInt8 = 8;
#endif
#if defined(__AVX512VNNI__)
    // Its integers have 22 bits below the largest of a group: next to an outlier, too few for inputs of 11 or 24 bits.
    if (m <= kMaxGemvInt8 && w.element == MINIFLOAT_E2M1 && x_dtype == MINIFLOAT_BF16) return kGemvInt8Path;
#endif
    if (m <= kMaxGemv) return kGemvPath;
#elif defined(__AVX2__)
    constexpr int64_t kMaxGemv = 4;  // rows of which each decodes the weights
    if (m <= kMaxGemv) return kAvx2Path;
#endif
#if defined(__AMX_BF16__)
    constexpr int64_t kMaxSmall = 32;  // two tiles of x
    return m <= kMaxSmall ? kAmxSmallPath : kAmxLargePath;
#endif
    return kFloatPath;
}

}  // namespace MINIFLOAT_ISA
