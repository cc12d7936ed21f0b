// The C interface of libminifloat_native; native/__init__.py reads the structures and constants from this file. Every
// call is a pure function of its arguments, so any number of threads may call at once; Python validates the arguments,
// and the checks here only guard memory.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MINIFLOAT_API __attribute__((visibility("default")))

// Incremented whenever a struct or the meaning of a field changes, so that a stale library is detected and not called.
#define MINIFLOAT_ABI_VERSION 24

enum minifloat_status {
    MINIFLOAT_OK = 0,
    MINIFLOAT_UNSUPPORTED_ISA = 1,  // no such instruction set in this build, or not on this processor
    MINIFLOAT_BAD_ARGUMENT = 2,     // an enumerator or a size out of range
    MINIFLOAT_BAD_WEIGHT = 3,       // not a packed weight of this version, or one for another input
    MINIFLOAT_NO_MEMORY = 4,        // no room for a scratch buffer
};

// Little-endian source elements.
enum minifloat_dtype { MINIFLOAT_BF16 = 0, MINIFLOAT_F16 = 1, MINIFLOAT_F32 = 2 };

// How the amax of a block becomes its scale; the semantics are those of minifloat/numerics/scale_rules.py and
// scale_search.py.
enum minifloat_scaling {
    MINIFLOAT_SCALE_FLOAT32 = 0,  // amax / element.max
    MINIFLOAT_SCALE_CODED = 1,    // divisor * (amax / element.max), rounded to `scale` (NVFP4)
    MINIFLOAT_SCALE_FLOOR = 2,    // E8M0, four rules
    MINIFLOAT_SCALE_EVEN = 3,
    MINIFLOAT_SCALE_RCEIL = 4,
    MINIFLOAT_SCALE_SEARCH = 5,
    MINIFLOAT_SCALE_CODED_SEARCH = 6,   // CODED, then a search of the codes around it; blocks of 1x16
    MINIFLOAT_SCALE_FLOAT32_RCEIL = 7,  // FLOAT32, rounded up to a power of two
};

// The properties of a signed format of at most 8 bits that rounding needs; numerics/formats.py defines them.
struct minifloat_format {
    int32_t bits;
    int32_t mantissa_bits;
    int32_t emin;  // exponent of the smallest normal value
    float max;     // largest finite value
};

struct minifloat_quantize_rows_args {
    const uint8_t* data;  // [rows, cols] of `dtype`, row-major, any alignment
    int64_t rows, cols;
    int64_t block_rows, block_cols;  // elements that share a scale; block_cols a multiple of 16, or >= cols
    int32_t dtype;                   // minifloat_dtype
    int32_t scaling;                 // minifloat_scaling
    struct minifloat_format element;
    struct minifloat_format scale;  // only of CODED and CODED_SEARCH
    float divisor;                  // above 0 and finite; only of CODED and CODED_SEARCH
    float zero_scale;               // 0 or above and finite; scale of a block of zeros, of FLOAT32, CODED and CODED_SEARCH
    int32_t one_scale;              // not 0: every element is scaled by `tensor_amax`, the grid is [1, 1]
    float tensor_amax;              // 0 or above and finite
    uint8_t* codes;  // [rows, cols], or [rows, cols / 2] where element.bits == 4 (low nibble = even column)
    void* scales;    // [ceil(rows / block_rows), ceil(cols / block_cols)]: float for FLOAT32, else uint8_t
    // Results.
    double signal, noise;
    int64_t saturated, flushed;
    int64_t nonfinite;
};

// Where the scale of an input comes from.
enum minifloat_input_scaling {
    MINIFLOAT_INPUT_GIVEN = 0,   // *scale, for all elements
    MINIFLOAT_INPUT_TENSOR = 1,  // amax / element.max of all elements
    MINIFLOAT_INPUT_BLOCK = 2,   // amax of each block: one row, block_cols columns
};

