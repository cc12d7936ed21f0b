// The exported functions: one table row per instruction set of this build, chosen by the caller.
#include "../native/api.h"
#include "float_environment.h"
#include "processor.h"
#include "threads.h"

// Result, name and arguments of the functions that each instruction set has.
#define MINIFLOAT_FUNCTIONS(DO)                                                  \
    DO(void, quantize_rows, minifloat_quantize_rows_args&)                       \
    DO(void, round_inputs, const minifloat_round_inputs_args&)                   \
    DO(void, amax, minifloat_amax_args&)                                         \
    DO(void, histogram, minifloat_histogram_args&)                               \
    DO(void, divergence, const minifloat_divergence_args&)                       \
    DO(void, draw, const minifloat_draw_args&)                                   \
    DO(int32_t, round_with_feedback, const minifloat_round_with_feedback_args&)  \
    DO(int32_t, gram, const minifloat_gram_args&)                                \
    DO(int64_t, packed_bytes, const minifloat_pack_args&)                        \
    DO(int32_t, pack, const minifloat_pack_args&)                                \
    DO(int32_t, unpack, const minifloat_pack_args&)                              \
    DO(int32_t, linear, const minifloat_linear_args&)                            \
    DO(int32_t, moe, const minifloat_moe_args&)                                  \
    DO(bool, rounds_inputs, const uint8_t*, int64_t, int32_t)                    \
    DO(int32_t, step, const minifloat_step_args&)                                \
    DO(void, read, minifloat_read_args&)

#define MINIFLOAT_FUNCTION(result, name, ...) result name(__VA_ARGS__);
#define MINIFLOAT_DECLARE(isa) \
    namespace isa {            \
    MINIFLOAT_FUNCTIONS(MINIFLOAT_FUNCTION) \
    }

MINIFLOAT_FOR_EACH_ISA(MINIFLOAT_DECLARE)

