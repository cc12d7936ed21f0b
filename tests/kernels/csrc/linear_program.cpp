// Packs weights of every format and multiplies with them, through the C interface alone, and holds the results to a
// double loop, and every code times every inline scale to the exact value: a check of the kernels for machines without
// Python or torch, such as an emulated ARM processor. Prints what differs and returns 1 then. The tests in Python cover
// far more (rounding, ends of the ranges, threads).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "api.h"

namespace {

struct Format {
    const char* name;
    int32_t element, grid;
    int64_t block_rows, block_cols;  // 0: all
};

constexpr Format kFormats[] = {
    {"fp8 per channel", MINIFLOAT_E4M3, MINIFLOAT_GRID_ROW, 1, 0},
    {"fp8 per block", MINIFLOAT_E4M3, MINIFLOAT_GRID_BLOCK, 128, 128},
    {"mxfp8", MINIFLOAT_E4M3, MINIFLOAT_GRID_E8M0, 1, 32},
    {"mxfp4", MINIFLOAT_E2M1, MINIFLOAT_GRID_E8M0, 1, 32},
    {"nvfp4", MINIFLOAT_E2M1, MINIFLOAT_GRID_E4M3, 1, 16},
    {"bf16", MINIFLOAT_WEIGHT_BF16, MINIFLOAT_GRID_ROW, 1, 0},
    {"f16", MINIFLOAT_WEIGHT_F16, MINIFLOAT_GRID_ROW, 1, 0},
    {"f32", MINIFLOAT_WEIGHT_F32, MINIFLOAT_GRID_ROW, 1, 0},
};
constexpr int kBits[] = {8, 4, 16, 16, 32};  // of a minifloat_element
// The minifloat_dtype of elements that are not quantized, -1 of others.
constexpr int32_t kDtypes[] = {-1, -1, MINIFLOAT_BF16, MINIFLOAT_F16, MINIFLOAT_F32};
constexpr double kTolerance[] = {4e-3, 5e-4, 2e-6};  // relative L2, by minifloat_dtype of the result

// The value of a code with a sign, `exponent_bits` and `mantissa_bits` by the definition of such formats.
double decode(unsigned code, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int mantissa = code & ((1u << mantissa_bits) - 1);
    const int exponent = code >> mantissa_bits & ((1u << exponent_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    const double value = std::ldexp(exponent ? 1 + fraction : fraction, (exponent ? exponent : 1) - bias);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

double decode_element(int32_t dtype, const uint8_t* p) {
    uint32_t bits = 0;
    std::memcpy(&bits, p, dtype == MINIFLOAT_F32 ? 4 : 2);
    if (dtype == MINIFLOAT_BF16) return decode(bits, 8, 7);
    return dtype == MINIFLOAT_F16 ? decode(bits, 5, 10) : decode(bits, 8, 23);
}

class Random {
  public:
    double normal() { return normal_(engine_); }
    int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }

    // A normal value in the low bits of a dtype; the small mantissa makes every dtype exact.
    void element(int32_t dtype, uint8_t* p) {
        const float value = static_cast<float>(std::ldexp(std::round(std::ldexp(normal(), 5)), -5));
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (dtype == MINIFLOAT_BF16) bits >>= 16;
        if (dtype == MINIFLOAT_F16)
            bits = value == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - (uint32_t{112} << 23)) >> 13);
        std::memcpy(p, &bits, dtype == MINIFLOAT_F32 ? 4 : 2);
    }

  private:
    std::mt19937 engine_{1};
    std::normal_distribution<double> normal_;
};

// A weight as checkpoints store it, and its values. fill(stored) sets the codes and the scales, which are zero before.
struct Stored {
    template <class Fill>
    Stored(const Format& f, int64_t n, int64_t k, const Fill& fill) : format(f), rows(n), cols(k) {
        const int64_t block_cols = f.block_cols ? f.block_cols : k;
        const int64_t scale_cols = (k + block_cols - 1) / block_cols;
        const int64_t scale_count = (n + f.block_rows - 1) / f.block_rows * scale_cols;
        const bool coded = f.grid == MINIFLOAT_GRID_E8M0 || f.grid == MINIFLOAT_GRID_E4M3;
        codes.resize(static_cast<size_t>(n * k * kBits[f.element] / 8));
        coded_scales.resize(static_cast<size_t>(scale_count));
        float_scales.resize(static_cast<size_t>(scale_count));
        fill(*this);
        args = minifloat_pack_args{};
        args.codes = codes.data();
        if (coded) args.scales = coded_scales.data();
        if (!coded && kDtypes[f.element] < 0) args.scales = float_scales.data();
        args.rows = n;
        args.cols = k;
        args.block_rows = f.block_rows;
        args.block_cols = block_cols;
        args.element = f.element;
        args.grid = f.grid;
        args.factor = f.grid == MINIFLOAT_GRID_E4M3 ? 0.25f : 1.0f;
        args.threads = 2;
        for (int64_t row = 0; row < n; ++row)
            for (int64_t col = 0; col < k; ++col) {
                const size_t at = static_cast<size_t>(row * k + col);
                const size_t scale = static_cast<size_t>(row / f.block_rows * scale_cols + col / block_cols);
                double value = f.element == MINIFLOAT_E4M3   ? decode(codes[at], 4, 3)
                               : f.element == MINIFLOAT_E2M1 ? decode(codes[at / 2] >> at % 2 * 4 & 0xf, 2, 1)
                                                             : decode_element(kDtypes[f.element], &codes[kBits[f.element] / 8 * at]);
                if (f.grid == MINIFLOAT_GRID_E8M0) value *= std::ldexp(1.0, coded_scales[scale] - 127);
                if (f.grid == MINIFLOAT_GRID_E4M3) value *= decode(coded_scales[scale], 4, 3);
                if (!coded && args.scales != nullptr) value *= float_scales[scale];
                values.push_back(value * args.factor);
            }
    }

