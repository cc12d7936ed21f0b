// Brings a weight from the order of checkpoints into that of layout.h, and back.
#include "../threads.h"
#include "../quantize/load.h"
#include "layout.h"

namespace MINIFLOAT_ISA {
namespace {

constexpr uint8_t kE4M3Nan = 0x7f;  // without its sign
constexpr uint8_t kE8M0Nan = 0xff;
constexpr int kE8M0Bias = 127;

const float kNan = __builtin_nanf("");

// 2^(e - 127); 2^-127 is a subnormal float.
float decode_e8m0(int e) {
    return e == 0 ? bit_cast<float>(int32_t{1} << (kMantissaBits - 1)) : bit_cast<float>(int32_t{e} << kMantissaBits);
}

int encode_e8m0(float scale) { return bit_cast<int32_t>(scale) >> kMantissaBits; }

// Where the element of a row within the panel and a column within the step lies in a step, behind the inline scales.
struct Place {
    int byte;
    int shift;  // of a nibble
};

Place place_of(int32_t element, int row, int col) {
    const int half = col / kHalfCols, tile = row / kTileRows, n = row % kTileRows, k = col % kHalfCols;
    const int vectors = element_bits(element) * kTileRows * kHalfCols / 8 / kVectorBytes;
    const int cols = kHalfCols / vectors;  // of a vector
    const int base = ((half * 2 + tile) * vectors + k / cols) * kVectorBytes;
    const int i = k % cols;
    if (element == MINIFLOAT_WEIGHT_BF16) return {base + n * 4 + i * 2, 0};
    if (element == MINIFLOAT_E4M3) return {base + n / 4 * 16 + i / 2 * 8 + n % 4 * 2 + i % 2, 0};
    const int nibble = i % 2 * 4 + i / 2;
    return {base + n * 4 + nibble / 2, nibble % 2 * 4};
}

struct Source {
    const minifloat_pack_args& a;
    int64_t scale_cols;

    explicit Source(const minifloat_pack_args& args) : a(args), scale_cols(ceil_div(args.cols, args.block_cols)) {}