namespace {

#define MINIFLOAT_MEMBER(result, name, ...) result (*name)(__VA_ARGS__);

struct Isa {
    const char* name;
    bool (*supported)();
    MINIFLOAT_FUNCTIONS(MINIFLOAT_MEMBER)
};

#define MINIFLOAT_POINTER(result, name, ...) name,
// In the namespace of the instruction set, so that the names are its functions.
#define MINIFLOAT_ROW_OF(isa) \
    namespace isa {           \
    const Isa kRow = {#isa, minifloat::has_##isa, MINIFLOAT_FUNCTIONS(MINIFLOAT_POINTER)}; \
    }
#define MINIFLOAT_ROW(isa) isa::kRow,

}  // namespace

MINIFLOAT_FOR_EACH_ISA(MINIFLOAT_ROW_OF)

namespace {

// The order of processor.h.
const Isa kIsas[] = {MINIFLOAT_FOR_EACH_ISA(MINIFLOAT_ROW)};
constexpr int32_t kIsaCount = sizeof kIsas / sizeof kIsas[0];

bool known_dtype(int32_t dtype) { return dtype >= MINIFLOAT_BF16 && dtype <= MINIFLOAT_F32; }

// A format whose values, and the steps between them, are normal numbers of float32 with room for a scale.
bool known_format(const minifloat_format& f) {
    constexpr int32_t kSmallestExponent = -100;
    constexpr float kLargest = 0x1p100f;
    if (f.bits < 2 || f.bits > 8 || f.mantissa_bits < 0 || f.mantissa_bits >= f.bits - 1) return false;
    if (f.emin < kSmallestExponent || f.emin > -kSmallestExponent) return false;
    return f.max >= __builtin_ldexpf(1.0f, f.emin) && f.max <= kLargest;  // no NaN either
}

// A finite number without a sign, whose bits are in the order of the values.
bool is_magnitude(float value) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits >= 0 && bits < 0x7f800000;
}

bool valid(const minifloat_quantize_rows_args& a) {
    const int lanes = 16;
    const bool whole_row = a.one_scale || a.block_cols >= a.cols;
    if (a.rows < 0 || a.cols < 1 || a.block_rows < 1 || a.block_cols < 1 || !known_dtype(a.dtype)) return false;
    if (!whole_row && a.block_cols % lanes != 0) return false;
    if (a.scaling < MINIFLOAT_SCALE_FLOAT32 || a.scaling > MINIFLOAT_SCALE_FLOAT32_RCEIL) return false;
    if (!known_format(a.element)) return false;
    const bool coded_search = a.scaling == MINIFLOAT_SCALE_CODED_SEARCH;
    const bool coded = a.scaling == MINIFLOAT_SCALE_CODED || coded_search;
    if (coded && (!known_format(a.scale) || !is_magnitude(a.divisor) || a.divisor == 0.0f)) return false;
    if (!is_magnitude(a.zero_scale) || (a.one_scale && !is_magnitude(a.tensor_amax))) return false;
    if (a.element.bits == 4 && a.cols % 2 != 0) return false;
    const bool groups = a.block_rows == 1 && !a.one_scale;
    if (coded_search) return groups && a.block_cols == lanes;
    return a.scaling != MINIFLOAT_SCALE_SEARCH || (groups && (a.block_cols == lanes || a.block_cols == 2 * lanes));
}

bool valid(const minifloat_round_inputs_args& a) {
    if (a.rows < 0 || a.cols < 1 || !known_dtype(a.dtype) || !known_format(a.element)) return false;
    if (a.scaling < MINIFLOAT_INPUT_GIVEN || a.scaling > MINIFLOAT_INPUT_BLOCK) return false;
    if (a.scaling == MINIFLOAT_INPUT_GIVEN && a.scale == nullptr) return false;
    return a.scaling != MINIFLOAT_INPUT_BLOCK || a.block_cols >= 1;
}

bool valid(const minifloat_amax_args& a) { return a.count >= 0 && known_dtype(a.dtype); }

bool valid(const minifloat_histogram_args& a) { return a.count >= 0 && known_dtype(a.dtype); }

bool valid(const minifloat_divergence_args& a) {
    return a.rows >= 0 && a.top >= 1 && a.top <= a.vocab && a.top <= MINIFLOAT_DIVERGENCE_TOP && a.vocab <= INT32_MAX;
}

bool valid(const minifloat_draw_args& a) { return a.rows >= 0 && a.vocab >= 1 && a.stride >= a.vocab; }

bool valid(const minifloat_read_args& a) { return a.data != nullptr && a.bytes >= 0 && a.bytes % 8 == 0; }

bool valid(const minifloat_round_with_feedback_args& a) {
    if (a.rows < 0 || a.cols < 0 || !known_format(a.element)) return false;
    for (int64_t column = 0; column < a.cols; ++column)
        if (a.group_of[column] < 0 || a.group_of[column] >= a.groups) return false;
    return true;
}

bool valid(const minifloat_gram_args& a) {
    if (a.rows < 0 || a.x_cols < 0 || a.y_cols < 0) return false;
    if (a.symmetric && (a.x != a.y || a.x_cols != a.y_cols || a.x_stride != a.y_stride)) return false;
    return known_dtype(a.dtype);
}

// The instruction sets, fastest on this processor first, and which of them it can run. Made once per process: it makes a
// system call, which would cost more than a small product.
struct Table {
    Isa isa[kIsaCount];
    bool supported[kIsaCount];

