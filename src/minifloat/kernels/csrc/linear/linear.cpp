// The driver: validates, chooses the path, and distributes the panels of all weights of a call to the threads. A panel
// is computed by one thread from its first column to its last, so the bits do not depend on the number of threads.
#include "../threads.h"
#include "convert.h"
#include "cut.h"
#include "path.h"

namespace MINIFLOAT_ISA {
namespace {

// Bytes of weights: the amount that is worth an additional thread, and the size of a piece of work.
constexpr int64_t kBytesPerThread = 32 << 10;
constexpr int64_t kBytesPerPiece = 1 << 20;
// With small pieces the other threads wait less for a delayed thread (1 to 2% at M = 1). Paths that multiply several
// panels per call get larger pieces: with two panels instead of eight they take a third longer.
constexpr int kPiecesPerThread = 32;
constexpr int kLargePiecesPerThread = 4;
constexpr int64_t kSmallPiecePanels = 2;
// Bytes of prepared input up to which the calling thread prepares alone, which is faster than a barrier of all threads.
constexpr int64_t kBytesAlone = 64 << 10;
// Threads up to which each prepares all rows of x in its own cache, where a path has cached_rows; with more, this would
// take as long as the product. The memory is at least one 2 MB page.
constexpr int32_t kMostOwnThreads = 4;
constexpr int64_t kLeastOwnBytes = 2 << 20;
// Bytes of prepared input per wave of experts, about the size of the caches, so that scratch memory does not grow with
// the number of tokens.
constexpr int64_t kBytesPerWave = 16 << 20;

// One product: rows of x times one weight.
struct Job {
    Weight weight;
    Input x;
    Output y;
    const Path* path;
    uint8_t* prepared;     // null: each thread prepares its own
    bool prepares;         // whether this job prepares the input, or shares the input of another job
    int64_t piece_panels;
};

struct Call {
    Job* jobs;
    int64_t count;
    int64_t prepared_bytes;
    int64_t own_bytes;  // of prepared input of each thread
    Pieces pieces;
};

// `rows` rows of x as ranges of about `length` rows, whole pairs of tiles.
struct Ranges {
    static constexpr int64_t kPairRows = 2 * kTileRows;
    int64_t rows, pairs, count;

    Ranges(int64_t m, int64_t length)
        : rows(m), pairs(ceil_div(m, kPairRows)), count(max<int64_t>(1, (m + length / 2) / length)) {}

