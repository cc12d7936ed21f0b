// One step of a decoder: embedding, layers, logits, and the order of all operations between the linears.
#include "parts.h"

#include "../threads.h"
#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kLogitsOfPart = 8 << 10;

// Adds up the time of each part of a step, if the caller requests it.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t* parts) : parts_(parts), since_(parts ? minifloat::nanoseconds() : 0) {}

    // Adds the time since the last call to `part`.
    void lap(minifloat_step_part part) {
        if (parts_ == nullptr) return;
        const int64_t now = minifloat::nanoseconds();
        parts_[part] += now - since_;
        since_ = now;
    }

  private:
    int64_t* parts_;
    int64_t since_;
};

// Memory of a step, sized for its widest layer.
struct Buffers {
    float* x;               // [T, hidden], the residual stream
    float* kept;            // [R, hidden], the residual stream of the rows whose logits are requested
    float* turns;           // per rotary embedding [T, rotary]
    float* q;               // [T, heads * head_dim]
    int32_t* token_blocks;  // [T]
    uint8_t* normed;        // in the dtype: inputs of q, k, v and of gate and up
    uint8_t* wide;          // results of the products with `normed`
    uint8_t* narrow;        // inputs of the projections back to hidden
    uint8_t* y;             // results of these projections
    uint8_t* projected;     // in the dtype [T, layers * size]: the projection of the embedding to the inputs of layers
    float* sums;            // [2, T, hidden]: results of experts and of the MLP beside them, before their norms
    uint8_t* low;           // of latent attention: [T, q_rank], inputs of q_up
    uint8_t* heads;         // of latent attention: [heads, T], inputs and results of the products of each head
    int64_t* head_offsets;  // [heads + 1], the first row of each head
    int64_t* head_rows;     // [heads, T], the row of each token and head where tokens come first
    Routing routing;
};

// Divides a buffer into arrays; with a null buffer it only counts the bytes.
class Arena {
  public:
    explicit Arena(uint8_t* memory) : memory_(memory) {}

    template <class T>
    void take(T*& pointer, int64_t count, int64_t bytes = sizeof(T)) {
        pointer = reinterpret_cast<T*>(memory_ + used_);
        used_ += round_up(count * bytes, kVectorBytes);
    }
    int64_t used() const { return used_; }

  private:
    uint8_t* memory_;
    int64_t used_ = 0;
};

// The widest rows of any layer, in elements; rows of experts for each token.
struct Widths {
    int64_t q = 0, wide = 0, narrow = 0, turns = 0, experts = 0, rows = 1, sums = 0;
    int64_t low = 0, each_head = 0, latent_heads = 0;

    explicit Widths(const minifloat_decoder& d) {
        for (int32_t i = 0; i < d.rotary_count; ++i) turns += d.rotaries[i].rotary;
        for (int32_t i = 0; i < d.layer_count; ++i) add(d.layers[i]);
        if (d.inputs == nullptr) return;
        wide = max(wide, 2 * d.inputs->size);
        narrow = max(narrow, d.inputs->size);
    }

  private:
    void add(const minifloat_layer& layer) {
        if (layer.delta != nullptr) {
            wide = max(wide, delta_inputs(*layer.delta) + delta_gates(*layer.delta));
            narrow = max(narrow, delta_results(*layer.delta));
        }
        const minifloat_attention& attention = layer.attention;
        q = max(q, static_cast<int64_t>(attention.heads) * attention.head_dim);
        wide = max(wide, heads_of_product(attention) * attention.head_dim);
        narrow = max(narrow, static_cast<int64_t>(attention.heads) * attention.head_dim);
        wide = max(wide, 2 * layer.mlp.intermediate);
        narrow = max(narrow, layer.mlp.intermediate);
        if (attention.latent != nullptr) add(attention, *attention.latent);
        if (layer.experts == nullptr) return;
        const minifloat_experts& e = *layer.experts;
        wide = max(wide, 2 * e.intermediate * e.router.top_k);
        narrow = max(narrow, e.intermediate * e.router.top_k);
        rows = max<int64_t>(rows, e.router.top_k);
        experts = max<int64_t>(experts, e.router.experts);
        if (e.norms != nullptr) sums = 2;
    }

