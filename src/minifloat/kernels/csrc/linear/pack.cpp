// Packs weights from the order of checkpoints into the order of layout.h, and unpacks them. The thread that packs a
// panel will also read it (cut.h), so that its pages are on the NUMA node of this thread.
#include "../vec.h"
#include "../threads.h"
#include "cut.h"
#include "layout.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr int kMantissaBits = 23;
constexpr uint8_t kE4M3Nan = 0x7f;  // without the sign
constexpr uint8_t kE8M0Nan = 0xff;
constexpr uint8_t kE4M3Magnitude = 0x7f, kE2M1Magnitudes = 0x77;  // masks of a byte: its codes without their signs
constexpr uint8_t kE4M3Exponent = 0x78;

const float kNan = __builtin_nanf("");

// Returns 2^(e - 127); 2^-127 is a subnormal float.
float decode_e8m0(int e) {
    return e == 0 ? bit_cast<float>(int32_t{1} << (kMantissaBits - 1)) : bit_cast<float>(int32_t{e} << kMantissaBits);
}

int encode_e8m0(float scale) { return bit_cast<int32_t>(scale) >> kMantissaBits; }

// A tile has 16 rows of 32 columns, which are this number of 32-bit words per row: [row][word] in checkpoints,
// [word][row] when packed.
template <int32_t kElement>
constexpr int kTileWords = kElement == MINIFLOAT_WEIGHT_F32 ? 32 : kElement >= MINIFLOAT_WEIGHT_BF16 ? 16
                                                               : kElement == MINIFLOAT_E4M3     ? 8
                                                                                                : 4;

constexpr uint32_t kEvenNibbles = 0x0f0f0f0f, kEvenBytes = 0x00ff00ff, kLowHalf = 0x0000ffff;

// Reorders the nibbles k0 .. k7 of a word to k0 k2 k4 k6 k1 k3 k5 k7.
inline uint32_t part_nibbles(uint32_t word) {
    uint32_t even = word & kEvenNibbles, odd = word >> 4 & kEvenNibbles;
    even = (even | even >> 4) & kEvenBytes;
    odd = (odd | odd >> 4) & kEvenBytes;
    return ((even | even >> 8) & kLowHalf) | (odd | odd >> 8) << 16;
}

inline uint32_t join_nibbles(uint32_t word) {
    uint32_t even = word & kLowHalf, odd = word >> 16;
    even = (even | even << 8) & kEvenBytes;
    odd = (odd | odd << 8) & kEvenBytes;
    return ((even | even << 4) & kEvenNibbles) | ((odd | odd << 4) & kEvenNibbles) << 4;
}

// Four columns of four rows of E4M3: (k0 k1) of all rows, then (k2 k3) of all; and back.
inline Words part_halves(Words rows) {
    const Halves h = bit_cast<Halves>(rows);
    return bit_cast<Words>(MINIFLOAT_SHUFFLE(Halves, h, h, 0, 2, 4, 6, 1, 3, 5, 7));
}

inline Words join_halves(Words halves) {
    const Halves h = bit_cast<Halves>(halves);
    return bit_cast<Words>(MINIFLOAT_SHUFFLE(Halves, h, h, 0, 4, 1, 5, 2, 6, 3, 7));
}

template <int32_t kElement>
void pack_tile(uint32_t* rows, uint8_t* out) {
    constexpr int kWords = kTileWords<kElement>;
    if constexpr (kElement == MINIFLOAT_E2M1)
        for (int i = 0; i < kTileRows * kWords; ++i) rows[i] = part_nibbles(rows[i]);
    for (int n = 0; n < kTileRows; n += 4)
        for (int v = 0; v < kWords; v += 4) {
            Words w[4];
            for (int i = 0; i < 4; ++i) __builtin_memcpy(&w[i], rows + (n + i) * kWords + v, sizeof(Words));
            transpose(w);
            for (int i = 0; i < 4; ++i) {
                if constexpr (kElement == MINIFLOAT_E4M3) w[i] = part_halves(w[i]);
                __builtin_memcpy(out + (v + i) * kVectorBytes + n * 4, &w[i], sizeof(Words));
            }
        }
}

template <int32_t kElement>
void unpack_tile(const uint8_t* in, uint32_t* rows) {
    constexpr int kWords = kTileWords<kElement>;
    for (int n = 0; n < kTileRows; n += 4)
        for (int v = 0; v < kWords; v += 4) {
            Words w[4];
            for (int i = 0; i < 4; ++i) {
                __builtin_memcpy(&w[i], in + (v + i) * kVectorBytes + n * 4, sizeof(Words));
                if constexpr (kElement == MINIFLOAT_E4M3) w[i] = join_halves(w[i]);
            }
            transpose(w);
            for (int i = 0; i < 4; ++i) __builtin_memcpy(rows + (n + i) * kWords + v, &w[i], sizeof(Words));
        }
    if constexpr (kElement == MINIFLOAT_E2M1)
        for (int i = 0; i < kTileRows * kWords; ++i) rows[i] = join_nibbles(rows[i]);
}