    int64_t begin(int64_t range) const { return min(rows, pairs * range / count * kPairRows); }
    int64_t longest() const { return min(rows, ceil_div(pairs, count) * kPairRows); }
};

int64_t align(int64_t bytes) { return round_up(bytes, kVectorBytes); }

// Cuts the work into pieces, for as many threads as it is worth. All threads of a team that spans NUMA nodes take part:
// the first of them would be on the first node.
void cut(Call& call, int threads) {
    int64_t work = 0;
    for (int64_t i = 0; i < call.count; ++i) {
        const Job& job = call.jobs[i];
        work += job.weight.panels * job.weight.panel_bytes * (1 + job.x.m / 8);
    }
    int64_t worth = work / kBytesPerThread;
    if (worth > 1 && minifloat::spans_nodes()) worth = threads;
    const int team = static_cast<int>(max<int64_t>(1, min<int64_t>(threads, worth)));
    call.pieces = {min(team, int{minifloat::Schedule::kMaxThreads}), call.count, 1};
    for (int64_t i = 0; i < call.count; ++i) {
        Job& job = call.jobs[i];
        const Weight& w = job.weight;
        const int64_t by_size = max(kBytesPerPiece / w.panel_bytes, job.path->piece_panels);
        const bool small = job.path->piece_panels <= kSmallPiecePanels;
        const int pieces = call.pieces.threads * (small ? kPiecesPerThread : kLargePiecesPerThread);
        const int64_t by_count = w.panels * call.count / pieces;
        job.piece_panels = max(small ? job.path->piece_panels : 1, min(by_size, by_count));
        // Whole groups of panels, of which more threads get equally many.
        if (job.piece_panels > job.path->piece_panels) job.piece_panels -= job.piece_panels % job.path->piece_panels;
        const int64_t most = 2 * ceil_div(ceil_div(w.panels, 2), call.pieces.threads);  // panels of a thread
        call.pieces.per_job = max(call.pieces.per_job, ceil_div(most, job.piece_panels));
    }
}

// The input that a thread has prepared for itself.
struct Own {
    uint8_t* memory;
    const uint8_t* x;
};

bool run_piece(const Call& call, int64_t piece, Own& own) {
    const Job& job = call.jobs[call.pieces.job(piece)];
    const Panels panels = call.pieces.panels_of_piece(piece, job.weight.panels, job.piece_panels);
    if (panels.first == panels.last) return true;
    if (job.prepared == nullptr && own.x != job.x.data) {
        job.path->prepare(job.weight, job.x, own.memory, 0, 1);
        own.x = job.x.data;
    }
    const uint8_t* prepared = job.prepared == nullptr ? own.memory : job.prepared;
    return job.path->multiply(job.weight, job.x, prepared, job.y, panels.first, panels.last);
}

void prepare(const Call& call, int part, int parts) {
    for (int64_t i = 0; i < call.count; ++i) {
        const Job& job = call.jobs[i];
        if (job.prepares) job.path->prepare(job.weight, job.x, job.prepared, part, parts);
    }
}

int32_t run(Call& call, int threads) {
    cut(call, threads);
    minifloat::Schedule schedule;
    minifloat::Barrier barrier;
    const bool alone = call.prepared_bytes <= kBytesAlone;
    if (alone) minifloat::parallel(1, [&](int, int) { prepare(call, 0, 1); });  // in the environment of the threads
    schedule.reset(call.pieces.count(), call.pieces.threads);
    int32_t failed = 0;
    minifloat::parallel(call.pieces.threads, [&](int thread, int count) {
        if (!alone) {
            prepare(call, thread, count);
            barrier.wait(count);
        }
        Own own = {nullptr, nullptr};
        if (call.own_bytes > 0) {
            own.memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchInput, call.own_bytes));
            if (own.memory == nullptr) {
                __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
                return;
            }
        }
        for (int64_t piece = schedule.next(thread); piece >= 0; piece = schedule.next(thread))
            if (!run_piece(call, piece, own)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    });
    return failed ? MINIFLOAT_NO_MEMORY : MINIFLOAT_OK;
}

// Whether two weights can be multiplied with the same prepared input.
bool alike(const Header& a, const Header& b) {
    return a.element == b.element && a.grid == b.grid && a.cols == b.cols;
}

// Checks the weights against each other; all must be of one format and have one number of columns.
int32_t check(const uint8_t* const* weights, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (!readable(weights[i])) return MINIFLOAT_BAD_WEIGHT;
        const Header& h = *reinterpret_cast<const Header*>(weights[i]);
        const Header& first = *reinterpret_cast<const Header*>(weights[0]);
        if (!alike(h, first)) return MINIFLOAT_BAD_WEIGHT;
    }
    return MINIFLOAT_OK;
}

Weight view_of(const uint8_t* packed) { return view(*reinterpret_cast<const Header*>(packed)); }

template <class Args>
Allowed allowed_by(const Args& a) {
    return {a.int8_inputs != 0, a.int8_inputs != MINIFLOAT_INT8_WITHOUT_AVX_VNNI, a.batch_invariant != 0};
}

int64_t rows_of(const minifloat_moe_args& a, int32_t e) { return a.offsets[e + 1] - a.offsets[e]; }

int64_t prepared_bytes(const minifloat_moe_args& a, int32_t e) {
    const int64_t m = rows_of(a, e);
    if (m == 0) return 0;
    const Weight w = view_of(a.weights[e]);
    return align(choose_path(w, m, a.x_dtype, allowed_by(a)).prepared_bytes(w, m, a.x_dtype));
}

// Checks the experts that have rows; looking at the others would cost a cache miss each.
int32_t check(const minifloat_moe_args& a) {
    const Header* first = nullptr;
    for (int32_t e = 0; e < a.experts; ++e) {
        if (rows_of(a, e) < 0) return MINIFLOAT_BAD_ARGUMENT;
        if (rows_of(a, e) == 0) continue;
        if (!readable(a.weights[e])) return MINIFLOAT_BAD_WEIGHT;
        const Header& h = *reinterpret_cast<const Header*>(a.weights[e]);
        if (first == nullptr) first = &h;
        if (!alike(h, *first)) return MINIFLOAT_BAD_WEIGHT;
        if (h.rows != first->rows) return MINIFLOAT_BAD_ARGUMENT;
    }
    return MINIFLOAT_OK;
}

bool same_input(const Input& a, const Input& b) {
    if (a.m != b.m || a.rows == nullptr || b.rows == nullptr) return false;
    return __builtin_memcmp(a.rows, b.rows, static_cast<uint64_t>(a.m) * sizeof *a.rows) == 0;
}

