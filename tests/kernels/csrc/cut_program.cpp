// Holds the cut of products to that of packing, by address: a thread multiplies with bytes that the same thread has
// packed, whatever the weights of a call, the number of threads and the size of pieces. Prints what differs.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cut.h"

using namespace MINIFLOAT_ISA;

namespace {

constexpr int64_t kPanelBytes = 4096;

struct Case {
    const char* name;
    std::vector<int64_t> panels;  // of the weights of a call
};

int errors(const Case& c, int threads, int64_t piece_panels) {
    int64_t per_job = 1;
    for (int64_t panels : c.panels)
        for (int t = 0; t < threads; ++t) {
            const Panels mine = panels_of(panels, threads, t);
            const int64_t needed = (mine.last - mine.first + piece_panels - 1) / piece_panels;
            per_job = needed > per_job ? needed : per_job;
        }
    const Pieces pieces = {threads, static_cast<int64_t>(c.panels.size()), per_job};
    std::vector<std::vector<int>> seen;
    std::vector<int64_t> address;
    int64_t end = 1 << 20;
    for (int64_t panels : c.panels) {
        seen.emplace_back(panels, 0);
        address.push_back(end);
        end += panels * kPanelBytes;
    }
    int wrong = 0;
    for (int t = 0; t < threads; ++t) {
        // the run that Schedule gives to this thread
        const int64_t begin = pieces.count() * t / threads, last = pieces.count() * (t + 1) / threads;
        for (int64_t piece = begin; piece < last; ++piece) {
            const int64_t job = pieces.job(piece);
            const Panels read = pieces.panels_of_piece(piece, c.panels[job], piece_panels);
            const Panels packed = panels_of(c.panels[job], threads, t);
            for (int64_t p = read.first; p < read.last; ++p) ++seen[job][p];
            if (read.first == read.last) continue;
            const int64_t from = address[job] + read.first * kPanelBytes, to = address[job] + read.last * kPanelBytes;
            wrong += from < address[job] + packed.first * kPanelBytes || to > address[job] + packed.last * kPanelBytes;
        }
    }
    for (const std::vector<int>& weight : seen)
        for (int times : weight) wrong += times != 1;
    if (wrong) std::printf("%s, %d threads, pieces of %ld: %d wrong\n", c.name, threads, long(piece_panels), wrong);
    return wrong;
}

}  // namespace

int main() {
    const Case cases[] = {
        {"one", {176}},         {"gate and up", {352, 352}}, {"q, k and v", {128, 16, 16}}, {"output layer", {4007}},
        {"one panel", {1}},     {"odd", {7, 3, 1}},          {"experts", std::vector<int64_t>(64, 24)},
    };
    int wrong = 0;
    for (const Case& c : cases)
        for (int threads = 1; threads <= 256; ++threads)
            for (int64_t piece_panels : {1, 2, 8, 64}) wrong += errors(c, threads, piece_panels);
    return wrong != 0;
}