// The matrix and the scale grid of a checkpoint.
struct Source {
    const minifloat_pack_args& a;
    int64_t row_bytes, scale_cols;

    explicit Source(const minifloat_pack_args& args)
        : a(args),
          row_bytes(args.cols * element_bits(args.element) / 8),
          scale_cols(ceil_div(args.cols, args.block_cols)) {}

    uint8_t* row(int64_t row) const { return const_cast<uint8_t*>(a.codes) + row * row_bytes; }
    int64_t scale_row(int64_t row) const { return row / a.block_rows * scale_cols; }
    uint8_t* scale_codes(int64_t row) const {
        return static_cast<uint8_t*>(const_cast<void*>(a.scales)) + scale_row(row);
    }
    float* scales(int64_t row) const { return static_cast<float*>(const_cast<void*>(a.scales)) + scale_row(row); }
};

// Returns whether any byte, masked, equals `code`.
bool contains(const uint8_t* bytes, int64_t count, uint8_t mask, uint8_t code) {
    uint8_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= (bytes[i] & mask) == code;
    return any != 0;
}

bool all_zeros(const uint8_t* bytes, int64_t count, uint8_t magnitude) {
    uint8_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= bytes[i] & magnitude;
    return any == 0;
}

// Returns the largest scale of a row among its blocks that are not all zeros.
int largest_e8m0(const Source& s, int64_t row) {
    const int64_t block = kE8M0Cols * element_bits(s.a.element) / 8;
    const uint8_t magnitude = s.a.element == MINIFLOAT_E4M3 ? kE4M3Magnitude : kE2M1Magnitudes;
    const uint8_t* scales = s.scale_codes(row);
    int largest = 0;
    for (int64_t g = 0; g < s.scale_cols; ++g) {
        const int e = scales[g];
        if (e <= largest || e == kE8M0Nan) continue;
        const int64_t begin = g * block;
        if (!all_zeros(s.row(row) + begin, min(block, s.row_bytes - begin), magnitude)) largest = e;
    }
    return largest;
}

bool is_flushed(int distance) { return distance > kMaxDistance; }

uint8_t inline_scale(int32_t grid, uint8_t code, int largest) {
    if (grid == MINIFLOAT_GRID_E4M3) return (code & kE4M3Magnitude) == kE4M3Nan ? 0 : code;
    const int distance = largest - code;  // negative for NaN, and for the scale of a block of zeros
    return static_cast<uint8_t>(distance < 0 || is_flushed(distance) ? 0 : distance);
}

// The rows of a weight that are packed into one panel.
struct Rows {
    int64_t first;
    int count;
    int largest[kPanelRows];  // largest_e8m0() of each row
    bool has_nan;             // whether any code is NaN
    bool has_flushed;         // whether any block is flushed to zero
};

// Stores the scales of row `n` of `rows`. The caller has set the inline scales of the panel to zero.
void pack_scales(const Source& s, const Header& h, const Weight& w, int64_t p, int n, Rows& rows) {
    const int64_t row = rows.first + n;
    uint8_t* base = s.a.packed;
    bool nan = h.element == MINIFLOAT_E4M3 && contains(s.row(row), s.row_bytes, kE4M3Magnitude, kE4M3Nan);
    rows.has_nan |= nan;
    float row_scale = 1.0f;
    if (h.grid == MINIFLOAT_GRID_ROW) {
        if (s.a.scales != nullptr) row_scale = s.scales(row)[0] * s.a.factor;
    } else if (h.grid == MINIFLOAT_GRID_BLOCK) {
        float* blocks = reinterpret_cast<float*>(base + h.block_scales) + p * w.groups * w.block_lanes;
        for (int64_t g = 0; g < w.groups; ++g)
            blocks[g * w.block_lanes + (w.block_lanes == 1 ? 0 : n)] = s.scales(row)[g] * s.a.factor;
    } else {
        const uint8_t* codes = s.scale_codes(row);
        const bool e8m0 = h.grid == MINIFLOAT_GRID_E8M0;
        nan |= contains(codes, s.scale_cols, e8m0 ? 0xff : kE4M3Magnitude, e8m0 ? kE8M0Nan : kE4M3Nan);
        rows.largest[n] = e8m0 ? largest_e8m0(s, row) : 0;
        row_scale = e8m0 ? decode_e8m0(rows.largest[n]) : s.a.factor;
        uint8_t* step = base + h.steps + p * w.panel_bytes + n;
        for (int64_t g = 0; g < s.scale_cols; step += w.step_bytes)
            for (int i = 0; i < w.scale_bytes && g < s.scale_cols; i += kPanelRows, ++g) {
                step[i] = inline_scale(h.grid, codes[g], rows.largest[n]);
                rows.has_flushed |= e8m0 && is_flushed(rows.largest[n] - codes[g]);
            }
    }
    reinterpret_cast<float*>(base + h.row_scales)[row] = nan ? kNan : row_scale;
}

