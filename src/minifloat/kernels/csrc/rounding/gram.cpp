// Chooses how a Gram product is computed.
#include "gram_amx.h"
#include "gram_bf16.h"
#include "gram_float.h"

namespace MINIFLOAT_ISA {

// dispatch.cpp declares this function for every instruction set.
int32_t gram(const minifloat_gram_args& args) {
    if (args.rows == 0 || args.x_cols == 0 || args.y_cols == 0) return MINIFLOAT_OK;
#if defined(__AMX_BF16__)
    if (args.dtype == MINIFLOAT_BF16) return Gram<GramAmx>(args).run();
#elif defined(__AVX512BF16__)
    if (args.dtype == MINIFLOAT_BF16) return Gram<GramBf16>(args).run();
#endif
    return Gram<GramFloat>(args).run();
}

}  // namespace MINIFLOAT_ISA