// Each element becomes the value of its code: x / scale rounded to `element`, times scale, in float32.
// minifloat/numerics/activation.py defines the results for NaN, Inf and zeros.
struct minifloat_round_inputs_args {
    const uint8_t* x;    // [rows, cols] of `dtype`, rows x_stride elements apart, any alignment
    const float* scale;  // one, only of MINIFLOAT_INPUT_GIVEN
    float* y;            // [rows, cols]
    int64_t rows, cols;
    int64_t x_stride;
    int64_t block_cols;  // only of MINIFLOAT_INPUT_BLOCK; the last block of a row may be partial
    struct minifloat_format element;
    int32_t dtype;     // minifloat_dtype
    int32_t scaling;   // minifloat_input_scaling
    float zero_scale;  // scale of a block of zeros, unless the scale is given
    int32_t threads;
};

struct minifloat_amax_args {
    const uint8_t* data;  // `count` elements of `dtype`, any alignment
    int64_t count;
    int32_t dtype;
    // Results.
    float amax;         // of the finite elements; 0 when there are none
    int64_t nonfinite;  // NaN and Inf
};

// Bins of minifloat_histogram: one for each of the leading 11 bits of a float32 without its sign.
#define MINIFLOAT_HISTOGRAM_BINS 2048
// Rows of a weight that exchange their errors in rounding: a divisor of most heads.
#define MINIFLOAT_ROW_BLOCK 192

struct minifloat_histogram_args {
    const uint8_t* data;  // `count` elements of `dtype`, any alignment
    int64_t count;
    int32_t dtype;
    int64_t* bins;  // [MINIFLOAT_HISTOGRAM_BINS], added to; Inf and NaN fill the last 8
};

// Largest number of first choices of minifloat_divergence.
#define MINIFLOAT_DIVERGENCE_TOP 16

// Compares what two models expect after the same tokens. `p` and `q` are logits, and the weight of a token is
// e^(logit - largest logit of its row).
struct minifloat_divergence_args {
    const float* p;  // [rows, vocab]
    const float* q;  // [rows, vocab]
    int64_t rows, vocab;
    int64_t top;  // 1 .. min(vocab, MINIFLOAT_DIVERGENCE_TOP)
    int32_t threads;
    // Results.
    double* sums;       // [rows, 3]: the weights of p, those of q, and the weights of p times the logits of p less those of
                        // q, both less their largest; NaN where logits are NaN or their largest is infinite
    float* p_logits;    // [rows, top], the largest; of equal ones those of the first tokens
    float* q_logits;    // [rows, top]
    int32_t* p_tokens;  // [rows, top], tokens with these logits
    int32_t* q_tokens;  // [rows, top]
};

// Draws one token of each row: the first whose weight and those before it are above `uniforms` times the sum of all. The
// weight of a token is e^((logit - largest) / temperature).
struct minifloat_draw_args {
    const float* logits;  // [rows, vocab], rows `stride` elements apart; no NaN
    int64_t rows, vocab, stride;
    const double* largest;       // [rows], the largest logits, finite
    const double* temperatures;  // [rows], positive
    const double* uniforms;      // [rows], in [0, 1)
    int32_t threads;
    int64_t* tokens;  // [rows]
};

// Rounds the columns of a weight in ascending order. The error of a column, weight - code * scale, times
// feedback[column][k] is added to each later column k before that column is rounded, in ascending order of columns, each
// time one float32 multiplication and one float32 addition. With row_feedback, rows in blocks of
// MINIFLOAT_ROW_BLOCK are rounded in ascending order within a column: what rounding took from the element of a row, as
// the columns before had made it, times row_feedback[row][later row in the block] is added up, in ascending order of
// rows, and this sum is added to the element of the later row before it is rounded.
struct minifloat_round_with_feedback_args {
    const float* weight;        // [rows, cols], finite
    const float* scales;        // [rows, groups], positive
    const int32_t* group_of;    // [cols]: the column of `scales`, 0 .. groups - 1
    const float* feedback;      // [cols, cols]; only what is above the diagonal is read
    const float* row_feedback;  // [rows, MINIFLOAT_ROW_BLOCK], zero up to the diagonal of each block; null: none
    uint8_t* codes;             // [rows, cols], one per byte
    int64_t rows, cols, groups;
    struct minifloat_format element;
    int32_t threads;
};