    Table() {
        minifloat::init_processor();
        for (int32_t i = 0; i < kIsaCount; ++i) isa[i] = kIsas[i];
#if defined(MINIFLOAT_WITH_avx512_bf16) && defined(MINIFLOAT_WITH_avx512_vnni)
        for (int32_t i = 0; minifloat::prefers_float32() && i + 1 < kIsaCount; ++i)
            if (isa[i].supported == minifloat::has_avx512_bf16) {
                isa[i] = kIsas[i + 1];
                isa[i + 1] = kIsas[i];
                break;
            }
#endif
        for (int32_t i = 0; i < kIsaCount; ++i) supported[i] = isa[i].supported();
    }
};

const Table& table() {
    static const Table once;
    return once;
}

const Isa& isa_of(int32_t isa) { return table().isa[isa]; }

bool runs_here(int32_t isa) { return isa >= 0 && isa < kIsaCount && table().supported[isa]; }

bool has_tiles([[maybe_unused]] const Isa& isa) {
#if defined(MINIFLOAT_WITH_amx)
    return isa.supported == minifloat::has_amx;
#else
    return false;
#endif
}

int32_t invariant_isa(int32_t isa) {
    while (isa + 1 < kIsaCount && (has_tiles(isa_of(isa)) || !runs_here(isa))) ++isa;
    return isa;
}

bool valid(const minifloat_pack_args& a) { return a.codes != nullptr && a.packed != nullptr; }

bool valid(const minifloat_linear_args& a) {
    if (a.count < 1 || a.m < 0 || a.weights == nullptr || !known_dtype(a.x_dtype)) return false;
    return a.biases == nullptr || known_dtype(a.bias_dtype);
}

bool valid(const minifloat_moe_args& a) {
    if (a.experts < 1 || a.offsets == nullptr || a.weights == nullptr || !known_dtype(a.x_dtype)) return false;
    return a.biases == nullptr || known_dtype(a.bias_dtype);
}

bool valid(const minifloat_decoder& d, const minifloat_attention& a, const minifloat_latent& latent) {
    const int32_t rotated = a.head_dim - latent.rank, value_dim = latent.value_dim;
    if (a.kv_heads != 1 || latent.rank < 2 || latent.rank % 2 || rotated < 0 || latent.q_rank < 0) return false;
    if (a.rotary >= 0 && d.rotaries[a.rotary].rotary > rotated) return false;
    return latent.plain > 0 && latent.plain <= MINIFLOAT_MAX_HEAD_DIM && value_dim > 0;
}

bool valid(const minifloat_decoder& d, const minifloat_attention& a) {
    if (a.head_dim < 2 || a.head_dim > MINIFLOAT_MAX_HEAD_DIM || a.head_dim % 2) return false;
    if (a.rotary >= d.rotary_count || (a.rotary >= 0 && d.rotaries[a.rotary].rotary > a.head_dim)) return false;
    if ((a.values == MINIFLOAT_VALUES_LATENT) != (a.latent != nullptr)) return false;
    if (a.latent != nullptr && !valid(d, a, *a.latent)) return false;
    return a.heads > 0 && a.kv_heads > 0 && a.heads % a.kv_heads == 0;
}

bool valid(const minifloat_step_args& a, const minifloat_delta& d) {
    if (a.states == nullptr || a.slots == nullptr || d.k_dim < 1 || d.v_dim < 1 || d.conv_width < 1) return false;
    return d.k_heads > 0 && d.v_heads > 0 && d.v_heads % d.k_heads == 0;
}

bool valid(const minifloat_step_args& a) {
    if (a.token_count < 1 || a.sequences < 1 || a.logit_count < 0) return false;
    const minifloat_decoder& d = *a.decoder;
    if (a.cache_element < MINIFLOAT_CACHE_F32 || a.cache_element > MINIFLOAT_CACHE_E4M3) return false;
    for (int32_t i = 0; i < d.layer_count; ++i) {
        const minifloat_layer& layer = d.layers[i];
        if (layer.delta == nullptr ? !valid(d, layer.attention) : !valid(a, *layer.delta)) return false;
    }
    return known_dtype(d.dtype);
}

// Runs a function of an instruction set, if that is here and the arguments are valid.
template <class Args>
int32_t run(int32_t isa, Args& args, void (*Isa::*function)(Args&)) {
    if (!runs_here(isa)) return MINIFLOAT_UNSUPPORTED_ISA;
    if (!valid(args)) return MINIFLOAT_BAD_ARGUMENT;
    (isa_of(isa).*function)(args);
    return MINIFLOAT_OK;
}

template <class Args>
int32_t run(int32_t isa, Args& args, int32_t (*Isa::*function)(Args&), bool batch_invariant = false) {
    if (!runs_here(isa)) return MINIFLOAT_UNSUPPORTED_ISA;
    if (!valid(args)) return MINIFLOAT_BAD_ARGUMENT;
    return (isa_of(batch_invariant ? invariant_isa(isa) : isa).*function)(args);
}

}  // namespace

