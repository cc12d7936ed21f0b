// Work shared out to the threads of OpenMP: the same ones that torch computes with, where torch uses the same runtime.
//
// The one file that knows OpenMP is threads.cpp; the kernels, compiled once per instruction set, see only this.
#pragma once

#include <stdint.h>

namespace minifloat {

typedef void (*Body)(void* context, int thread, int threads);

// Runs body(context, t, n) for t = 0 .. n - 1 at the same time, n at most `threads`, and waits for all of them. n is 1
// inside another parallel region, and in a process forked from one whose threads had been started (they are gone).
// Every thread computes in the default floating-point environment, whatever the caller has set (flush to zero).
void parallel(int threads, Body body, void* context);

template <class Function>
void parallel(int threads, const Function& function) {
    parallel(
        threads,
        [](void* context, int thread, int count) { (*static_cast<const Function*>(context))(thread, count); },
        const_cast<void*>(static_cast<const void*>(&function)));
}

// Ends the threads that parallel() has started for the calling thread; its next call starts new ones.
void release();

// Where the threads of one parallel() wait for each other: spins for some microseconds, then yields the processor.
class Barrier {
  public:
    void wait(int threads);

  private:
    int32_t arrived_ = 0;
    int32_t phase_ = 0;
};

// Memory of the calling thread, 64-byte aligned, kept for its next call (contents are not); null if there is none.
// All slots may be in use at a time: of a step, of a call within it, and of a thread of that.
enum ScratchSlot { kScratchCall = 0, kScratchThread = 1, kScratchStep = 2, kScratchSlots = 3 };
void* scratch(ScratchSlot slot, int64_t bytes);

// A range of equal pieces of work, cut into one run of neighbours per thread; who is done early takes from the others.
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