    const Format format;
    int64_t rows, cols;
    std::vector<uint8_t> codes, coded_scales;
    std::vector<float> float_scales;
    std::vector<double> values;
    minifloat_pack_args args;
};

bool is_nan(const Format& f, unsigned code) { return f.element == MINIFLOAT_E4M3 && (code & 0x7f) == 0x7f; }

void fill_randomly(Stored& w, Random& random) {
    const Format& f = w.format;
    for (uint8_t& code : w.codes) code = static_cast<uint8_t>(random.uniform(0, 255));
    for (uint8_t& code : w.codes) code = is_nan(f, code) ? 0 : code;
    if (const int32_t dtype = kDtypes[f.element]; dtype >= 0)
        for (size_t i = 0; i < w.codes.size(); i += kBits[f.element] / 8) random.element(dtype, &w.codes[i]);
    const int low = f.grid == MINIFLOAT_GRID_E8M0 ? 115 : 0;
    for (uint8_t& scale : w.coded_scales) scale = static_cast<uint8_t>(random.uniform(low, 126));
    for (float& scale : w.float_scales) scale = static_cast<float>(random.uniform(1, 100)) / 64;
}

// Every row has every code. E4M3 scales: row n has code n, with every element. E8M0 scales: the first block of each row
// has the largest scale, and the other blocks, with every element, are n powers of two below it.
void fill_with_all_codes(Stored& w) {
    constexpr uint8_t kLargest = 127 + 60;  // no product is subnormal
    const Format& f = w.format;
    const int64_t row_codes = static_cast<int64_t>(w.codes.size()) / w.rows;
    const int64_t groups = static_cast<int64_t>(w.coded_scales.size()) / w.rows;
    for (int64_t n = 0; n < w.rows; ++n) {
        for (int64_t i = 0; i < row_codes; ++i) {
            unsigned code = static_cast<unsigned>(i + 7 * n) & 0xff;
            if (f.element == MINIFLOAT_E2M1) code = (code & 0xf) | ((code + 8) << 4 & 0xf0);  // all in 16 columns
            const int bytes = kBits[f.element] / 8;
            if (bytes > 1) code = i % bytes == bytes - 1 ? 0x3c | (code & 0x83) : code;  // none is huge, Inf or NaN
            w.codes[static_cast<size_t>(n * row_codes + i)] = static_cast<uint8_t>(is_nan(f, code) ? 0 : code);
        }
        for (int64_t g = 0; g < groups; ++g)
            w.coded_scales[static_cast<size_t>(n * groups + g)] = static_cast<uint8_t>(
                f.grid == MINIFLOAT_GRID_E8M0 ? (g == 0 ? kLargest : kLargest - n) : n);
    }
    for (size_t i = 0; i < w.float_scales.size(); ++i) w.float_scales[i] = static_cast<float>(1 + i % 100) / 64;
}

// Packs a weight; bytes is empty where that fails.
std::vector<uint8_t> pack(int32_t isa, const Stored& stored, uint8_t** packed) {
    minifloat_pack_args args = stored.args;
    const int64_t bytes = minifloat_packed_bytes(&args);
    std::vector<uint8_t> memory(static_cast<size_t>(bytes) + 64);
    *packed = args.packed = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    if (bytes == 0 || minifloat_pack(isa, &args) != MINIFLOAT_OK) *packed = nullptr;
    return memory;
}

// y [m, rows] = x [m, cols] times the weight, plus the bias if there is one; strides in elements.
bool multiply(int32_t isa, const uint8_t* packed, const std::vector<uint8_t>& x, int64_t x_stride, const uint8_t* bias,
              std::vector<uint8_t>& y, int64_t y_stride, int64_t m, int32_t dtype) {
    const uint8_t* weights[] = {packed};
    const void* biases[] = {bias};
    minifloat_linear_args a = {};
    a.weights = weights;
    a.biases = biases;
    a.x = x.data();
    a.y = y.data();
    a.x_stride = x_stride;
    a.y_stride = y_stride;
    a.m = m;
    a.count = 1;
    a.x_dtype = a.bias_dtype = dtype;
    a.threads = 2;
    return minifloat_linear(isa, &a) == MINIFLOAT_OK;
}

// The relative L2 error of one product against a double loop; infinite where a call fails.
double error_of(int32_t isa, const Stored& w, const uint8_t* packed, int64_t m, int32_t dtype, Random& random) {
    const int bytes = dtype == MINIFLOAT_F32 ? 4 : 2;
    const int64_t x_stride = w.cols + 3, y_stride = w.rows + 5;
    std::vector<uint8_t> x(static_cast<size_t>(m * x_stride * bytes)), bias(static_cast<size_t>(w.rows * bytes));
    std::vector<uint8_t> y(static_cast<size_t>(m * y_stride * bytes), 0xff);  // NaN
    for (size_t i = 0; i < x.size(); i += static_cast<size_t>(bytes)) random.element(dtype, &x[i]);
    for (size_t i = 0; i < bias.size(); i += static_cast<size_t>(bytes)) random.element(dtype, &bias[i]);
    if (!multiply(isa, packed, x, x_stride, bias.data(), y, y_stride, m, dtype)) return INFINITY;
    double difference = 0, total = 0;
    std::vector<double> row(static_cast<size_t>(w.cols));
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t k = 0; k < w.cols; ++k)
            row[static_cast<size_t>(k)] = decode_element(dtype, &x[static_cast<size_t>((i * x_stride + k) * bytes)]);
        for (int64_t n = 0; n < w.rows; ++n) {
            double exact = decode_element(dtype, &bias[static_cast<size_t>(n * bytes)]);
            for (int64_t k = 0; k < w.cols; ++k)
                exact += row[static_cast<size_t>(k)] * w.values[static_cast<size_t>(n * w.cols + k)];
            const uint8_t* at = &y[static_cast<size_t>((i * y_stride + n) * bytes)];
            // By its definition a NaN decodes as a number; it must not pass for one.
            const double value = decode_element(dtype, at);
            difference += (value - exact) * (value - exact);
            total += exact * exact;
        }
    }
    return std::sqrt(difference / total);
}