// Loads 32 columns, from half * 32 on, of tile `tile` of a panel. NaN, flushed elements and padding become zero.
template <int32_t kElement>
void load_tile(const Source& s, const Rows& rows, int tile, int64_t half, uint32_t* out) {
    constexpr int64_t kBytes = kTileWords<kElement> * 4;
    static_assert(kE8M0Cols == kHalfCols, "a tile has one E8M0 scale per row");
    const int64_t begin = half * kBytes;
    const int64_t width = max<int64_t>(0, min(kBytes, s.row_bytes - begin));
    uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
    if (width < kBytes || rows.count < kPanelRows) __builtin_memset(bytes, 0, kTileRows * kBytes);
    for (int n = 0; n < min(kTileRows, rows.count - tile * kTileRows); ++n) {
        const uint8_t* source = s.row(rows.first + tile * kTileRows + n) + begin;
        if (width == kBytes) {
            __builtin_memcpy(bytes + n * kBytes, source, kBytes);
        } else {
            __builtin_memcpy(bytes + n * kBytes, source, width);
        }
    }
    if (rows.has_nan)
        for (int64_t i = 0; i < kTileRows * kBytes; ++i)
            bytes[i] = (bytes[i] & kE4M3Magnitude) == kE4M3Nan ? 0 : bytes[i];
    for (int n = 0; rows.has_flushed && width != 0 && n < min(kTileRows, rows.count - tile * kTileRows); ++n) {
        const int i = tile * kTileRows + n;
        if (is_flushed(rows.largest[i] - s.scale_codes(rows.first + i)[half]))
            __builtin_memset(bytes + n * kBytes, 0, kBytes);
    }
}

// `normal` of layout.h for the vectors of a step.
uint16_t normal_bits(const uint8_t* vectors) {
    constexpr int kTileVectors = kTileWords<MINIFLOAT_E4M3>, kTileBytes = kTileVectors * kVectorBytes;
    uint32_t bits = 0;
    for (int i = 0; i < 2 * kTileVectors; ++i) {
        const uint8_t* vector = vectors + i / kTileVectors * 2 * kTileBytes + i % kTileVectors * kVectorBytes;
        const bool small = contains(vector, kVectorBytes, kE4M3Exponent, 0) ||
                           contains(vector + kTileBytes, kVectorBytes, kE4M3Exponent, 0);
        bits |= uint32_t{!small} << i;
    }
    return static_cast<uint16_t>(bits);
}

template <int32_t kElement>
void pack_panel(const Source& s, const Header& h, const Weight& w, int64_t p) {
    uint8_t* panel = s.a.packed + h.steps + p * w.panel_bytes;
    for (int64_t i = 0; w.scale_bytes != 0 && i < w.steps; ++i)
        __builtin_memset(panel + i * w.step_bytes, 0, w.scale_bytes);
    Rows rows = {p * kPanelRows, static_cast<int>(min<int64_t>(kPanelRows, h.rows - p * kPanelRows)), {}, false, false};
    for (int n = 0; n < rows.count; ++n) pack_scales(s, h, w, p, n, rows);
    uint32_t tile_rows[kTileRows * kTileWords<kElement>];
    for (int64_t i = 0; i < w.steps; ++i) {
        uint8_t* out = panel + i * w.step_bytes + w.scale_bytes;
        for (int half = 0; half < 2; ++half)
            for (int tile = 0; tile < 2; ++tile, out += sizeof tile_rows) {
                load_tile<kElement>(s, rows, tile, i * 2 + half, tile_rows);
                pack_tile<kElement>(tile_rows, out);
            }
        if constexpr (kElement == MINIFLOAT_E4M3)
            const_cast<uint16_t*>(w.normal(p))[i] = normal_bits(panel + i * w.step_bytes + w.scale_bytes);
    }
}