// out += x^T y, in float32: products of the elements, summed over the rows.
struct minifloat_gram_args {
    const uint8_t* x;  // [rows, x_cols] of `dtype`, rows x_stride elements apart
    const uint8_t* y;  // [rows, y_cols]
    float* out;        // [x_cols, y_cols]
    int64_t rows, x_cols, y_cols;
    int64_t x_stride, y_stride;
    int32_t dtype;
    int32_t symmetric;  // not 0: x is y, and only half of the products are computed
    int32_t threads;
};

// Format of the elements of a packed weight.
enum minifloat_element {
    MINIFLOAT_E4M3 = 0,
    MINIFLOAT_E2M1 = 1,
    MINIFLOAT_WEIGHT_BF16 = 2,
    MINIFLOAT_WEIGHT_F16 = 3,
    MINIFLOAT_WEIGHT_F32 = 4
};

// Scales of a packed weight: their format, and the elements that share a scale.
enum minifloat_grid {
    MINIFLOAT_GRID_ROW = 0,     // float per row, or none if not quantized: per tensor, per channel
    MINIFLOAT_GRID_BLOCK = 1,   // float per block of block_rows x block_cols
    MINIFLOAT_GRID_E8M0 = 2,    // E8M0 per row and 32 columns: MXFP8, MXFP4
    MINIFLOAT_GRID_E4M3 = 3,    // E4M3 per row and 16 columns, under a float for the tensor: NVFP4
};

// A weight [rows, cols] as checkpoints store it, and its packed form (linear/layout.h).
struct minifloat_pack_args {
    const uint8_t* codes;  // [rows, cols] uint8 for E4M3, [rows, cols / 2] for E2M1 (low nibble = even column), floats
    const void* scales;    // the grid, row-major: float for ROW and BLOCK, else uint8_t; null for floats
    int64_t rows, cols;
    int64_t block_rows, block_cols;  // of one scale; for ROW block_cols >= cols, for E8M0 1x32, for E4M3 1x16
    int32_t element;                 // minifloat_element
    int32_t grid;                    // minifloat_grid
    float factor;                    // multiplies every scale: 1, or the tensor's scale of NVFP4
    int32_t threads;
    uint8_t* packed;  // minifloat_packed_bytes() of them, 64-byte aligned
};

#define MINIFLOAT_INT8_WITHOUT_AVX_VNNI 2

// y = x W^T + bias for `count` packed weights [N_i, K] of one format, whose results follow each other in y.
struct minifloat_linear_args {
    const uint8_t* const* weights;  // `count` packed weights
    const void* const* biases;      // null, or `count` of them: [N_i] of bias_dtype, or null
    const void* x;                  // [m, K] of x_dtype, rows x_stride elements apart, any alignment
    void* y;                        // [m, sum of N_i] of x_dtype, rows y_stride elements apart
    int64_t x_stride, y_stride;
    int64_t m;
    int32_t count;
    int32_t x_dtype, bias_dtype;  // minifloat_dtype
    int32_t threads;
    // Not 0: x may be rounded to int8 (linear/int8_x.h); minifloat_rounds_inputs says where it is. The tests' value
    // MINIFLOAT_INT8_WITHOUT_AVX_VNNI leaves AVX-VNNI out, which changes no bit.
    int32_t int8_inputs;
    // Not 0: the bits of a row of y do not depend on m or on the other rows; x is not rounded then.
    int32_t batch_invariant;
};