    int64_t row_bytes() const { return a.cols * element_bits(a.element) / 8; }
    int64_t scale_index(int64_t row, int64_t col) const {
        return row / a.block_rows * scale_cols + col / a.block_cols;
    }
    uint8_t code(int64_t row, int64_t col) const {
        if (a.element == MINIFLOAT_E4M3) return a.codes[row * a.cols + col];
        return a.codes[row * row_bytes() + col / 2] >> col % 2 * 4 & 0xf;
    }
    uint8_t scale_code(int64_t row, int64_t col) const {
        return static_cast<const uint8_t*>(a.scales)[scale_index(row, col)];
    }
    float scale(int64_t row, int64_t col) const {
        return a.scales == nullptr ? 1.0f : static_cast<const float*>(a.scales)[scale_index(row, col)] * a.factor;
    }
};

bool has_nan(const Source& s, int64_t row) {
    if (s.a.element == MINIFLOAT_E4M3)
        for (int64_t k = 0; k < s.a.cols; ++k)
            if ((s.code(row, k) & 0x7f) == kE4M3Nan) return true;
    if (s.a.grid == MINIFLOAT_GRID_E8M0 || s.a.grid == MINIFLOAT_GRID_E4M3) {
        const uint8_t mask = s.a.grid == MINIFLOAT_GRID_E8M0 ? 0xff : 0x7f;
        const uint8_t nan = s.a.grid == MINIFLOAT_GRID_E8M0 ? kE8M0Nan : kE4M3Nan;
        for (int64_t k = 0; k < s.a.cols; k += s.a.block_cols)
            if ((s.scale_code(row, k) & mask) == nan) return true;
    }
    return false;
}

bool all_zeros(const Source& s, int64_t row, int64_t begin, int64_t end) {
    const uint8_t magnitude = s.a.element == MINIFLOAT_E4M3 ? 0x7f : 0x7;
    for (int64_t k = begin; k < end; ++k)
        if (s.code(row, k) & magnitude) return false;
    return true;
}

int largest_e8m0(const Source& s, int64_t row) {
    int largest = 0;
    for (int64_t k = 0; k < s.a.cols; k += kE8M0Cols) {
        const int e = s.scale_code(row, k);
        if (e > largest && e != kE8M0Nan && !all_zeros(s, row, k, min(k + kE8M0Cols, s.a.cols))) largest = e;
    }
    return largest;
}

void pack_row(const Source& s, const Header& h, const Weight& w, int64_t row) {
    const int64_t p = row / kPanelRows;
    const int n = static_cast<int>(row % kPanelRows);
    uint8_t* base = s.a.packed;
    uint8_t* panel = base + h.steps + p * w.panel_bytes;
    float* row_scale = reinterpret_cast<float*>(base + h.row_scales) + row;
    const bool nan = has_nan(s, row);
    const int largest = h.grid == MINIFLOAT_GRID_E8M0 ? largest_e8m0(s, row) : 0;
    *row_scale = 1.0f;
    if (h.grid == MINIFLOAT_GRID_ROW) *row_scale = s.scale(row, 0);
    if (h.grid == MINIFLOAT_GRID_E8M0) *row_scale = decode_e8m0(largest);
    if (h.grid == MINIFLOAT_GRID_E4M3) *row_scale = s.a.factor;
    if (nan) *row_scale = kNan;
    if (h.grid == MINIFLOAT_GRID_BLOCK) {
        float* scales = reinterpret_cast<float*>(base + h.block_scales) + p * w.groups * w.block_lanes;
        for (int64_t g = 0; g < w.groups; ++g)
            scales[g * w.block_lanes + (w.block_lanes == 1 ? 0 : n)] = s.scale(row, g * w.block_cols);
    }
    for (int64_t k = 0; k < h.cols; ++k) {
        uint8_t* step = panel + k / kStepCols * w.step_bytes;
        const int col = static_cast<int>(k % kStepCols);
        bool flush = false;
        if (h.grid == MINIFLOAT_GRID_E8M0) {
            const int distance = largest - s.scale_code(row, k);
            flush = distance > kMaxDistance;
            const bool usable = distance >= 0 && !flush && s.scale_code(row, k) != kE8M0Nan;
            step[col / kE8M0Cols * kPanelRows + n] = static_cast<uint8_t>(usable ? distance : 0);
        }
        if (h.grid == MINIFLOAT_GRID_E4M3) {
            const uint8_t e = s.scale_code(row, k);
            step[col / kE4M3Cols * kPanelRows + n] = (e & 0x7f) == kE4M3Nan ? 0 : e;
        }
        const Place place = place_of(h.element, n, col);
        uint8_t* out = step + w.scale_bytes + place.byte;
        if (h.element == MINIFLOAT_WEIGHT_BF16) {
            __builtin_memcpy(out, s.a.codes + row * s.row_bytes() + k * 2, 2);
        } else if (!flush) {
            const uint8_t code = s.code(row, k);
            const bool finite = h.element == MINIFLOAT_E2M1 || (code & 0x7f) != kE4M3Nan;
            *out = static_cast<uint8_t>(*out | (finite ? code : 0) << place.shift);
        }
    }
}

void unpack_row(const minifloat_pack_args& a, const Header& h, const Weight& w, int64_t row) {
    const int64_t p = row / kPanelRows;
    const int n = static_cast<int>(row % kPanelRows);
    const uint8_t* panel = w.panel(p);
    uint8_t* codes = const_cast<uint8_t*>(a.codes) + row * (a.cols * element_bits(a.element) / 8);
    const float row_scale = w.row_scales[row];
    const bool nan = row_scale != row_scale;
    const Source s(a);
    float* scales = static_cast<float*>(const_cast<void*>(a.scales));
    uint8_t* scale_codes = static_cast<uint8_t*>(const_cast<void*>(a.scales));
    for (int64_t k = 0; k < h.cols; ++k) {
        const uint8_t* step = panel + k / kStepCols * w.step_bytes;
        const int col = static_cast<int>(k % kStepCols);
        const Place place = place_of(h.element, n, col);
        const uint8_t* in = step + w.scale_bytes + place.byte;
        if (h.element == MINIFLOAT_WEIGHT_BF16) __builtin_memcpy(codes + k * 2, in, 2);
        if (h.element == MINIFLOAT_E4M3) codes[k] = *in;
        if (h.element == MINIFLOAT_E2M1) {
            const uint8_t code = *in >> place.shift & 0xf;
            codes[k / 2] = static_cast<uint8_t>(k % 2 ? codes[k / 2] | code << 4 : code);
        }
        if (a.scales == nullptr || k % a.block_cols != 0) continue;
        const int64_t index = s.scale_index(row, k);
        if (h.grid == MINIFLOAT_GRID_ROW) scales[index] = row_scale;
        if (h.grid == MINIFLOAT_GRID_BLOCK)
            scales[index] = nan ? kNan : w.block_scale(p, k / w.block_cols)[w.block_lanes == 1 ? 0 : n];
        if (h.grid == MINIFLOAT_GRID_E8M0)
            scale_codes[index] = nan ? kE8M0Nan
                                     : static_cast<uint8_t>(encode_e8m0(row_scale) - step[col / kE8M0Cols * kPanelRows + n]);
        if (h.grid == MINIFLOAT_GRID_E4M3) scale_codes[index] = nan ? kE4M3Nan : step[col / kE4M3Cols * kPanelRows + n];
    }
}

template <class Function>
void for_panels(int64_t panels, int threads, const Function& function) {
    minifloat::Schedule schedule;
    if (threads > panels) threads = static_cast<int>(panels);
    if (threads < 1) threads = 1;
    if (threads > minifloat::Schedule::kMaxThreads) threads = minifloat::Schedule::kMaxThreads;
    schedule.reset(panels, threads);
    minifloat::parallel(threads, [&](int thread, int) {
        for (int64_t p = schedule.next(thread); p >= 0; p = schedule.next(thread)) function(p);
    });
}

}  // namespace

Header plan_layout(const minifloat_pack_args& a) {
    Header h = {};
    const bool whole_row = a.block_cols >= a.cols;
    const bool bf16 = a.element == MINIFLOAT_WEIGHT_BF16;
    if (a.rows < 1 || a.cols < 1 || a.block_rows < 1 || a.block_cols < 1) return h;
    if (a.element < MINIFLOAT_E4M3 || a.element > MINIFLOAT_WEIGHT_BF16) return h;
    if (a.element == MINIFLOAT_E2M1 && a.cols % 2 != 0) return h;
    if (bf16 && a.grid != MINIFLOAT_GRID_ROW) return h;
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
    h.block_cols = a.grid == MINIFLOAT_GRID_BLOCK ? a.block_cols : a.cols;
    h.block_lanes = 0;
    if (a.grid == MINIFLOAT_GRID_BLOCK)
        h.block_lanes = a.block_rows % kPanelRows == 0 || a.block_rows >= a.rows ? 1 : kPanelRows;
    h.row_scales = round_up(sizeof(Header), kVectorBytes);
    const Weight w = view(h);
    const int64_t row_bytes = w.panels * kPanelRows * static_cast<int64_t>(sizeof(float));
    h.block_scales = h.row_scales + row_bytes;
    const int64_t block_bytes = w.panels * w.groups * w.block_lanes * static_cast<int64_t>(sizeof(float));
    h.steps = round_up(h.block_scales + block_bytes, kStepsAlignment);
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
        __builtin_memset(args.packed + h.steps + p * w.panel_bytes, 0, w.panel_bytes);
        for (int64_t row = p * kPanelRows; row < min((p + 1) * kPanelRows, h.rows); ++row) pack_row(source, h, w, row);
    });
    return MINIFLOAT_OK;
}

int32_t unpack(const minifloat_pack_args& args) {
    if (!readable(args.packed)) return MINIFLOAT_BAD_WEIGHT;
    const Header& h = *reinterpret_cast<const Header*>(args.packed);
    if (h.rows != args.rows || h.cols != args.cols || h.element != args.element || h.grid != args.grid)
        return MINIFLOAT_BAD_WEIGHT;
    const Weight w = view(h);
    for_panels(w.panels, args.threads, [&](int64_t p) {
        for (int64_t row = p * kPanelRows; row < min((p + 1) * kPanelRows, h.rows); ++row) unpack_row(args, h, w, row);
    });
    return MINIFLOAT_OK;
}

}  // namespace MINIFLOAT_ISA
