// Cuts the attention of a step into tiles (attend.h) and distributes them to the threads. The cuts depend on the
// positions of keys alone: the bits depend neither on the number of threads, nor on the rest of the batch, nor on how
// many tokens of the sequence the step has (with AMX tiles: on the last).
#include "parts.h"

#include "../threads.h"
#include "attend.h"
#include "rows.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int64_t kRangeBlocks = 32;
constexpr int64_t kProductsPerThread = 256 << 10;  // some microseconds

// A tile, or a range of keys of a tile.
struct Piece {
    int32_t sequence, head;
    int64_t row;         // of the sequence, [token, head of the group]
    int64_t begin, end;  // blocks
    float* partial;      // where the sums of the range go; null for a whole tile
    int64_t ranges;      // of the tile, in the first piece of it; else 0
};

struct Work {
    const minifloat_step_args& a;
    const minifloat_attention& layer;
    const LayerCache& cache;
    const float* q;
    uint8_t* out;
    int64_t group;
    Piece* pieces;
    int64_t count;
    int64_t products;
    uint8_t* turned;  // of a latent cache: turned_bytes() for each thread
};

int64_t rows_of(const Work& work, int32_t s) { return (work.a.starts[s + 1] - work.a.starts[s]) * work.group; }
int64_t tile_rows(const Work& work, const Piece& piece) {
    return min<int64_t>(kQueryRows, rows_of(work, piece.sequence) - piece.row);
}
int64_t turned_bytes(const Work& work) {
    const LayerCache& cache = work.cache;
    return cache.latent ? kLatentBlocks * kBlockTokens * int64_t{cache.padded_dim} * element_bytes(cache.element) : 0;
}
int64_t partial_floats(const Work& work) { return kQueryRows * (work.cache.padded_dim + int64_t{2}); }

int64_t last_key(const Work& work, int32_t s, int64_t row) {
    return work.a.positions[work.a.starts[s] + row / work.group] + int64_t{1};
}
int64_t first_key(const Work& work, int32_t s, int64_t row) {
    return work.layer.window > 0 ? max<int64_t>(0, last_key(work, s, row) - work.layer.window) : 0;
}

int64_t end_of_range(int64_t block) { return (block / kRangeBlocks + 1) * kRangeBlocks; }

// Writes the pieces of a sequence for one head; only counts them if there is no memory yet.
void cut(Work& work, int32_t s, int32_t head, float*& partials) {
    const int64_t rows = rows_of(work, s);
    for (int64_t row = 0; row < rows; row += kQueryRows) {
        const int64_t last_row = min(row + kQueryRows, rows) - 1;
        const int64_t begin = first_key(work, s, row) / kBlockTokens;
        const int64_t end = ceil_div(last_key(work, s, last_row), kBlockTokens);
        const int64_t ranges = rows <= kQueryRows ? ceil_div(end, kRangeBlocks) - begin / kRangeBlocks : 1;
        work.products += (end - begin) * kBlockTokens * (last_row + 1 - row) * work.cache.head_dim * 2;
        for (int64_t i = 0; i < ranges; ++i) {
            const int64_t from = i == 0 ? begin : (begin / kRangeBlocks + i) * kRangeBlocks;
            const int64_t to = i + 1 == ranges ? end : end_of_range(from);
            if (work.pieces != nullptr)
                work.pieces[work.count] = {s, head, row, from, to, ranges > 1 ? partials : nullptr, i == 0 ? ranges : 0};
            if (ranges > 1 && work.pieces != nullptr) partials += partial_floats(work);
            ++work.count;
        }
    }
}

void cut(Work& work, float* partials) {
    work.count = work.products = 0;
    for (int32_t s = 0; s < work.a.sequences; ++s)
        for (int32_t head = 0; head < work.layer.kv_heads; ++head) cut(work, s, head, partials);
}