int check(int32_t isa, const Format& f, int64_t n, int64_t k, Random& random) {
    const Stored stored(f, n, k, [&](Stored& w) { fill_randomly(w, random); });
    uint8_t* packed = nullptr;
    const std::vector<uint8_t> memory = pack(isa, stored, &packed);
    if (packed == nullptr) {
        std::printf("%s %s [%d, %d]: cannot pack\n", minifloat_isa_name(isa), f.name, static_cast<int>(n),
                    static_cast<int>(k));
        return 1;
    }
    int failures = 0;
    for (const int64_t m : {1, 2, 3, 5, 7, 13, 31, 250})
        for (const int32_t dtype : {MINIFLOAT_BF16, MINIFLOAT_F16, MINIFLOAT_F32}) {
            if (m > 31 && dtype != MINIFLOAT_F32) continue;
            const double error = error_of(isa, stored, packed, m, dtype, random);
            if (error < kTolerance[dtype]) continue;
            std::printf("%s %s [%d, %d], %d rows, dtype %d: relative error %.2e\n", minifloat_isa_name(isa), f.name,
                        static_cast<int>(n), static_cast<int>(k), static_cast<int>(m), dtype, error);
            ++failures;
        }
    return failures;
}

float rounded(double value, int32_t dtype) {
    const float nearest = static_cast<float>(value);
    if (dtype == MINIFLOAT_F32) return nearest;
    uint32_t bits;
    std::memcpy(&bits, &nearest, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// Every code times every inline scale: rows of x have a single 1, so a result is one element of W, rounded once.
int check_codes(int32_t isa, const Format& f) {
    const int64_t n = f.grid == MINIFLOAT_GRID_E8M0 ? 126 : 127, k = 32 + 256;
    const Stored stored(f, n, k, fill_with_all_codes);
    uint8_t* packed = nullptr;
    const std::vector<uint8_t> memory = pack(isa, stored, &packed);
    int failures = packed == nullptr;
    for (const int64_t together : {4, 50})
        for (const int32_t dtype : {MINIFLOAT_BF16, MINIFLOAT_F32}) {
            const int64_t bytes = dtype == MINIFLOAT_F32 ? 4 : 2;
            int different = 0;
            for (int64_t first = 0; first < k && packed != nullptr; first += together) {
                const int64_t m = k - first < together ? k - first : together;
                std::vector<uint8_t> x(static_cast<size_t>(m * k * bytes)), y(static_cast<size_t>(m * n * bytes), 0xff);
                for (int64_t i = 0; i < m; ++i) {
                    const uint16_t one = 0x3f80;  // the upper half of a float32 too
                    std::memcpy(&x[static_cast<size_t>((i * k + first + i + 1) * bytes - 2)], &one, 2);
                }
                if (!multiply(isa, packed, x, k, nullptr, y, n, m, dtype)) ++different;
                for (int64_t i = 0; i < m * n; ++i) {
                    const double exact = stored.values[static_cast<size_t>(i % n * k + first + i / n)];
                    const double value = decode_element(dtype, &y[static_cast<size_t>(i * bytes)]);
                    different += value != static_cast<double>(rounded(exact, dtype));
                }
            }
            if (different == 0) continue;
            std::printf("%s %s, %d rows, dtype %d: %d elements differ\n", minifloat_isa_name(isa), f.name,
                        static_cast<int>(together), dtype, different);
            ++failures;
        }
    return failures;
}

}  // namespace

int main() {
    Random random;
    int failures = 0;
    for (int32_t isa = 0; isa < minifloat_isa_count(); ++isa) {
        if (!minifloat_isa_supported(isa)) continue;
        for (const Format& f : kFormats) {
            failures += check(isa, f, 37, 100, random);
            failures += check(isa, f, 64, 320, random);
            failures += check_codes(isa, f);
        }
        std::printf("%s\n", minifloat_isa_name(isa));
    }
    return failures != 0;
}