    void add(const minifloat_attention& attention, const minifloat_latent& latent) {
        const int64_t heads = attention.heads;
        wide = max(wide, max(low_width(attention) + attention.head_dim, heads * latent.rank));
        narrow = max(narrow, heads * max(query_width(attention), int64_t{latent.value_dim}));
        low = max(low, latent.q_rank);
        each_head = max(each_head, heads * max(latent.plain, latent.value_dim));
        latent_heads = max(latent_heads, heads);
    }
};

int64_t divide(const minifloat_step_args& a, uint8_t* memory, Buffers& b) {
    const minifloat_decoder& d = *a.decoder;
    const Widths widths(d);
    const int64_t tokens = max(a.token_count, a.logit_count), bytes = dtype_bytes(d.dtype);
    Arena arena(memory);
    arena.take(b.x, tokens * d.hidden);
    arena.take(b.kept, a.logit_count * d.hidden);
    arena.take(b.turns, tokens * widths.turns);
    arena.take(b.q, tokens * widths.q);
    arena.take(b.token_blocks, tokens);
    arena.take(b.normed, tokens * d.hidden, bytes);
    arena.take(b.wide, tokens * max(widths.wide, d.hidden), bytes);
    arena.take(b.narrow, tokens * widths.narrow, bytes);
    arena.take(b.y, max(tokens * widths.rows * d.hidden, a.logit_count * d.lm_head_rows), bytes);
    arena.take(b.projected, d.inputs == nullptr ? 0 : a.token_count * d.layer_count * d.inputs->size, bytes);
    arena.take(b.sums, widths.sums * tokens * d.hidden);
    if (widths.latent_heads > 0) {
        arena.take(b.low, tokens * widths.low, bytes);
        arena.take(b.heads, tokens * widths.each_head, bytes);
        arena.take(b.head_offsets, widths.latent_heads + 1);
        arena.take(b.head_rows, tokens * widths.latent_heads);
    }
    if (widths.experts > 0) {
        arena.take(b.routing.scores, tokens * 2 * round_up(widths.experts, kLanes));
        arena.take(b.routing.weights, tokens * widths.rows);
        arena.take(b.routing.chosen, tokens * widths.rows);
        arena.take(b.routing.offsets, widths.experts + 1);
        arena.take(b.routing.rows, tokens * widths.rows);
        arena.take(b.routing.place, tokens * widths.rows);
    }
    return arena.used();
}

class Step {
  public:
    Step(const minifloat_step_args& a, const Buffers& buffers)
        : a_(a), d_(*a.decoder), b_(buffers), watch_(a.nanoseconds), rows_(a.token_count) {}

    int32_t run() {
        begin();
        Result pending = {};  // what is not yet added to the residual stream
        for (int32_t i = 0; i < d_.layer_count; ++i) {
            const minifloat_layer& layer = d_.layers[i];
            add_and_norm_all(pending, layer.input_norm);
            layer.delta != nullptr ? delta(layer, i) : attention(layer, i);
            if (rows_ == 0) return status_;
            const Result attended = {b_.y, &layer.attention_norm, layer.residual_factor};
            if (layer.parallel) {
                if (layer.mlp_norm.weight != nullptr) add_and_norm_all({}, layer.mlp_norm);
                add_all(b_.x, attended, d_.dtype);
            } else {
                add_and_norm_all(attended, layer.mlp_norm);
            }
            pending = layer.experts == nullptr ? mlp(layer) : layer.experts->norms == nullptr ? experts(layer) : experts_and_mlp(layer);
            if (layer.input != nullptr || layer.scalar != 1.0f) pending = finish(layer, i, pending);
        }
        add_and_norm_all(pending, d_.norm);
        logits();
        return status_;
    }