// Row t of y = row x_rows[t] of x times the expert that owns t: a linear over experts, tokens sorted by expert.
struct minifloat_moe_args {
    const uint8_t* const* weights;  // `experts` packed weights [N, K] of one format
    const void* const* biases;      // null, or `experts` of them
    const int64_t* offsets;         // [experts + 1]: expert e owns rows offsets[e] .. offsets[e + 1] - 1 of y
    const int64_t* x_rows;          // [offsets[experts]], or null: row t of x
    const void* x;
    void* y;  // [offsets[experts], N]
    int64_t x_stride, y_stride;
    int32_t experts;
    int32_t x_dtype, bias_dtype;
    int32_t threads;
    int32_t int8_inputs, batch_invariant;  // as of a linear
};

// The elements of a KV cache; kernels/decoder/cache.py describes its layout.
enum minifloat_cache_element { MINIFLOAT_CACHE_F32 = 0, MINIFLOAT_CACHE_BF16 = 1, MINIFLOAT_CACHE_E4M3 = 2 };

// Tokens of one block of a cache, and the largest size of a head.
#define MINIFLOAT_BLOCK_TOKENS 16
#define MINIFLOAT_MAX_HEAD_DIM 576

// The parts of a step whose times are measured.
enum minifloat_step_part {
    MINIFLOAT_STEP_LINEARS = 0,
    MINIFLOAT_STEP_ATTENTION = 1,  // the gated delta rule too
    MINIFLOAT_STEP_ROWS = 2,  // norms, rotation, writing into the cache, activations, residuals, routing
    MINIFLOAT_STEP_PARTS = 3,
};

// Packed weights that share an input, and their biases.
struct minifloat_product {
    const uint8_t* const* weights;
    const void* const* biases;  // null, or per weight a bias or null
    int32_t count;
    int32_t bias_dtype;
};

// A norm of a row: (x - mean) / sqrt(variance + eps) * weight + bias, or without the mean (RMS).
struct minifloat_norm {
    const float* weight;  // null: there is no norm
    const float* bias;    // or null
    float eps;
    int32_t centered;  // not 0: the mean is subtracted
};

// Cosines and sines of positions. The dimensions of a head from `rotary` on are not turned.
struct minifloat_rotary {
    const float* inv_freq;  // [rotary / 2]
    int32_t rotary;
    int32_t interleaved;  // not 0: dimensions 2i and 2i + 1 are a pair; 0: i and i + rotary / 2
    float scaling;        // of cosines and sines
};

// What the gate of an MLP passes through; kernels/decoder/reference.py defines the functions.
enum minifloat_activation_kind {
    MINIFLOAT_SILU = 0,
    MINIFLOAT_GELU = 1,       // by the error function
    MINIFLOAT_GELU_TANH = 2,  // by the hyperbolic tangent
    MINIFLOAT_RELU = 3,
    MINIFLOAT_RELU_SQUARED = 4,
    MINIFLOAT_CLAMPED_SWIGLU = 5,  // of gpt-oss, with `alpha` and `limit`
};

struct minifloat_activation {
    int32_t kind;   // minifloat_activation_kind
    int32_t gated;  // not 0: rows are [gate | up], and the result is a product; 0: rows are inputs of the function
    float alpha, limit;
};

// The weights of all experts for one input, and their biases.
struct minifloat_expert_product {
    const uint8_t* const* weights;  // one per expert, or null
    const void* const* biases;      // null, or one per expert
    int32_t bias_dtype;
};

// How scores of experts become weights.
enum minifloat_router_kind {
    MINIFLOAT_ROUTER_SOFTMAX = 0,         // softmax over all experts, then the largest
    MINIFLOAT_ROUTER_SOFTMAX_CHOSEN = 1,  // the largest, then softmax over these
    MINIFLOAT_ROUTER_SIGMOID = 2,         // sigmoid, then the largest
};