// Unpacks the scales of a row. Of rows that share a scale, the first row writes it.
void unpack_scales(const Source& s, const Weight& w, int64_t p, int64_t row) {
    const float row_scale = w.row_scales[row];
    const bool nan = row_scale != row_scale, e8m0 = w.grid == MINIFLOAT_GRID_E8M0;
    const int lane = w.block_lanes == 1 ? 0 : static_cast<int>(row % kPanelRows);
    if (w.grid == MINIFLOAT_GRID_BLOCK) {
        for (int64_t g = 0; row % s.a.block_rows == 0 && g < w.groups; ++g)
            s.scales(row)[g] = w.block_scale(p, g)[lane];
    } else if (w.grid != MINIFLOAT_GRID_ROW) {
        const uint8_t* step = w.panel(p) + row % kPanelRows;
        uint8_t* codes = s.scale_codes(row);
        for (int64_t g = 0; g < s.scale_cols; step += w.step_bytes)
            for (int i = 0; i < w.scale_bytes && g < s.scale_cols; i += kPanelRows, ++g)
                codes[g] = static_cast<uint8_t>(e8m0 ? encode_e8m0(row_scale) - step[i] : step[i]);
        if (nan) __builtin_memset(codes, e8m0 ? kE8M0Nan : kE4M3Nan, s.scale_cols);
    }
}

// Unpacks scales per row, per channel or per tensor. Packing replaced the scale of a row that has a NaN element with
// NaN, so the scale is taken from another row that shares it; if all these rows are NaN, it becomes 1.
void unpack_row_scales(const Source& s, const Weight& w) {
    for (int64_t begin = 0; begin < w.rows; begin += s.a.block_rows) {
        float scale = 1.0f;
        for (int64_t row = min(w.rows, begin + s.a.block_rows) - 1; row >= begin; --row)
            if (w.row_scales[row] == w.row_scales[row]) scale = w.row_scales[row];
        s.scales(begin)[0] = scale;
    }
}

template <int32_t kElement>
void unpack_panel(const Source& s, const Weight& w, int64_t p) {
    constexpr int64_t kBytes = kTileWords<kElement> * 4;
    const int64_t first = p * kPanelRows, last = min(first + kPanelRows, w.rows);
    uint32_t tile_rows[kTileRows * kTileWords<kElement>];
    for (int64_t i = 0; i < w.steps * 4; ++i) {  // half by half, tile by tile
        const uint8_t* in = w.panel(p) + i / 4 * w.step_bytes + w.scale_bytes + i % 4 * sizeof tile_rows;
        unpack_tile<kElement>(in, tile_rows);
        const int64_t begin = i / 2 * kBytes, width = min(kBytes, s.row_bytes - begin);
        const int64_t top = first + i % 2 * kTileRows;
        for (int64_t row = top; width > 0 && row < min(top + kTileRows, last); ++row)
            __builtin_memcpy(s.row(row) + begin, tile_rows + (row - top) * kTileWords<kElement>, width);
    }
    for (int64_t row = first; row < last; ++row) {
        if (kElement == MINIFLOAT_E4M3 && w.row_scales[row] != w.row_scales[row])
            __builtin_memset(s.row(row), kE4M3Nan, s.row_bytes);
        if (s.a.scales != nullptr) unpack_scales(s, w, p, row);
    }
}

template <class Function>
void for_panels(int64_t panels, int threads, const Function& function) {
    minifloat::parallel(threads < 1 ? 1 : threads, [&](int thread, int count) {
        const Panels mine = panels_of(panels, count, thread);
        for (int64_t p = mine.first; p < mine.last; ++p) function(p);
    });
}

}  // namespace