  private:
    void begin() {
        int64_t turned = 0;
        for (int32_t i = 0; i < d_.rotary_count; ++i) turned += d_.rotaries[i].rotary;
        share(a_.threads, rows_, d_.hidden + 16 * turned, [&](int64_t begin, int64_t end) {
            embed(d_.embedding, d_.embedding_dtype, a_.tokens, d_.hidden, d_.embedding_factor, b_.x, begin, end);
            for (int32_t i = 0; i < d_.rotary_count; ++i)
                turns(a_.positions, d_.rotaries[i], turns_of(i), begin, end);
        });
        for (int32_t s = 0; s < a_.sequences; ++s) {
            const int32_t* table = a_.blocks + static_cast<int64_t>(s) * a_.block_columns;
            for (int32_t t = a_.starts[s]; t < a_.starts[s + 1]; ++t)
                b_.token_blocks[t] = table[a_.positions[t] / kBlockTokens];
        }
        watch_.lap(MINIFLOAT_STEP_ROWS);
        if (d_.inputs == nullptr) return;
        add_and_norm_all({}, {});
        multiply(d_.inputs->projection, b_.normed, d_.hidden, b_.projected, d_.layer_count * d_.inputs->size);
    }

    // The cosines and sines of a rotary embedding.
    float* turns_of(int32_t rotary) {
        float* at = b_.turns;
        for (int32_t i = 0; i < rotary; ++i) at += static_cast<int64_t>(a_.token_count) * d_.rotaries[i].rotary;
        return at;
    }

    void add_and_norm_all(const Result& result, const minifloat_norm& norm) {
        share(a_.threads, rows_, 2 * d_.hidden, [&](int64_t begin, int64_t end) {
            add_and_norm(b_.x, result, norm, d_.hidden, d_.dtype, b_.normed, begin, end);
        });
        watch_.lap(MINIFLOAT_STEP_ROWS);
    }

    // x += a result of `dtype`.
    void add_all(float* x, const Result& result, int32_t dtype) {
        share(a_.threads, rows_, d_.hidden, [&](int64_t begin, int64_t end) {
            add_result(x, result, d_.hidden, dtype, begin, end);
        });
        watch_.lap(MINIFLOAT_STEP_ROWS);
    }

    void fail(int32_t status) {
        if (status_ == MINIFLOAT_OK) status_ = status;
    }

    // Runs a product of rows of `cols` elements, whose weights, biases and rows `args` has.
    template <class Args>
    void multiply(int32_t (*product)(const Args&), Args& args, const uint8_t* x, int64_t cols, uint8_t* y, int64_t y_cols) {
        args.x = x;
        args.y = y;
        args.x_stride = cols;
        args.y_stride = y_cols;
        args.x_dtype = d_.dtype;
        args.threads = a_.threads;
        args.int8_inputs = d_.int8_inputs;
        args.batch_invariant = d_.batch_invariant;
        fail(product(args));
        watch_.lap(MINIFLOAT_STEP_LINEARS);
    }

    void multiply(const minifloat_product& p, const uint8_t* x, int64_t cols, uint8_t* y, int64_t y_cols) {
        minifloat_linear_args args = {};
        args.weights = p.weights;
        args.biases = p.biases;
        args.bias_dtype = p.bias_dtype;
        args.count = p.count;
        args.m = rows_;
        multiply(linear, args, x, cols, y, y_cols);
    }

    // Multiplies the given rows of x into y; if `rows` is null, row t of x.
    void multiply(const minifloat_experts& e, const minifloat_expert_product& p, const int64_t* rows, const uint8_t* x,
                  int64_t cols, uint8_t* y, int64_t y_cols) {
        minifloat_moe_args args = {};
        args.weights = p.weights;
        args.biases = p.biases;
        args.bias_dtype = p.bias_dtype;
        args.offsets = b_.routing.offsets;
        args.x_rows = rows;
        args.experts = e.router.experts;
        multiply(moe, args, x, cols, y, y_cols);
    }

    void attention(const minifloat_layer& layer, int64_t index) {
        const minifloat_attention& attention = layer.attention;
        const LayerCache cache = layer_cache(a_, attention);
        const int64_t heads = static_cast<int64_t>(attention.heads) * cache.value_dim;
        const float* turns = attention.rotary < 0 ? nullptr : turns_of(attention.rotary);
        if (attention.latent != nullptr) {
            latent_queries(attention, *attention.latent, cache, turns);
        } else {
            multiply(attention.qkv, b_.normed, d_.hidden, b_.wide, heads_of_product(attention) * attention.head_dim);
            write_tokens(a_, attention, cache, b_.wide, turns, b_.token_blocks, b_.q);
        }
        watch_.lap(MINIFLOAT_STEP_ROWS);
        if (is_last(index) && a_.logit_count == 0) {
            rows_ = 0;
            return;
        }
        fail(attend_all(a_, attention, cache, b_.q, b_.narrow));
        if (attention.gated) gate_results(a_, attention, b_.wide, b_.narrow);
        watch_.lap(MINIFLOAT_STEP_ATTENTION);
        project(layer, index, attention.out, heads);
    }