struct minifloat_router {
    const void* weight;       // [experts, hidden] of `dtype`
    const float* bias;        // [experts] or null: added to the products
    const float* correction;  // [experts] or null: added to the scores for the choice alone
    int32_t dtype, kind;      // minifloat_dtype, minifloat_router_kind
    int32_t experts, top_k;
    int32_t groups, groups_kept;  // experts of the best groups alone are chosen; groups 1: of all
    int32_t group_best;           // a group counts as the sum of this number of its best scores, 1 or 2
    int32_t normalize;            // not 0: the weights of the chosen experts sum to 1
    float factor;                 // multiplies the weights
    const float* scales;          // [experts] or null: multiply the weights, after all else
};

// Norms of experts and of the MLP beside them, where they do not share the layer's norms.
struct minifloat_expert_norms {
    struct minifloat_norm router;   // of the input of the router
    struct minifloat_norm input;    // of the input of the experts
    struct minifloat_norm experts;  // of the sum of the experts
    struct minifloat_norm mlp;      // of the result of the MLP
};

struct minifloat_experts {
    struct minifloat_router router;
    struct minifloat_expert_product gate;  // [intermediate, hidden], or [2 * intermediate, hidden] with up below
    struct minifloat_expert_product up;    // [intermediate, hidden]; null where gate has it
    struct minifloat_expert_product down;  // [hidden, intermediate]
    struct minifloat_activation activation;
    const float* shared_gate;  // [hidden] or null
    const struct minifloat_expert_norms* norms;  // null: router, experts and MLP read the same input
    int64_t intermediate;
};

// Where the keys and values of a layer come from.
enum minifloat_values {
    MINIFLOAT_VALUES_OWN = 0,     // rows of the product are [q | k | v]
    MINIFLOAT_VALUES_KEYS = 1,    // [q | k]; values are the product's keys, before norm and rotation
    MINIFLOAT_VALUES_SHARED = 2,  // [q]; another layer has written both into the cache
    MINIFLOAT_VALUES_LATENT = 3,  // the first `rank` dimensions of the keys as the cache has them (minifloat_latent)
};

// Latent attention: all heads share one key [latent | rotated]; kernels/decoder/attention.py describes it.
struct minifloat_latent {
    struct minifloat_norm q_norm;   // of the product's queries, before q_up
    struct minifloat_norm kv_norm;  // of the latent
    struct minifloat_product q_up;  // [heads * (plain + rotated), q_rank]; not read where q_rank is 0
    const uint8_t* const* keys;     // per head [rank, plain]
    const uint8_t* const* values;   // per head [value_dim, rank]
    const float* key_factors;       // [heads, plain] or null: multiply the queries before `keys` does
    int64_t q_rank;                 // 0: rows of the product have the queries themselves
    int32_t rank, plain, value_dim;
};

struct minifloat_attention {
    struct minifloat_product qkv, out;
    struct minifloat_norm q_norm, k_norm, v_norm;  // before the rotation
    const float* sinks;                            // [heads] or null: a score of each head that has no value
    int64_t window;                                // 0: none
    int64_t cache_before;  // elements of a block of the cache before those of this layer's cache
    int32_t heads, kv_heads, head_dim;
    int32_t rotary;        // index of the rotary embedding, or -1
    int32_t whole_norms;   // not 0: q_norm and k_norm are of all heads together; 0: of each head
    int32_t head_weights;  // not 0: their weights are [heads * head_dim]; 0: [head_dim]
    int32_t values;        // minifloat_values
    int32_t gated;         // not 0: rows of q are [q | gate] for each head; results are multiplied by sigmoid(gate)
    float scale;
    float score_cap;  // 0: none; else scores are cap * tanh(score / cap)
    float clip;       // 0: none; else the products are clamped to -clip .. clip
    float k_scale, v_scale;
    const struct minifloat_latent* latent;  // of MINIFLOAT_VALUES_LATENT; else null
};