Tile tile_of(const Work& work, const Piece& piece) {
    const minifloat_attention& d = work.layer;
    Tile tile = {};
    tile.rows = static_cast<int>(tile_rows(work, piece));
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t row = piece.row + r;
        const int64_t token = work.a.starts[piece.sequence] + row / work.group;
        const int64_t head = piece.head * work.group + row % work.group;
        tile.q[r] = work.q + (token * d.heads + head) * d.head_dim;
        tile.first_key[r] = first_key(work, piece.sequence, row);
        tile.last_key[r] = last_key(work, piece.sequence, row);
    }
    tile.blocks = work.a.blocks + static_cast<int64_t>(piece.sequence) * work.a.block_columns;
    tile.head = piece.head;
    const float key_scale = work.cache.element == MINIFLOAT_CACHE_E4M3 ? work.layer.k_scale : 1.0f;
    tile.score_factor = d.scale * key_scale * element_factor(work.cache.element);
    tile.score_cap = d.score_cap;
    return tile;
}

// What the sums of a row are multiplied by: one over their weights and that of the sink of its head.
float share_beside_sink(const minifloat_attention& attention, int64_t head, float largest, float total) {
    const float sink = attention.sinks[head], most = max(sink, largest);
    const float shrink = exp(broadcast(largest - most))[0];
    return shrink / (total * shrink + exp(broadcast(sink - most))[0]);
}

// Divides the sums of a tile by their weights; `values` is scratch.
void finish(const Work& work, const Piece& piece, Sums& sums) {
    const minifloat_attention& d = work.layer;
    const int32_t dtype = work.a.decoder->dtype;
    const float stored_scale = work.cache.latent ? d.k_scale : d.v_scale;
    const float value_scale = work.cache.element == MINIFLOAT_CACHE_E4M3 ? stored_scale : 1.0f;
    const float factor = value_scale * element_factor(work.cache.element);
    for (int64_t r = 0; r < tile_rows(work, piece); ++r) {
        const int64_t row = piece.row + r;
        const int64_t token = work.a.starts[piece.sequence] + row / work.group;
        const int64_t head = piece.head * work.group + row % work.group;
        const float scale = d.sinks == nullptr ? factor / sums.total[r]
                                               : factor * share_beside_sink(d, head, sums.largest[r], sums.total[r]);
        for (int i = 0; i < work.cache.padded_dim; ++i) sums.values[r][i] *= scale;
        const int64_t dims = work.cache.value_dim;
        from_float(sums.values[r], dtype, dims, work.out + (token * d.heads + head) * dims * dtype_bytes(dtype));
    }
}

void keep(const Work& work, const Piece& piece, const Sums& sums) {
    float* out = piece.partial;
    for (int64_t r = 0; r < tile_rows(work, piece); ++r, out += work.cache.padded_dim + 2) {
        out[0] = sums.largest[r];
        out[1] = sums.total[r];
        __builtin_memcpy(out + 2, sums.values[r], work.cache.padded_dim * sizeof(float));
    }
}

// Adds the sums of a row over a range to other sums, both rescaled to the larger of their largest scores. Not inlined:
// all callers get the same bits.
__attribute__((noinline)) void merge_row(float largest_there, float total_there, const float* values, int padded_dim,
                                         Sums& sums, int64_t r) {
    const float largest = max(largest_there, sums.largest[r]);
    const float reference = largest == minus_infinity() ? 0.0f : largest;
    const float ours = exp(broadcast(sums.largest[r] - reference))[0];
    const float theirs = exp(broadcast(largest_there - reference))[0];
    sums.largest[r] = largest;
    sums.total[r] = sums.total[r] * ours + total_there * theirs;
    for (int i = 0; i < padded_dim; ++i) sums.values[r][i] = sums.values[r][i] * ours + values[i] * theirs;
}

void merge(const Work& work, const Piece& piece, Sums& sums) {
    const float* from = piece.partial;
    for (int64_t r = 0; r < tile_rows(work, piece); ++r, from += work.cache.padded_dim + 2)
        merge_row(from[0], from[1], from + 2, work.cache.padded_dim, sums, r);
}

// Adds blocks begin .. end - 1 of a tile, which are within a range, to cleared sums.
void attend_range(const Work& work, const Tile& tile, int64_t begin, int64_t end, Sums& sums) {
    clear(sums, tile.rows, work.cache.padded_dim);
    attend(tile, work.cache, work.a.decoder->dtype, begin, end, sums);
}