    void delta(const minifloat_layer& layer, int64_t index) {
        const minifloat_delta& delta = *layer.delta;
        uint8_t* gates = b_.wide + rows_ * delta_inputs(delta) * dtype_bytes(d_.dtype);
        multiply(delta.qkvz, b_.normed, d_.hidden, b_.wide, delta_inputs(delta));
        multiply(delta.ba, b_.normed, d_.hidden, gates, delta_gates(delta));
        fail(delta_all(a_, delta, b_.wide, gates, b_.narrow));
        watch_.lap(MINIFLOAT_STEP_ATTENTION);
        if (is_last(index) && a_.logit_count == 0) {
            rows_ = 0;
            return;
        }
        project(layer, index, delta.out, delta_results(delta));
    }

    bool is_last(int64_t index) const { return index + 1 == d_.layer_count; }

    // From the results of attention, `count` in a row, back to the residual stream.
    void project(const minifloat_layer& layer, int64_t index, const minifloat_product& out, int64_t count) {
        const uint8_t* attended = is_last(index) ? keep_rows_of_logits(count, layer.parallel != 0) : b_.narrow;
        if (layer.attention.latent != nullptr) {
            const minifloat_latent& latent = *layer.attention.latent;
            attended = values_of_heads(latent, layer.attention.heads, attended);
            count = layer.attention.heads * latent.value_dim;
        }
        multiply(out, attended, count, b_.y, d_.hidden);
    }

    // The queries of latent attention, and its keys into the cache.
    void latent_queries(const minifloat_attention& attention, const minifloat_latent& latent, const LayerCache& cache,
                        const float* turns) {
        const int64_t low = low_width(attention), width = low + attention.head_dim;
        const int64_t queries_width = attention.heads * query_width(attention);
        multiply(attention.qkv, b_.normed, d_.hidden, b_.wide, width);
        if (latent.q_rank > 0) {
            norm_low_queries(a_, latent, b_.wide, width, b_.low);
            watch_.lap(MINIFLOAT_STEP_ROWS);
            multiply(latent.q_up, b_.low, low, b_.narrow, queries_width);
        }
        write_latents(a_, attention, cache, b_.wide + low * dtype_bytes(d_.dtype), width,
                      latent.q_rank > 0 ? b_.narrow : b_.wide, latent.q_rank > 0 ? queries_width : width, turns,
                      b_.token_blocks, b_.heads, b_.q);
        watch_.lap(MINIFLOAT_STEP_ROWS);
        multiply_heads(latent.keys, attention.heads, nullptr, b_.heads, latent.plain, b_.narrow, latent.rank);
        add_products(a_, attention, b_.narrow, b_.q);
    }