Header plan_layout(const minifloat_pack_args& a) {
    // No product of sizes up to this overflows; larger weights fit into no memory.
    constexpr int64_t kMostRowsOrCols = int64_t{1} << 30;
    Header h = {};
    const bool whole_row = a.block_cols >= a.cols;
    if (a.rows < 1 || a.cols < 1 || a.block_rows < 1 || a.block_cols < 1) return h;
    if (a.rows > kMostRowsOrCols || a.cols > kMostRowsOrCols) return h;
    if (a.element < MINIFLOAT_E4M3 || a.element > MINIFLOAT_WEIGHT_F32) return h;
    if (a.element == MINIFLOAT_E2M1 && a.cols % 2 != 0) return h;
    if (!is_quantized(a.element) && a.grid != MINIFLOAT_GRID_ROW) return h;
    if (a.grid == MINIFLOAT_GRID_ROW && !whole_row) return h;
    if (a.grid == MINIFLOAT_GRID_BLOCK && !whole_row && a.block_cols % kHalfCols != 0) return h;
    if (a.grid == MINIFLOAT_GRID_E8M0 && (a.block_rows != 1 || a.block_cols != kE8M0Cols)) return h;
    if (a.grid == MINIFLOAT_GRID_E4M3 && (a.block_rows != 1 || a.block_cols != kE4M3Cols)) return h;
    if (a.grid == MINIFLOAT_GRID_E4M3 && a.element != MINIFLOAT_E2M1) return h;
    if (a.grid == MINIFLOAT_GRID_BLOCK && a.element != MINIFLOAT_E4M3) return h;
    if (a.grid < MINIFLOAT_GRID_ROW || a.grid > MINIFLOAT_GRID_E4M3) return h;
    h.magic = kMagic;
    h.version = kLayoutVersion;
    h.element = a.element;
    h.grid = a.grid;
    h.rows = a.rows;
    h.cols = a.cols;
    h.block_cols = a.grid != MINIFLOAT_GRID_BLOCK            ? a.cols
                   : a.block_cols > kMostRowsOrCols ? kMostRowsOrCols
                                                    : a.block_cols;
    h.block_lanes = 0;
    if (a.grid == MINIFLOAT_GRID_BLOCK)
        h.block_lanes = a.block_rows % kPanelRows == 0 || a.block_rows >= a.rows ? 1 : kPanelRows;
    h.row_scales = round_up(sizeof(Header), kVectorBytes);
    const Weight w = view(h);
    const int64_t row_bytes = w.panels * kPanelRows * static_cast<int64_t>(sizeof(float));
    h.block_scales = h.row_scales + row_bytes;
    const int64_t block_bytes = w.panels * w.groups * w.block_lanes * static_cast<int64_t>(sizeof(float));
    const int64_t normal = a.element == MINIFLOAT_E4M3 ? w.panels * w.steps * static_cast<int64_t>(sizeof(uint16_t)) : 0;
    h.steps = round_up(h.block_scales + block_bytes + normal, kStepsAlignment);
    h.bytes = h.steps + w.panels * w.panel_bytes;
    return h;
}

int64_t packed_bytes(const minifloat_pack_args& args) { return plan_layout(args).bytes; }

int32_t pack(const minifloat_pack_args& args) {
    const Header h = plan_layout(args);
    if (h.bytes == 0 || reinterpret_cast<uintptr_t>(args.packed) % kVectorBytes != 0) return MINIFLOAT_BAD_ARGUMENT;
    __builtin_memset(args.packed, 0, h.steps);
    __builtin_memcpy(args.packed, &h, sizeof h);
    const Weight w = view(*reinterpret_cast<const Header*>(args.packed));
    const Source source(args);
    for_panels(w.panels, args.threads, [&](int64_t p) {
        if (w.element == MINIFLOAT_E4M3) pack_panel<MINIFLOAT_E4M3>(source, h, w, p);
        if (w.element == MINIFLOAT_E2M1) pack_panel<MINIFLOAT_E2M1>(source, h, w, p);
        if (element_bits(w.element) == 16) pack_panel<MINIFLOAT_WEIGHT_BF16>(source, h, w, p);
        if (w.element == MINIFLOAT_WEIGHT_F32) pack_panel<MINIFLOAT_WEIGHT_F32>(source, h, w, p);
    });
    return MINIFLOAT_OK;
}

int32_t unpack(const minifloat_pack_args& args) {
    if (!readable(args.packed)) return MINIFLOAT_BAD_WEIGHT;
    const Header& h = *reinterpret_cast<const Header*>(args.packed);
    if (h.rows != args.rows || h.cols != args.cols || h.element != args.element || h.grid != args.grid)
        return MINIFLOAT_BAD_WEIGHT;
    const Weight w = view(h);
    const Source source(args);
    for_panels(w.panels, args.threads, [&](int64_t p) {
        if (w.element == MINIFLOAT_E4M3) unpack_panel<MINIFLOAT_E4M3>(source, w, p);
        if (w.element == MINIFLOAT_E2M1) unpack_panel<MINIFLOAT_E2M1>(source, w, p);
        if (element_bits(w.element) == 16) unpack_panel<MINIFLOAT_WEIGHT_BF16>(source, w, p);
        if (w.element == MINIFLOAT_WEIGHT_F32) unpack_panel<MINIFLOAT_WEIGHT_F32>(source, w, p);
    });
    if (args.scales != nullptr && w.grid == MINIFLOAT_GRID_ROW) unpack_row_scales(source, w);
    return MINIFLOAT_OK;
}

}  // namespace MINIFLOAT_ISA
