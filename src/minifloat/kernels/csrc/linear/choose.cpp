// Which path computes a call: one visible decision per instruction set.
#include "path.h"

namespace MINIFLOAT_ISA {

extern const Path kFloatPath, kGemvPath, kAmxSmallPath, kAmxLargePath;

const Path& choose_path(const Weight&, [[maybe_unused]] int64_t m, int32_t) {
#if defined(__AMX_BF16__)
    constexpr int64_t kMaxSmall = 32;  // two tiles of x
    if (m == 1) return kGemvPath;
    return m <= kMaxSmall ? kAmxSmallPath : kAmxLargePath;
#elif defined(__AVX512F__)
    constexpr int64_t kMaxGemv = 8;
    if (m <= kMaxGemv) return kGemvPath;
#endif
    return kFloatPath;
}

}  // namespace MINIFLOAT_ISA
