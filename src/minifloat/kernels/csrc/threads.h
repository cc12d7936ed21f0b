// Distributes work to the threads of OpenMP; torch computes with the same threads if it uses the same runtime.
#pragma once

#include <stdint.h>

namespace minifloat {

typedef void (*Body)(void* context, int thread, int threads);

// Runs body(context, t, n) for t = 0 .. n - 1 at the same time, n at most `threads`, and waits for all of them. n is 1
// inside another parallel region, and in a process forked after the threads had been started (a fork loses them).
// Every thread computes in the default floating-point environment, whatever the caller has set (flush to zero).
void parallel(int threads, Body body, void* context);

template <class Function>
void parallel(int threads, const Function& function) {
    parallel(
        threads,
        [](void* context, int thread, int count) { (*static_cast<const Function*>(context))(thread, count); },
        const_cast<void*>(static_cast<const void*>(&function)));
}

// Binds each thread t of later teams of several threads to the processors of node t * nodes / threads, one mask of
// `words` 64-bit words for each node, processor 0 in the lowest bit of the first. Binds none for fewer than two nodes.
void bind(const uint64_t* masks, int words, int nodes, int threads);

// Whether threads are bound to several nodes.
bool spans_nodes();

// Time, for the profile of a step.
int64_t nanoseconds();

// Ends the threads that parallel() has started for the calling thread; the next call starts new threads.
void release();

// Where the threads of one parallel() wait for each other: spins for some microseconds, then yields the processor.
class Barrier {
  public:
    void wait(int threads);

  private:
    int32_t arrived_ = 0;
    int32_t phase_ = 0;
};

// Memory of the calling thread, 64-byte aligned and with undefined contents, kept for its next call; null if there is
// no memory. A step, a call within the step and a thread of this call use different slots at the same time.
enum ScratchSlot { kScratchCall = 0, kScratchThread = 1, kScratchStep = 2, kScratchInput = 3, kScratchSlots = 4 };
void* scratch(ScratchSlot slot, int64_t bytes);

// A range of equal pieces of work, cut into one contiguous run per thread; a thread that is done takes pieces of
// others.
class Schedule {
  public:
    static constexpr int kMaxThreads = 256;

    void reset(int64_t pieces, int threads);
    // The next piece for `thread`, or -1.
    int64_t next(int thread);

  private:
    struct alignas(64) Run {
        int64_t next, end;
    };
    Run runs_[kMaxThreads];
    int threads_ = 0;
};

}  // namespace minifloat