void run_piece(const Work& work, const Piece& piece, int thread) {
    Sums sums;
    Tile tile = tile_of(work, piece);
    tile.turned = work.turned + thread * turned_bytes(work);
    int64_t end = min(piece.end, end_of_range(piece.begin));
    attend_range(work, tile, piece.begin, end, sums);
    if (piece.partial != nullptr) return keep(work, piece, sums);
    while (end < piece.end) {
        const int64_t begin = end;
        end = min(piece.end, end_of_range(begin));
        Sums next;
        attend_range(work, tile, begin, end, next);
        for (int r = 0; r < tile.rows; ++r)
            merge_row(next.largest[r], next.total[r], next.values[r], work.cache.padded_dim, sums, r);
    }
    finish(work, piece, sums);
}

void merge_ranges(const Work& work, const Piece* first) {
    Sums sums;
    clear(sums, static_cast<int>(tile_rows(work, *first)), work.cache.padded_dim);
    for (int64_t i = 0; i < first->ranges; ++i) merge(work, first[i], sums);
    finish(work, *first, sums);
}

void run(const Work& work) {
    const int64_t worth = min(work.products / kProductsPerThread, work.count);
    const int threads = static_cast<int>(max<int64_t>(1, min<int64_t>(work.a.threads, worth)));
    minifloat::Schedule schedule;
    minifloat::Barrier barrier;
    schedule.reset(work.count, min(threads, int{minifloat::Schedule::kMaxThreads}));
    minifloat::parallel(threads, [&](int thread, int count) {
        for (int64_t i = schedule.next(thread); i >= 0; i = schedule.next(thread)) run_piece(work, work.pieces[i], thread);
        barrier.wait(count);
        for (int64_t i = thread; i < work.count; i += count)
            if (work.pieces[i].ranges > 1) merge_ranges(work, work.pieces + i);
    });
}

// A norm of the heads of q or of k; `heads` of them follow each other in a row.
struct HeadNorm {
    const minifloat_attention& attention;
    const minifloat_norm& norm;
    int32_t heads, apart;  // `apart`: heads of a row from one to the next
    const float* turn;

    // The moments of all heads of a row, if the norm is of all.
    Moments of_row(const uint8_t* row, int32_t dtype) const {
        if (norm.weight == nullptr || !attention.whole_norms) return {};
        return moments(norm, row, dtype, static_cast<int64_t>(heads) * attention.head_dim);
    }

    // Reads head h of a row as float32, clipped, normed and rotated where required.
    void prepare(const uint8_t* row, int32_t h, const Moments& whole, const minifloat_decoder& d, float* out) const {
        const int64_t dims = attention.head_dim;
        const uint8_t* from = row + h * apart * dims * dtype_bytes(d.dtype);
        to_float(from, d.dtype, dims, out);
        if (attention.clip > 0.0f) clip(out, dims, attention.clip);
        if (norm.weight != nullptr) {
            const bool own = attention.whole_norms || attention.head_weights;
            const Moments known = attention.whole_norms
                                      ? whole
                                      : moments(norm, reinterpret_cast<const uint8_t*>(out), MINIFLOAT_F32, dims);
            norm_part(out, norm, known, own ? h * dims : 0, dims);
        }
        if (attention.rotary >= 0) rotate(out, turn, d.rotaries[attention.rotary]);
    }
};

// Reads a head of a row of values.
void prepare_values(const minifloat_attention& attention, const uint8_t* from, int32_t dtype, float* out) {
    to_float(from, dtype, attention.head_dim, out);
    if (attention.clip > 0.0f) clip(out, attention.head_dim, attention.clip);
    if (attention.v_norm.weight == nullptr) return;
    const uint8_t* row = reinterpret_cast<const uint8_t*>(out);
    norm_part(out, attention.v_norm, moments(attention.v_norm, row, MINIFLOAT_F32, attention.head_dim), 0,
              attention.head_dim);
}

}  // namespace