    // The values [rows, heads, value_dim] of attended latents [rows, heads, rank].
    const uint8_t* values_of_heads(const minifloat_latent& latent, int64_t heads, const uint8_t* attended) {
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t t = 0; t < rows_; ++t) b_.head_rows[h * rows_ + t] = t * heads + h;
        multiply_heads(latent.values, heads, b_.head_rows, attended, latent.rank, b_.heads, latent.value_dim);
        if (rows_ == 1) return b_.heads;
        gather_heads(a_, b_.heads, heads, rows_, latent.value_dim, b_.narrow);
        watch_.lap(MINIFLOAT_STEP_ROWS);
        return b_.narrow;
    }

    // Multiplies the rows of each head, given or in order, with the weight of the head: y [heads, rows, y_cols].
    void multiply_heads(const uint8_t* const* weights, int64_t heads, const int64_t* rows, const uint8_t* x, int64_t cols,
                        uint8_t* y, int64_t y_cols) {
        for (int64_t h = 0; h <= heads; ++h) b_.head_offsets[h] = h * rows_;
        minifloat_moe_args args = {};
        args.weights = weights;
        args.offsets = b_.head_offsets;
        args.x_rows = rows;
        args.experts = static_cast<int32_t>(heads);
        multiply(moe, args, x, cols, y, y_cols);
    }

    // Keeps the rows whose logits are requested in the residual stream, and in the input of the MLP if that is the
    // input of attention; returns these rows of the results of attention.
    const uint8_t* keep_rows_of_logits(int64_t heads, bool with_input) {
        const int64_t row_bytes = heads * dtype_bytes(d_.dtype), input_bytes = d_.hidden * dtype_bytes(d_.dtype);
        for (int64_t i = 0; i < a_.logit_count; ++i) {
            const int64_t row = a_.logit_rows[i];
            __builtin_memcpy(b_.kept + i * d_.hidden, b_.x + row * d_.hidden, d_.hidden * sizeof(float));
            __builtin_memcpy(b_.wide + i * row_bytes, b_.narrow + row * row_bytes, row_bytes);
            if (with_input) __builtin_memcpy(b_.y + i * input_bytes, b_.normed + row * input_bytes, input_bytes);
        }
        if (with_input) __builtin_memcpy(b_.normed, b_.y, a_.logit_count * input_bytes);
        b_.x = b_.kept;
        rows_ = a_.logit_count;
        watch_.lap(MINIFLOAT_STEP_ROWS);
        return b_.wide;
    }

    Result mlp(const minifloat_layer& layer) {
        const minifloat_mlp& mlp = layer.mlp;
        const int64_t count = mlp.intermediate;
        multiply(mlp.gate_up, b_.normed, d_.hidden, b_.wide, (mlp.activation.gated ? 2 : 1) * count);
        activate_all(mlp.activation, count, rows_);
        multiply(mlp.down, b_.narrow, count, b_.y, d_.hidden);
        return {b_.y, &layer.result_norm, layer.residual_factor};
    }

    void activate_all(const minifloat_activation& activation, int64_t count, int64_t rows) {
        share(a_.threads, rows, 4 * count, [&](int64_t begin, int64_t end) {
            activate(activation, b_.wide, count, d_.dtype, b_.narrow, begin, end);
        });
        watch_.lap(MINIFLOAT_STEP_ROWS);
    }

    // The chosen experts' results, one row for each choice.
    void multiply_experts(const minifloat_experts& e) {
        const int64_t half = e.intermediate * dtype_bytes(d_.dtype);
        multiply(e, e.gate, b_.routing.rows, b_.normed, d_.hidden, b_.wide, 2 * e.intermediate);
        if (e.up.weights != nullptr)
            multiply(e, e.up, b_.routing.rows, b_.normed, d_.hidden, b_.wide + half, 2 * e.intermediate);
        activate_all(e.activation, e.intermediate, rows_ * e.router.top_k);
        multiply(e, e.down, nullptr, b_.narrow, e.intermediate, b_.y, d_.hidden);
    }

    // Adds to the residual stream itself.
    Result experts(const minifloat_layer& layer) {
        const minifloat_experts& e = *layer.experts;
        const float factor = layer.residual_factor;
        fail(choose_experts(e.router, b_.normed, d_.dtype, d_.hidden, rows_, a_.threads, b_.routing));
        watch_.lap(MINIFLOAT_STEP_ROWS);
        if (status_ != MINIFLOAT_OK) return {};
        multiply_experts(e);
        add_experts(e.router, b_.routing, b_.y, d_.dtype, d_.hidden, rows_, a_.threads, factor, b_.x);
        watch_.lap(MINIFLOAT_STEP_ROWS);
        if (layer.mlp.intermediate > 0) {
            mlp(layer);
            add_shared(e.shared_gate, b_.normed, b_.y, d_.dtype, d_.hidden, rows_, a_.threads, factor, b_.x);
            watch_.lap(MINIFLOAT_STEP_ROWS);
        }
        return {};
    }

    // Experts and an MLP with norms of their own; adds to the residual stream itself.
    Result experts_and_mlp(const minifloat_layer& layer) {
        const minifloat_experts& e = *layer.experts;
        const minifloat_expert_norms& norms = *e.norms;
        const int64_t count = rows_ * d_.hidden;
        float* sum = b_.sums + count;
        __builtin_memset(b_.sums, 0, 2 * count * sizeof(float));
        mlp(layer);
        add_all(b_.sums, {b_.y, &norms.mlp, 1.0f}, d_.dtype);
        add_and_norm_all({}, norms.router);
        fail(choose_experts(e.router, b_.normed, d_.dtype, d_.hidden, rows_, a_.threads, b_.routing));
        if (status_ != MINIFLOAT_OK) return {};
        add_and_norm_all({}, norms.input);
        multiply_experts(e);
        add_experts(e.router, b_.routing, b_.y, d_.dtype, d_.hidden, rows_, a_.threads, 1.0f, sum);
        add_all(b_.sums, {reinterpret_cast<const uint8_t*>(sum), &norms.experts, 1.0f}, MINIFLOAT_F32);
        const Result both = {reinterpret_cast<const uint8_t*>(b_.sums), &layer.result_norm, layer.residual_factor};
        add_all(b_.x, both, MINIFLOAT_F32);
        return {};
    }

    // Adds what is pending and the layer's input, and multiplies the residual stream.
    Result finish(const minifloat_layer& layer, int64_t index, const Result& pending) {
        if (layer.input == nullptr) {
            add_all(b_.x, pending, d_.dtype);
        } else {
            const int64_t size = d_.inputs->size;
            add_and_norm_all(pending, {});
            multiply(layer.input->gate, b_.normed, d_.hidden, b_.wide, 2 * size);
            const int32_t* rows = index + 1 == d_.layer_count ? a_.logit_rows : nullptr;
            share(a_.threads, rows_, 4 * size, [&](int64_t begin, int64_t end) {
                write_layer_inputs(a_, index, rows, b_.projected, b_.wide, begin, end);
            });
            activate_all(layer.input->activation, size, rows_);
            multiply(layer.input->out, b_.narrow, size, b_.y, d_.hidden);
            add_all(b_.x, {b_.y, &layer.input->norm, 1.0f}, d_.dtype);
        }
        if (layer.scalar != 1.0f) scale_and_cap(b_.x, rows_ * d_.hidden, layer.scalar, 0.0f);
        watch_.lap(MINIFLOAT_STEP_ROWS);
        return {};
    }

    void logits() {
        const int64_t row_bytes = d_.lm_head_rows * dtype_bytes(d_.dtype);
        const bool exact = d_.dtype == MINIFLOAT_F32, scaled = d_.logits_factor != 1.0f || d_.logits_cap > 0.0f;
        multiply(d_.lm_head, b_.normed, d_.hidden, exact ? reinterpret_cast<uint8_t*>(a_.logits) : b_.y, d_.lm_head_rows);
        if (exact && !scaled) return;
        const int64_t parts = ceil_div(d_.lm_head_rows, kLogitsOfPart);
        share(a_.threads, rows_ * parts, kLogitsOfPart, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = i / parts, from = i % parts * kLogitsOfPart;
                const int64_t count = min(kLogitsOfPart, d_.lm_head_rows - from);
                float* logits = a_.logits + row * d_.lm_head_rows + from;
                if (!exact) to_float(b_.y + row * row_bytes + from * dtype_bytes(d_.dtype), d_.dtype, count, logits);
                if (scaled) scale_and_cap(logits, count, d_.logits_factor, d_.logits_cap);
            }
        });
        watch_.lap(MINIFLOAT_STEP_ROWS);
    }

    const minifloat_step_args& a_;
    const minifloat_decoder& d_;
    Buffers b_;
    Stopwatch watch_;
    int64_t rows_;  // tokens; in the last layer, those whose logits are requested
    int32_t status_ = MINIFLOAT_OK;
};

}  // namespace

int32_t step(const minifloat_step_args& a) {
    Buffers buffers = {};
    void* memory = minifloat::scratch(minifloat::kScratchStep, divide(a, nullptr, buffers));
    if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
    divide(a, static_cast<uint8_t*>(memory), buffers);
    return Step(a, buffers).run();
}

}  // namespace MINIFLOAT_ISA
