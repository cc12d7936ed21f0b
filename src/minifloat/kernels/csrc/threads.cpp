#include "threads.h"

#include "float_environment.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <chrono>
#include <mutex>

#if defined(_OPENMP)
#include <omp.h>
#pragma weak omp_pause_resource_all  // OpenMP 5.0: torch's runtime may be older
#endif

namespace minifloat {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int kSpins = 20000;  // some tens of microseconds

#if defined(_OPENMP)
bool g_started = false;  // whether OpenMP's threads may have been started in this process
bool g_orphaned = false;  // forked from a process with g_started

void after_fork_in_child() { g_orphaned = __atomic_load_n(&g_started, __ATOMIC_RELAXED); }

void watch_forks() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
}
#endif

#if defined(__linux__)
constexpr int kMostNodes = 64;

struct Binding {
    cpu_set_t processors[kMostNodes];
    int nodes = 0, threads = 1;
};
Binding g_binding;  // written while no team runs

void bind_this(int thread) {
    thread_local int bound = -1;
    const int node = (thread < g_binding.threads ? thread : g_binding.threads - 1) * g_binding.nodes / g_binding.threads;
    if (node == bound) return;
    sched_setaffinity(0, sizeof(cpu_set_t), &g_binding.processors[node]);
    bound = node;
}
#endif

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Memory {
  public:
    ~Memory() { free(data_); }

    void* at_least(int64_t bytes) {
        if (bytes <= size_) return data_;
        free(data_);
        size_ = 0;
        const int64_t align = bytes >= kHugePage ? kHugePage : 64;
        const int64_t rounded = (bytes + align - 1) / align * align;
        if (posix_memalign(&data_, static_cast<size_t>(align), static_cast<size_t>(rounded)) != 0) {
            data_ = nullptr;
            return nullptr;
        }
#if defined(MADV_HUGEPAGE)
        if (align == kHugePage) madvise(data_, static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
        size_ = rounded;
        return data_;
    }

  private:
    void* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace

void parallel(int threads, Body body, void* context) {
    if (threads > Schedule::kMaxThreads) threads = Schedule::kMaxThreads;
    const auto run = [&](int thread, int count) {
        const DefaultFloatEnvironment environment;
#if defined(__linux__)
        if (count > 1 && spans_nodes()) bind_this(thread);
#endif
        body(context, thread, count);
    };
#if defined(_OPENMP)
    if (threads > 1 && !omp_in_parallel()) {
        watch_forks();
        if (!g_orphaned) {
            __atomic_store_n(&g_started, true, __ATOMIC_RELAXED);
#pragma omp parallel num_threads(threads)
            run(omp_get_thread_num(), omp_get_num_threads());
            return;
        }
    }
#endif
    run(0, 1);
}

#if defined(__linux__)
void bind(const uint64_t* masks, int words, int nodes, int threads) {
    g_binding.threads = threads < 1 ? 1 : threads;
    g_binding.nodes = nodes < 2 ? 0 : nodes < kMostNodes ? nodes : kMostNodes;
    for (int node = 0; node < g_binding.nodes; ++node) {
        CPU_ZERO(&g_binding.processors[node]);
        for (int i = 0; i < words * 64 && i < CPU_SETSIZE; ++i)
            if (masks[node * words + i / 64] >> i % 64 & 1) CPU_SET(i, &g_binding.processors[node]);
    }
}

bool spans_nodes() { return g_binding.nodes > 1; }
#else
void bind(const uint64_t*, int, int, int) {}
bool spans_nodes() { return false; }
#endif

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void release() {
#if defined(_OPENMP)
    if (omp_pause_resource_all != nullptr && !omp_in_parallel()) omp_pause_resource_all(omp_pause_soft);
#endif
}

void Barrier::wait(int threads) {
    if (threads == 1) return;
    const int32_t phase = __atomic_load_n(&phase_, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&phase_, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spin = 0; __atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == phase; ++spin) {
        if (spin < kSpins) {
            relax();
        } else {
            sched_yield();
        }
    }
}

void* scratch(ScratchSlot slot, int64_t bytes) {
    thread_local Memory memory[kScratchSlots];
    return memory[slot].at_least(bytes);
}

void Schedule::reset(int64_t pieces, int threads) {
    threads_ = threads < kMaxThreads ? threads : kMaxThreads;
    for (int t = 0; t < threads_; ++t) {
        runs_[t].next = pieces * t / threads_;
        runs_[t].end = pieces * (t + 1) / threads_;
    }
}

int64_t Schedule::next(int thread) {
    for (int t = 0; t < threads_; ++t) {
        Run& run = runs_[(thread + t) % threads_];
        if (__atomic_load_n(&run.next, __ATOMIC_RELAXED) >= run.end) continue;
        const int64_t piece = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED);
        if (piece < run.end) return piece;
    }
    return -1;
}

}  // namespace minifloat