extern "C" {

int32_t minifloat_abi_version(void) { return MINIFLOAT_ABI_VERSION; }

void minifloat_release_threads(void) { minifloat::release(); }

void minifloat_bind_threads(const uint64_t* masks, int32_t words, int32_t nodes, int32_t threads) {
    minifloat::bind(masks, words, nodes, threads);
}

int32_t minifloat_isa_count(void) { return kIsaCount; }

const char* minifloat_isa_name(int32_t isa) { return isa >= 0 && isa < kIsaCount ? isa_of(isa).name : nullptr; }

int32_t minifloat_isa_supported(int32_t isa) { return runs_here(isa); }

int32_t minifloat_invariant_isa(int32_t isa) { return runs_here(isa) ? invariant_isa(isa) : -1; }

#define MINIFLOAT_ENTRY(name, Args) \
    int32_t minifloat_##name(int32_t isa, struct Args* args) { return run(isa, *args, &Isa::name); }
// Of functions that compute in the calling thread, whatever its floating-point environment is.
#define MINIFLOAT_IEEE_ENTRY(name, Args)                         \
    int32_t minifloat_##name(int32_t isa, struct Args* args) {   \
        const minifloat::DefaultFloatEnvironment environment;    \
        return run(isa, *args, &Isa::name);                      \
    }

MINIFLOAT_IEEE_ENTRY(quantize_rows, minifloat_quantize_rows_args)
MINIFLOAT_IEEE_ENTRY(round_inputs, minifloat_round_inputs_args const)
MINIFLOAT_IEEE_ENTRY(amax, minifloat_amax_args)
MINIFLOAT_IEEE_ENTRY(histogram, minifloat_histogram_args)
MINIFLOAT_ENTRY(divergence, minifloat_divergence_args const)
MINIFLOAT_ENTRY(draw, minifloat_draw_args const)
MINIFLOAT_ENTRY(round_with_feedback, minifloat_round_with_feedback_args const)
MINIFLOAT_ENTRY(gram, minifloat_gram_args const)
MINIFLOAT_ENTRY(pack, minifloat_pack_args const)
MINIFLOAT_ENTRY(unpack, minifloat_pack_args const)
MINIFLOAT_ENTRY(read, minifloat_read_args)

int64_t minifloat_packed_bytes(const struct minifloat_pack_args* args) {
    return kIsas[kIsaCount - 1].packed_bytes(*args);
}

int32_t minifloat_linear(int32_t isa, const struct minifloat_linear_args* args) {
    return run(isa, *args, &Isa::linear, args->batch_invariant);
}

int32_t minifloat_moe(int32_t isa, const struct minifloat_moe_args* args) {
    return run(isa, *args, &Isa::moe, args->batch_invariant);
}

int32_t minifloat_rounds_inputs(int32_t isa, const uint8_t* weight, int64_t m, int32_t x_dtype) {
    return runs_here(isa) && known_dtype(x_dtype) && isa_of(isa).rounds_inputs(weight, m, x_dtype);
}

int32_t minifloat_step(int32_t isa, const struct minifloat_step_args* args) {
    const minifloat::DefaultFloatEnvironment environment;
    return run(isa, *args, &Isa::step, args->decoder->batch_invariant);
}

}  // extern "C"