void write_tokens(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                  const uint8_t* qkv, const float* turns, const int32_t* token_blocks, float* q) {
    const minifloat_decoder& d = *a.decoder;
    const int32_t rotary = attention.rotary < 0 ? 0 : d.rotaries[attention.rotary].rotary;
    const int64_t head_bytes = static_cast<int64_t>(attention.head_dim) * dtype_bytes(d.dtype);
    const int64_t heads = heads_of_product(attention);
    const int32_t values_at = attention.values == MINIFLOAT_VALUES_OWN ? attention.kv_heads : 0;
    const int32_t written = attention.values == MINIFLOAT_VALUES_SHARED ? 0 : attention.kv_heads;
    share(a.threads, a.token_count, heads * attention.head_dim * 4, [&](int64_t begin, int64_t end) {
        alignas(64) float keys[MINIFLOAT_MAX_HEAD_DIM], values[MINIFLOAT_MAX_HEAD_DIM];
        alignas(64) uint8_t rounded[MINIFLOAT_MAX_HEAD_DIM * 4];
        for (int64_t t = begin; t < end; ++t) {
            const uint8_t* row = qkv + t * heads * head_bytes;
            const float* turn = turns + t * rotary;
            const HeadNorm queries = {attention, attention.q_norm, attention.heads, attention.gated ? 2 : 1, turn};
            const Moments of_queries = queries.of_row(row, d.dtype);
            for (int32_t h = 0; h < attention.heads; ++h) {
                float* to = q + (t * attention.heads + h) * attention.head_dim;
                queries.prepare(row, h, of_queries, d, to);
                from_float(to, d.dtype, attention.head_dim, rounded);
                to_float(rounded, d.dtype, attention.head_dim, to);
            }
            if (written == 0) continue;
            row += heads_of_queries(attention) * head_bytes;
            const HeadNorm own = {attention, attention.k_norm, attention.kv_heads, 1, turn};
            const Moments of_keys = own.of_row(row, d.dtype);
            for (int32_t h = 0; h < written; ++h) {
                own.prepare(row, h, of_keys, d, keys);
                prepare_values(attention, row + (values_at + h) * head_bytes, d.dtype, values);
                write_token(cache, cache.head(token_blocks[t], h), a.positions[t] % kBlockTokens, keys, values,
                            attention.k_scale, attention.v_scale);
            }
        }
    });
}

int32_t attend_all(const minifloat_step_args& a, const minifloat_attention& attention, const LayerCache& cache,
                   const float* q, uint8_t* out) {
    Work work = {a, attention, cache, q, out, attention.heads / attention.kv_heads, nullptr, 0, 0, nullptr};
    cut(work, nullptr);
    const int64_t piece_bytes = round_up(work.count * static_cast<int64_t>(sizeof(Piece)), kVectorBytes);
    const int64_t partial_bytes = work.count * partial_floats(work) * static_cast<int64_t>(sizeof(float));
    const int64_t turned_at = round_up(piece_bytes + partial_bytes, kVectorBytes);
    const int64_t bytes = turned_at + a.threads * turned_bytes(work);
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchCall, bytes));
    if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
    work.pieces = reinterpret_cast<Piece*>(memory);
    work.turned = memory + turned_at;
    cut(work, reinterpret_cast<float*>(memory + piece_bytes));
    run(work);
    return MINIFLOAT_OK;
}

void gate_results(const minifloat_step_args& a, const minifloat_attention& attention, const uint8_t* qkv, uint8_t* out) {
    const int32_t dtype = a.decoder->dtype;
    const int64_t dims = attention.head_dim, head_bytes = dims * dtype_bytes(dtype);
    share(a.threads, a.token_count, 4 * attention.heads * dims, [&](int64_t begin, int64_t end) {
        alignas(64) float gates[MINIFLOAT_MAX_HEAD_DIM], results[MINIFLOAT_MAX_HEAD_DIM];
        for (int64_t i = begin * attention.heads; i < end * attention.heads; ++i) {
            const int64_t t = i / attention.heads, h = i % attention.heads;
            to_float(qkv + (t * heads_of_product(attention) + 2 * h + 1) * head_bytes, dtype, dims, gates);
            to_float(out + i * head_bytes, dtype, dims, results);
            multiply_by_sigmoid(results, gates, dims);
            from_float(results, dtype, dims, out + i * head_bytes);
        }
    });
}

}  // namespace MINIFLOAT_ISA