// A gated delta rule in the place of attention; kernels/decoder/attention.py describes the arrays.
struct minifloat_delta {
    struct minifloat_product qkvz, ba, out;
    const float* conv;           // [conv_width, 2 * k_heads * k_dim + v_heads * v_dim], oldest token first
    const float* decay;          // [v_heads]
    const float* dt_bias;        // [v_heads]
    struct minifloat_norm norm;  // of the results of each head
    int64_t state_before;        // floats of the state of a sequence before those of this layer
    int32_t k_heads, v_heads, k_dim, v_dim;
    int32_t conv_width;
    int32_t grouped;  // not 0: the rows of a product are those of each key head in turn; 0: of q, of k, ...
};

struct minifloat_mlp {
    struct minifloat_product gate_up, down;
    struct minifloat_activation activation;
    int64_t intermediate;  // 0: there is none
};

// x += norm(out(function(gate(x)) * input)), where `input` is that of the layer (minifloat_layer_inputs).
struct minifloat_layer_input {
    struct minifloat_product gate;  // [size, hidden]
    struct minifloat_product out;   // [hidden, size]
    struct minifloat_norm norm;
    struct minifloat_activation activation;  // gated
};

// What each layer reads of a token besides the residual stream: `size` numbers, (norm(projection(embedding of the
// token)) + row of the token in `table` * table_factor) * factor.
struct minifloat_layer_inputs {
    struct minifloat_product projection;  // [layers * size, hidden]
    struct minifloat_norm norm;           // of the `size` numbers of a layer
    const void* table;                    // [vocab, layers * size] of table_dtype
    int64_t size;
    int32_t table_dtype;
    float table_factor, factor;
};

struct minifloat_layer {
    struct minifloat_norm input_norm;      // of the input of attention
    struct minifloat_norm attention_norm;  // of its result
    struct minifloat_norm mlp_norm;        // of the input of the MLP
    struct minifloat_norm result_norm;     // of its result
    struct minifloat_attention attention;
    const struct minifloat_delta* delta;      // null: attention
    const struct minifloat_experts* experts;  // null: a plain MLP
    struct minifloat_mlp mlp;                 // the MLP, or the one that experts share
    const struct minifloat_layer_input* input;  // null: there is none
    int32_t parallel;       // not 0: the MLP does not see the result of attention
    float residual_factor;  // of both results
    float scalar;           // multiplies the residual stream at the end
};

struct minifloat_decoder {
    const struct minifloat_layer* layers;
    const struct minifloat_rotary* rotaries;
    struct minifloat_norm norm;
    const void* embedding;  // [vocab, hidden] of embedding_dtype
    const struct minifloat_layer_inputs* inputs;  // null: there are none
    struct minifloat_product lm_head;
    int64_t hidden, lm_head_rows;
    int32_t dtype, embedding_dtype;
    int32_t layer_count, rotary_count;
    float embedding_factor, logits_factor;
    float logits_cap;     // 0: none; else logits are cap * tanh(logit / cap)
    int32_t int8_inputs, batch_invariant;  // of all products with packed weights, as of a linear
};

// New tokens of a batch of sequences; kernels/decoder/types.py describes the arrays.
struct minifloat_step_args {
    const struct minifloat_decoder* decoder;
    uint8_t* cache;             // per cache of a layer [cache_blocks, kv_heads, a block of one head]
    float* states;              // [slots, state_floats] or null: states of sequences for the gated delta rules
    const int32_t* slots;       // [sequences] or null: the state of each
    const int32_t* tokens;      // [token_count]
    const int32_t* positions;   // [token_count]
    const int32_t* starts;      // [sequences + 1]
    const int32_t* contexts;    // [sequences]
    const int32_t* blocks;      // [sequences, block_columns]
    const int32_t* logit_rows;  // [logit_count]
    float* logits;              // [logit_count, lm_head_rows]
    int64_t* nanoseconds;       // null, or [MINIFLOAT_STEP_PARTS], added to
    int64_t cache_blocks, state_floats;
    int32_t cache_element;
    int32_t token_count, sequences, block_columns, logit_count;
    int32_t threads;
};

