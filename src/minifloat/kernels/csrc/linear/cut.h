// Which thread of a team has which panels of a weight. Packing and products share this cut, so that on a machine with
// several NUMA nodes a thread reads what it has itself written, in the memory of its node.
#pragma once

#include <stdint.h>

namespace MINIFLOAT_ISA {

struct Panels {
    int64_t first, last;  // the last one is not included
};

// The panels of one thread: whole pairs, because paths read two at a time.
inline Panels panels_of(int64_t panels, int threads, int thread) {
    const int64_t pairs = (panels + 1) / 2;
    const int64_t first = pairs * thread / threads * 2, last = pairs * (thread + 1) / threads * 2;
    return {first < panels ? first : panels, last < panels ? last : panels};
}

// The pieces of work of a call. Those of a thread follow each other, in the order of its jobs; a job has equally many
// for each thread, of which the last ones are empty where it has fewer panels than others.
struct Pieces {
    int threads;
    int64_t jobs;
    int64_t per_job;  // and thread

    int64_t count() const { return threads * jobs * per_job; }
    int64_t job(int64_t piece) const { return piece / per_job % jobs; }
    // The panels of a piece of a job of `panels`, of at most `piece_panels`.
    Panels panels_of_piece(int64_t piece, int64_t panels, int64_t piece_panels) const {
        const Panels all = panels_of(panels, threads, static_cast<int>(piece / (per_job * jobs)));
        const int64_t first = all.first + piece % per_job * piece_panels, last = first + piece_panels;
        return {first < all.last ? first : all.last, last < all.last ? last : all.last};
    }
};

}  // namespace MINIFLOAT_ISA
