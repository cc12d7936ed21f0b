// The exported functions: one table row per instruction set of this build, chosen by the caller.
#include <cfenv>

#include "api.h"

#define MINIFLOAT_DECLARE(isa)                              \
    namespace isa {                                             \
    void quantize_rows(minifloat_quantize_rows_args& args);     \
    void amax(minifloat_amax_args& args);                       \
    void histogram(minifloat_histogram_args& args);             \
    }

MINIFLOAT_DECLARE(baseline)
#if defined(MINIFLOAT_X86)
MINIFLOAT_DECLARE(avx2)
MINIFLOAT_DECLARE(avx512)
#endif

namespace {

struct Isa {
    const char* name;
    bool (*supported)();
    void (*quantize_rows)(minifloat_quantize_rows_args&);
    void (*amax)(minifloat_amax_args&);
    void (*histogram)(minifloat_histogram_args&);
};

// Fastest first. The features are those that CMakeLists.txt compiles the object file with.
const Isa kIsas[] = {
#if defined(MINIFLOAT_X86)
    {"avx512",
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     avx512::quantize_rows, avx512::amax, avx512::histogram},
    {"avx2", [] { return __builtin_cpu_supports("avx2") != 0; }, avx2::quantize_rows, avx2::amax, avx2::histogram},
#endif
    {"baseline", [] { return true; }, baseline::quantize_rows, baseline::amax, baseline::histogram},
};
constexpr int32_t kIsaCount = sizeof kIsas / sizeof kIsas[0];

// The arithmetic is that of IEEE 754 whatever the calling thread has set (flush to zero, another rounding mode).
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t saved_;
};

bool known_dtype(int32_t dtype) { return dtype >= MINIFLOAT_BF16 && dtype <= MINIFLOAT_F32; }

bool known_format(const minifloat_format& f) {
    return f.bits >= 2 && f.bits <= 8 && f.mantissa_bits >= 0 && f.mantissa_bits < f.bits - 1 && f.max > 0.0f;
}

bool valid(const minifloat_quantize_rows_args& a) {
    const int lanes = 16;
    const bool whole_row = a.one_scale || a.block_cols >= a.cols;
    if (a.rows < 0 || a.cols < 1 || a.block_rows < 1 || a.block_cols < 1 || !known_dtype(a.dtype)) return false;
    if (!whole_row && a.block_cols % lanes != 0) return false;
    if (a.scaling < MINIFLOAT_SCALE_FLOAT32 || a.scaling > MINIFLOAT_SCALE_SEARCH) return false;
    if (!known_format(a.element)) return false;
    if (a.scaling == MINIFLOAT_SCALE_CODED && !known_format(a.scale)) return false;
    if (a.element.bits == 4 && a.cols % 2 != 0) return false;
    const bool searchable = a.block_rows == 1 && (a.block_cols == lanes || a.block_cols == 2 * lanes) && !a.one_scale;
    return a.scaling != MINIFLOAT_SCALE_SEARCH || searchable;
}

bool runs_here(int32_t isa) {
#if defined(MINIFLOAT_X86)
    __builtin_cpu_init();  // not every compiler's runtime does it when the library is loaded
#endif
    return isa >= 0 && isa < kIsaCount && kIsas[isa].supported();
}

}  // namespace

extern "C" {

int32_t minifloat_abi_version(void) { return MINIFLOAT_ABI_VERSION; }

int32_t minifloat_isa_count(void) { return kIsaCount; }

const char* minifloat_isa_name(int32_t isa) { return isa >= 0 && isa < kIsaCount ? kIsas[isa].name : nullptr; }

int32_t minifloat_isa_supported(int32_t isa) { return runs_here(isa); }

int32_t minifloat_quantize_rows(int32_t isa, struct minifloat_quantize_rows_args* args) {
    if (!runs_here(isa)) return MINIFLOAT_UNSUPPORTED_ISA;
    if (!valid(*args)) return MINIFLOAT_BAD_ARGUMENT;
    const DefaultFloatEnvironment environment;
    kIsas[isa].quantize_rows(*args);
    return MINIFLOAT_OK;
}

int32_t minifloat_amax(int32_t isa, struct minifloat_amax_args* args) {
    if (!runs_here(isa)) return MINIFLOAT_UNSUPPORTED_ISA;
    if (args->count < 0 || !known_dtype(args->dtype)) return MINIFLOAT_BAD_ARGUMENT;
    const DefaultFloatEnvironment environment;
    kIsas[isa].amax(*args);
    return MINIFLOAT_OK;
}

int32_t minifloat_histogram(int32_t isa, struct minifloat_histogram_args* args) {
    if (!runs_here(isa)) return MINIFLOAT_UNSUPPORTED_ISA;
    if (args->count < 0 || !known_dtype(args->dtype)) return MINIFLOAT_BAD_ARGUMENT;
    const DefaultFloatEnvironment environment;
    kIsas[isa].histogram(*args);
    return MINIFLOAT_OK;
}

}  // extern "C"