// Reads memory as fast as it can be read: the limit of every kernel here.
struct minifloat_read_args {
    const uint8_t* data;
    int64_t bytes;  // a multiple of 8
    int32_t threads;
    // Result.
    uint64_t sum;  // of the 64-bit words, modulo 2^64
};

MINIFLOAT_API int32_t minifloat_abi_version(void);

// The instruction sets of this build, fastest first: index 0 .. count - 1.
MINIFLOAT_API int32_t minifloat_isa_count(void);
MINIFLOAT_API const char* minifloat_isa_name(int32_t isa);
MINIFLOAT_API int32_t minifloat_isa_supported(int32_t isa);
// The instruction set that batch-invariant calls for `isa` run with: that one or, as tiles (AMX) have an order of sums
// of their own, a slower one.
MINIFLOAT_API int32_t minifloat_invariant_isa(int32_t isa);

MINIFLOAT_API int32_t minifloat_quantize_rows(int32_t isa, struct minifloat_quantize_rows_args* args);
MINIFLOAT_API int32_t minifloat_round_inputs(int32_t isa, const struct minifloat_round_inputs_args* args);
MINIFLOAT_API int32_t minifloat_amax(int32_t isa, struct minifloat_amax_args* args);
MINIFLOAT_API int32_t minifloat_histogram(int32_t isa, struct minifloat_histogram_args* args);
MINIFLOAT_API int32_t minifloat_divergence(int32_t isa, const struct minifloat_divergence_args* args);
MINIFLOAT_API int32_t minifloat_draw(int32_t isa, const struct minifloat_draw_args* args);

MINIFLOAT_API int32_t minifloat_round_with_feedback(int32_t isa, const struct minifloat_round_with_feedback_args* args);
MINIFLOAT_API int32_t minifloat_gram(int32_t isa, const struct minifloat_gram_args* args);

// Bytes that the packed form of a weight takes, 0 where it has none; `packed` and `threads` are not read.
MINIFLOAT_API int64_t minifloat_packed_bytes(const struct minifloat_pack_args* args);
MINIFLOAT_API int32_t minifloat_pack(int32_t isa, const struct minifloat_pack_args* args);
// Unpacks: writes `codes` and `scales`. Blocks that packing flushed to zero stay zero (linear/layout.h).
MINIFLOAT_API int32_t minifloat_unpack(int32_t isa, const struct minifloat_pack_args* args);
MINIFLOAT_API int32_t minifloat_linear(int32_t isa, const struct minifloat_linear_args* args);
MINIFLOAT_API int32_t minifloat_moe(int32_t isa, const struct minifloat_moe_args* args);

// Whether a product of `m` rows of `x_dtype` with a packed weight rounds its inputs if int8_inputs is set: 0 where this
// instruction set has no such product for the weight, and where rounding would be slower.
MINIFLOAT_API int32_t minifloat_rounds_inputs(int32_t isa, const uint8_t* weight, int64_t m, int32_t x_dtype);

MINIFLOAT_API int32_t minifloat_step(int32_t isa, const struct minifloat_step_args* args);

MINIFLOAT_API int32_t minifloat_read(int32_t isa, struct minifloat_read_args* args);

// Ends the threads that compute for the calling thread, torch's too where both use the same runtime.
MINIFLOAT_API void minifloat_release_threads(void);

// Binds thread t of every later call with several threads to the processors of node t * nodes / threads; a mask of
// `words` words lists the processors of a node. Not while a call runs; with fewer than two nodes none is bound.
MINIFLOAT_API void minifloat_bind_threads(const uint64_t* masks, int32_t words, int32_t nodes, int32_t threads);

#ifdef __cplusplus
}
#endif