// The products of experts begin .. end - 1, whose prepared input takes at most `bytes`.
int32_t run_wave(const minifloat_moe_args& a, int32_t begin, int32_t end, int64_t bytes) {
    const int64_t job_bytes = align((end - begin) * static_cast<int64_t>(sizeof(Job)));
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchCall, job_bytes + bytes));
    if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
    Call call = {reinterpret_cast<Job*>(memory), 0, 0, 0, {}};
    memory += job_bytes;
    const int size = dtype_bytes(a.x_dtype);
    const int64_t x_stride = a.x_stride * size, y_stride = a.y_stride * size;
    for (int32_t e = begin; e < end; ++e) {
        const int64_t row = a.offsets[e], m = rows_of(a, e);
        if (m == 0) continue;
        const Weight w = view_of(a.weights[e]);
        const uint8_t* x = static_cast<const uint8_t*>(a.x) + (a.x_rows ? 0 : row * x_stride);
        const Input in = {x, x_stride, a.x_dtype, a.x_rows ? a.x_rows + row : nullptr, m};
        const uint8_t* bias = a.biases ? static_cast<const uint8_t*>(a.biases[e]) : nullptr;
        const Output out = {static_cast<uint8_t*>(a.y) + row * y_stride, y_stride, a.x_dtype, bias, a.bias_dtype};
        const Job* before = call.count > 0 ? &call.jobs[call.count - 1] : nullptr;
        const bool shares = before != nullptr && same_input(before->x, in);  // all experts of a single token do
        uint8_t* prepared = shares ? before->prepared : memory + call.prepared_bytes;
        if (!shares) call.prepared_bytes += prepared_bytes(a, e);
        const Path& path = choose_path(w, m, a.x_dtype, allowed_by(a));
        call.jobs[call.count++] = {w, in, out, &path, prepared, !shares, 0};
    }
    return call.count == 0 ? static_cast<int32_t>(MINIFLOAT_OK) : run(call, a.threads);
}

}  // namespace

int32_t linear(const minifloat_linear_args& a) {
    const int32_t status = check(a.weights, a.count);
    if (status != MINIFLOAT_OK || a.m == 0) return status;
    const Weight first = view_of(a.weights[0]);
    const Path& path = choose_path(first, a.m, a.x_dtype, allowed_by(a));
    const int64_t cached_rows = path.cached_rows ? path.cached_rows(first, a.x_dtype) : 0;
    const bool own = cached_rows > 0 && a.threads <= kMostOwnThreads;
    const Ranges ranges(a.m, own ? cached_rows : a.m);
    const int64_t prepared = align(path.prepared_bytes(first, ranges.longest(), a.x_dtype));
    Call call = {nullptr, 0, own ? 0 : prepared, own ? max(prepared, kLeastOwnBytes) : 0, {}};
    const int64_t job_bytes = align(ranges.count * a.count * static_cast<int64_t>(sizeof(Job)));
    const int64_t bytes_needed = job_bytes + call.prepared_bytes;
    uint8_t* memory = static_cast<uint8_t*>(minifloat::scratch(minifloat::kScratchCall, bytes_needed));
    if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
    call.jobs = reinterpret_cast<Job*>(memory);
    const int bytes = dtype_bytes(a.x_dtype);
    const int64_t x_stride = a.x_stride * bytes, y_stride = a.y_stride * bytes;
    for (int64_t r = 0; r < ranges.count; ++r) {
        const int64_t row = ranges.begin(r);
        const uint8_t* from = static_cast<const uint8_t*>(a.x) + row * x_stride;
        const Input x = {from, x_stride, a.x_dtype, nullptr, ranges.begin(r + 1) - row};
        uint8_t* y = static_cast<uint8_t*>(a.y) + row * y_stride;
        for (int32_t i = 0; i < a.count; ++i) {
            const Weight w = view_of(a.weights[i]);
            const uint8_t* bias = a.biases ? static_cast<const uint8_t*>(a.biases[i]) : nullptr;
            const Output out = {y, y_stride, a.x_dtype, bias, a.bias_dtype};
            call.jobs[call.count++] = {w, x, out, &path, own ? nullptr : memory + job_bytes, !own && i == 0, 0};
            y += w.rows * bytes;
        }
    }
    return run(call, a.threads);
}

bool rounds_inputs(const uint8_t* weight, int64_t m, int32_t) {
    return readable(weight) && choose_int8_path(view_of(weight), m, {true, true, false}) != nullptr;
}

int32_t moe(const minifloat_moe_args& a) {
    const int32_t status = check(a);
    if (status != MINIFLOAT_OK) return status;
    for (int32_t begin = 0; begin < a.experts;) {
        int32_t end = begin;
        int64_t bytes = 0;
        do bytes += prepared_bytes(a, end++);
        while (end < a.experts && bytes + prepared_bytes(a, end) <= kBytesPerWave);
        const int32_t result = run_wave(a, begin, end, bytes);
        if (result != MINIFLOAT_OK) return result;
        begin = end;
    }
    return MINIFLOAT_OK;
}

}  // namespace MINIFLOAT_ISA
