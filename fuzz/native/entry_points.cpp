// A libFuzzer program around the C interface (src/minifloat/kernels/native/api.h), for builds with sanitizers.
//
// An input chooses a function, an instruction set of this processor, and every field of its arguments. Sizes are small,
// zero, negative, or near the ends of 64 bits. Buffers have exactly the bytes that api.h states for the sizes, and any
// alignment, so that AddressSanitizer sees each byte read or written beyond them; where sizes are out of range there
// are no buffers, and the function must refuse. Functions that fill their results are held to have filled them.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "api.h"

namespace {

constexpr int64_t kMostElements = 1 << 14;  // of a buffer, so that an input takes milliseconds

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

// Memory of exactly `bytes` bytes that begins `shift` bytes after an aligned address.
class Buffer {
  public:
    Buffer(int64_t bytes, int shift, uint32_t seed) : shift_(shift) {
        bytes_ = bytes;
        memory_.reset(new uint8_t[static_cast<size_t>(bytes) + shift]);
        std::minstd_rand random(seed);
        for (int64_t i = 0; i < bytes; ++i) data()[i] = static_cast<uint8_t>(random() >> 8);
    }
    uint8_t* data() { return memory_.get() + shift_; }
    template <typename T>
    T* as() { return reinterpret_cast<T*>(data()); }
    int64_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<uint8_t[]> memory_;
    int64_t bytes_ = 0;
    int shift_;
};

// The fields of one call, from the bytes of an input.
class Fields {
  public:
    Fields(const uint8_t* data, size_t size) : input_(data, size) {}

    int32_t small(int32_t low, int32_t high) { return input_.ConsumeIntegralInRange(low, high); }
    bool flag() { return input_.ConsumeBool(); }
    uint32_t seed() { return input_.ConsumeIntegral<uint32_t>(); }

    // A size: mostly small; else out of any range that memory has.
    int64_t size(int64_t most = 200) {
        static constexpr int64_t kHostile[] = {0,       -1,        INT64_MIN,     INT64_MAX,     INT64_MAX - 63,
                                               INT32_MAX, INT32_MIN, 1ll << 31,     1ll << 32,     1ll << 40,
                                               1ll << 62, (1ll << 62) + 1, INT64_MAX / 2, INT64_MAX / 3, -64};
        if (small(0, 15)) return input_.ConsumeIntegralInRange<int64_t>(1, most);
        return input_.PickValueInArray(kHostile);
    }

    // An enumerator of 0 .. last, seldom another number.
    int32_t enumerator(int32_t last) {
        return small(0, 31) ? small(0, last) : input_.ConsumeIntegral<int32_t>();
    }

    float number() {
        static constexpr float kNumbers[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, 1e-38f, 3.4e38f, 448.0f, 6.0f,
                                             __builtin_inff(), -__builtin_inff(), __builtin_nanf("")};
        return input_.PickValueInArray(kNumbers);
    }

    // An element format: those of the library, seldom any numbers.
    minifloat_format format() {
        static constexpr minifloat_format kFormats[] = {{8, 3, -6, 448.0f}, {4, 1, 0, 6.0f}, {8, 2, -14, 57344.0f}};
        minifloat_format f = input_.PickValueInArray(kFormats);
        if (small(0, 31) == 0) f.bits = small(-2, 40);
        if (small(0, 31) == 0) f.mantissa_bits = small(-2, 40);
        if (small(0, 31) == 0) f.emin = small(-200, 200);
        if (small(0, 31) == 0) f.max = number();
        return f;
    }

    int32_t isa() { return small(0, 31) ? small(0, minifloat_isa_count() - 1) : input_.ConsumeIntegral<int32_t>(); }
    int shift() { return small(0, 3); }

  private:
    FuzzedDataProvider input_;
};

int64_t element_bytes(int32_t dtype) { return dtype == MINIFLOAT_F32 ? 4 : 2; }
int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Whether all sizes are at least `least`, and their product is one that a buffer here may have.
bool fits(std::initializer_list<int64_t> sizes, int64_t least = 0) {
    int64_t product = 1;
    for (const int64_t size : sizes) {
        if (size < least || size > kMostElements) return false;
        product *= size > 1 ? size : 1;
        if (product > kMostElements) return false;
    }
    return true;
}

// Values of a dtype that are finite, where the function asks for that.
void fill_finite(Buffer& buffer, uint32_t seed) {
    std::minstd_rand random(seed);
    for (int64_t i = 0; i + 4 <= buffer.bytes(); i += 4) {
        const float value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
        std::memcpy(buffer.data() + i, &value, 4);
    }
}

void quantize_rows(Fields& fields) {
    minifloat_quantize_rows_args a = {};
    a.rows = fields.size(40), a.cols = fields.size(400);
    static constexpr int64_t kBlocks[] = {1, 16, 32, 48, 64, 128, 512};
    a.block_rows = fields.flag() ? kBlocks[fields.small(0, 6)] : fields.size();
    a.block_cols = fields.flag() ? kBlocks[fields.small(0, 6)] : fields.size();
    a.dtype = fields.enumerator(2), a.scaling = fields.enumerator(6);
    a.element = fields.format(), a.scale = fields.format();
    a.divisor = fields.number(), a.zero_scale = fields.number();
    a.one_scale = fields.flag(), a.tensor_amax = fields.number();
    if (!fits({a.rows, a.cols})) {
        if (a.rows >= 0 && a.cols >= 1) return;  // more than there is memory for
        a.data = a.codes = nullptr, a.scales = nullptr;
        require(minifloat_quantize_rows(fields.isa(), &a) != MINIFLOAT_OK, "sizes below zero were accepted");
        return;
    }
    const int64_t grid_rows = a.one_scale ? 1 : a.block_rows > 0 ? ceil_div(a.rows, a.block_rows) : 0;
    const int64_t grid_cols = a.one_scale ? 1 : a.block_cols > 0 ? ceil_div(a.cols, a.block_cols) : 0;
    Buffer data(a.rows * a.cols * element_bytes(a.dtype), fields.shift(), fields.seed());
    Buffer codes(a.element.bits == 4 ? a.rows * a.cols / 2 : a.rows * a.cols, fields.shift(), 1);
    Buffer scales(grid_rows * grid_cols * (a.scaling == MINIFLOAT_SCALE_FLOAT32 ? 4 : 1), 0, 2);
    a.data = data.data(), a.codes = codes.data(), a.scales = scales.data();
    minifloat_quantize_rows(fields.isa(), &a);
}

void round_inputs(Fields& fields) {
    minifloat_round_inputs_args a = {};
    a.rows = fields.size(40), a.cols = fields.size(300), a.block_cols = fields.size();
    a.element = fields.format(), a.dtype = fields.enumerator(2), a.scaling = fields.enumerator(2);
    a.zero_scale = fields.number(), a.threads = fields.small(-1, 3);
    const float scale = fields.number();
    if (fields.flag()) a.scale = &scale;
    const int64_t gap = fields.small(0, 5);
    if (!fits({a.rows, a.cols})) {
        if (a.rows >= 0 && a.cols >= 1) return;
        require(minifloat_round_inputs(fields.isa(), &a) != MINIFLOAT_OK, "sizes below zero were accepted");
        return;
    }
    a.x_stride = a.cols + gap;
    Buffer x(a.rows == 0 ? 0 : ((a.rows - 1) * a.x_stride + a.cols) * element_bytes(a.dtype), fields.shift(), fields.seed());
    Buffer y(a.rows * a.cols * 4, 0, 1);
    a.x = x.data(), a.y = y.as<float>();
    minifloat_round_inputs(fields.isa(), &a);
}

void observe(Fields& fields) {
    const int64_t count = fields.size(3000);
    const int32_t dtype = fields.enumerator(2);
    const bool possible = fits({count});
    if (!possible && count >= 0) return;
    Buffer data(possible ? count * element_bytes(dtype) : 0, fields.shift(), fields.seed());
    minifloat_amax_args amax = {};
    amax.data = data.data(), amax.count = count, amax.dtype = dtype;
    const int32_t status = minifloat_amax(fields.isa(), &amax);
    require(possible || status != MINIFLOAT_OK, "a count below zero was accepted");
    Buffer bins(MINIFLOAT_HISTOGRAM_BINS * 8, 0, 1);
    std::memset(bins.data(), 0, bins.bytes());
    minifloat_histogram_args histogram = {};
    histogram.data = data.data(), histogram.count = count, histogram.dtype = dtype, histogram.bins = bins.as<int64_t>();
    if (minifloat_histogram(fields.isa(), &histogram) != MINIFLOAT_OK) return;
    int64_t sum = 0;
    for (int64_t i = 0; i < MINIFLOAT_HISTOGRAM_BINS; ++i) sum += bins.as<int64_t>()[i];
    require(sum == count, "the bins do not hold every element once");
}

void divergence(Fields& fields) {
    minifloat_divergence_args a = {};
    a.rows = fields.size(8), a.vocab = fields.size(500), a.top = fields.size(MINIFLOAT_DIVERGENCE_TOP);
    a.threads = fields.small(-1, 3);
    const bool wrong = a.rows < 0 || a.top < 1 || a.top > a.vocab || a.top > MINIFLOAT_DIVERGENCE_TOP;
    if (wrong) require(minifloat_divergence(fields.isa(), &a) != MINIFLOAT_OK, "wrong sizes were accepted");
    if (wrong || !fits({a.rows, a.vocab})) return;
    Buffer p(a.rows * a.vocab * 4, 0, fields.seed()), q(a.rows * a.vocab * 4, 0, fields.seed());
    Buffer sums(a.rows * 3 * 8, 0, 1), logits(2 * a.rows * a.top * 4, 0, 1), tokens(2 * a.rows * a.top * 4, 0, 1);
    a.p = p.as<float>(), a.q = q.as<float>(), a.sums = sums.as<double>();
    a.p_logits = logits.as<float>(), a.q_logits = a.p_logits + a.rows * a.top;
    a.p_tokens = tokens.as<int32_t>(), a.q_tokens = a.p_tokens + a.rows * a.top;
    minifloat_divergence(fields.isa(), &a);
}

void draw(Fields& fields) {
    minifloat_draw_args a = {};
    a.rows = fields.size(8), a.vocab = fields.size(3000), a.stride = a.vocab + fields.small(-1, 3);
    a.threads = fields.small(-1, 3);
    const bool wrong = a.rows < 0 || a.vocab < 1 || a.stride < a.vocab;
    if (wrong) require(minifloat_draw(fields.isa(), &a) != MINIFLOAT_OK, "wrong sizes were accepted");
    if (wrong || !fits({a.rows, a.stride})) return;
    Buffer logits(a.rows * a.stride * 4, 0, fields.seed()), numbers(3 * a.rows * 8, 0, fields.seed());
    Buffer tokens(a.rows * 8, 0, 1);
    a.logits = logits.as<float>(), a.tokens = tokens.as<int64_t>();
    a.largest = numbers.as<double>(), a.temperatures = a.largest + a.rows, a.uniforms = a.temperatures + a.rows;
    minifloat_draw(fields.isa(), &a);
    for (int64_t row = 0; row < a.rows; ++row)
        require(a.tokens[row] >= 0 && a.tokens[row] < a.vocab, "a token is not in the vocabulary");
}

void round_with_feedback(Fields& fields) {
    minifloat_round_with_feedback_args a = {};
    a.rows = fields.size(30), a.cols = fields.size(100), a.groups = fields.size(10);
    a.element = fields.format(), a.threads = fields.small(-1, 3);
    if (!fits({a.rows, a.cols}) || !fits({a.rows, a.groups}) || !fits({a.cols, a.cols})) return;
    Buffer weight(a.rows * a.cols * 4, 0, 0), scales(a.rows * a.groups * 4, 0, 0), feedback(a.cols * a.cols * 4, 0, 0);
    fill_finite(weight, fields.seed());
    fill_finite(feedback, fields.seed());
    for (int64_t i = 0; i < a.rows * a.groups; ++i) scales.as<float>()[i] = 0.25f;
    std::vector<int32_t> group_of(static_cast<size_t>(a.cols));
    for (auto& group : group_of) group = fields.small(0, 63) ? fields.small(0, 9) : fields.small(-3, 12);
    Buffer codes(a.rows * a.cols, 0, 1);
    a.weight = weight.as<float>(), a.scales = scales.as<float>(), a.feedback = feedback.as<float>();
    a.group_of = group_of.data(), a.codes = codes.data();
    minifloat_round_with_feedback(fields.isa(), &a);
}

void gram(Fields& fields) {
    minifloat_gram_args a = {};
    a.rows = fields.size(60), a.x_cols = fields.size(90), a.y_cols = fields.size(90);
    a.dtype = fields.enumerator(2), a.symmetric = fields.flag(), a.threads = fields.small(-1, 3);
    const int64_t gap = fields.small(0, 5);
    if (a.symmetric && fields.small(0, 7)) a.y_cols = a.x_cols;
    if (!fits({a.rows, a.x_cols}) || !fits({a.rows, a.y_cols}) || !fits({a.x_cols, a.y_cols})) return;
    a.x_stride = a.x_cols + gap, a.y_stride = a.symmetric ? a.x_stride : a.y_cols + gap;
    const auto bytes = [&](int64_t cols, int64_t stride) {
        return a.rows == 0 ? 0 : ((a.rows - 1) * stride + cols) * element_bytes(a.dtype);
    };
    Buffer x(bytes(a.x_cols, a.x_stride), 0, fields.seed()), y(bytes(a.y_cols, a.y_stride), 0, fields.seed());
    Buffer out(a.x_cols * a.y_cols * 4, 0, 1);
    a.x = x.data(), a.y = a.symmetric ? x.data() : y.data(), a.out = out.as<float>();
    minifloat_gram(fields.isa(), &a);
}

// A packed weight, and the arguments that made it.
struct Packed {
    minifloat_pack_args args = {};
    std::unique_ptr<uint8_t, void (*)(void*)> memory{nullptr, std::free};
    bool made = false;
};

Packed pack(Fields& fields, const Packed* like = nullptr) {
    Packed result;
    minifloat_pack_args& a = result.args;
    a.rows = fields.size(100), a.cols = like != nullptr ? like->args.cols : fields.size(300);
    a.element = fields.enumerator(2), a.grid = fields.enumerator(3);
    a.factor = fields.number(), a.threads = fields.small(-1, 3);
    if (like != nullptr) a.element = like->args.element, a.grid = like->args.grid;
    static constexpr int64_t kBlocks[] = {1, 16, 32, 64, 128};
    a.block_rows = a.grid >= MINIFLOAT_GRID_E8M0 ? 1 : fields.flag() ? kBlocks[fields.small(0, 4)] : fields.size();
    a.block_cols = a.grid == MINIFLOAT_GRID_E8M0   ? 32
                   : a.grid == MINIFLOAT_GRID_E4M3 ? 16
                   : a.grid == MINIFLOAT_GRID_ROW  ? a.cols
                   : fields.flag()                 ? kBlocks[fields.small(0, 4)]
                                                   : fields.size();
    if (like != nullptr) a.block_rows = like->args.block_rows, a.block_cols = like->args.block_cols;
    if (fields.small(0, 31) == 0) a.block_cols = fields.size();
    if (fields.small(0, 31) == 0) a.block_rows = fields.size();
    const int64_t bytes = minifloat_packed_bytes(&a);
    require(bytes >= 0, "a packed weight of less than no bytes");
    if (!fits({a.rows, a.cols}, 1) || !fits({a.block_rows, a.block_cols}, 1)) {
        require(fits({a.rows}, 1) || a.rows > 0 || bytes == 0, "a weight without rows has a packed form");
        return result;
    }
    const int64_t codes_bytes = a.element == MINIFLOAT_WEIGHT_BF16 ? a.rows * a.cols * 2
                                : a.element == MINIFLOAT_E2M1      ? a.rows * a.cols / 2
                                                                   : a.rows * a.cols;
    const int64_t grid = ceil_div(a.rows, a.block_rows) * ceil_div(a.cols, a.block_cols);
    const bool floats = a.grid == MINIFLOAT_GRID_ROW || a.grid == MINIFLOAT_GRID_BLOCK;
    Buffer codes(codes_bytes, fields.shift(), fields.seed());
    Buffer scales(floats ? grid * 4 : grid, 0, fields.seed());
    if (floats) fill_finite(scales, fields.seed());
    a.codes = codes.data(), a.scales = a.element == MINIFLOAT_WEIGHT_BF16 ? nullptr : scales.as<void>();
    // AddressSanitizer guards the end of what aligned_alloc returns to the byte.
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(bytes > 0 ? bytes : 1)) != 0) return result;
    result.memory.reset(static_cast<uint8_t*>(memory));
    a.packed = result.memory.get();
    result.made = minifloat_pack(fields.isa(), &a) == MINIFLOAT_OK;
    require(!result.made || bytes > 0, "packed a weight that has no packed form");
    if (result.made && fields.flag()) {
        Buffer codes_again(codes_bytes, fields.shift(), 3), scales_again(scales.bytes(), 0, 4);
        minifloat_pack_args back = a;
        back.codes = codes_again.data();
        back.scales = a.scales == nullptr ? nullptr : scales_again.as<void>();
        if (fields.small(0, 15) == 0) back.rows += 1;
        const int32_t status = minifloat_unpack(fields.isa(), &back);
        require(back.rows == a.rows || status != MINIFLOAT_OK, "unpacked a weight of other sizes");
    }
    a.codes = nullptr, a.scales = nullptr;  // these buffers end here
    return result;
}

// Damages the header of a packed weight in a field that says what it is.
void damage(Fields& fields, Packed& weight) {
    weight.memory.get()[fields.small(0, 7)] ^= static_cast<uint8_t>(1 << fields.small(0, 7));
}

void linear(Fields& fields) {
    std::vector<Packed> weights;
    const int32_t count = fields.small(1, 3);
    for (int32_t i = 0; i < count; ++i) {
        weights.push_back(pack(fields, i ? &weights[0] : nullptr));
        if (!weights.back().made) return;
    }
    const bool damaged = fields.small(0, 15) == 0;
    if (damaged) damage(fields, weights[fields.small(0, count - 1)]);
    minifloat_linear_args a = {};
    a.m = fields.small(0, 3) ? fields.small(0, 12) : fields.small(-1, 70);
    a.count = count, a.x_dtype = fields.enumerator(2), a.bias_dtype = fields.enumerator(2);
    a.threads = fields.small(-1, 3), a.int8_inputs = fields.flag();
    const int64_t k = weights[0].args.cols;
    int64_t n = 0;
    std::vector<const uint8_t*> pointers;
    for (const Packed& weight : weights) pointers.push_back(weight.memory.get()), n += weight.args.rows;
    a.weights = pointers.data();
    std::vector<std::unique_ptr<Buffer>> biases;
    std::vector<const void*> bias_pointers;
    for (const Packed& weight : weights) {
        biases.push_back(std::make_unique<Buffer>(weight.args.rows * element_bytes(a.bias_dtype), 0, fields.seed()));
        bias_pointers.push_back(fields.flag() ? biases.back()->data() : nullptr);
    }
    if (fields.flag()) a.biases = bias_pointers.data();
    a.x_stride = k + fields.small(0, 5), a.y_stride = n + fields.small(0, 5);
    const int64_t m = a.m > 0 ? a.m : 0;
    Buffer x(m ? ((m - 1) * a.x_stride + k) * element_bytes(a.x_dtype) : 0, fields.shift(), fields.seed());
    Buffer y(m ? ((m - 1) * a.y_stride + n) * element_bytes(a.x_dtype) : 0, 0, 1);
    a.x = x.data(), a.y = y.data();
    const int32_t isa = fields.isa();
    if (!damaged) minifloat_rounds_inputs(isa, pointers[0], a.m, a.x_dtype);
    minifloat_invariant_isa(isa);
    const int32_t status = minifloat_linear(isa, &a);
    require(!damaged || status != MINIFLOAT_OK, "multiplied with a damaged weight");
}

void moe(Fields& fields) {
    const int32_t experts = fields.small(1, 4);
    std::vector<Packed> weights;
    std::vector<const uint8_t*> pointers;
    for (int32_t i = 0; i < experts; ++i) {
        weights.push_back(pack(fields, i ? &weights[0] : nullptr));
        if (!weights.back().made || weights.back().args.rows > 100) return;
        pointers.push_back(weights.back().memory.get());
    }
    minifloat_moe_args a = {};
    a.experts = experts, a.x_dtype = fields.enumerator(2), a.bias_dtype = fields.enumerator(2);
    a.threads = fields.small(-1, 3), a.int8_inputs = fields.flag(), a.weights = pointers.data();
    std::vector<int64_t> offsets{0};
    for (int32_t i = 0; i < experts; ++i) offsets.push_back(offsets.back() + fields.small(0, 9));
    const int64_t rows = offsets.back(), inputs = fields.small(1, 12);
    const int64_t k = weights[0].args.cols, n = weights[0].args.rows;
    if (fields.small(0, 15) == 0) offsets[fields.small(0, experts - 1) + 1] = fields.small(-5, 0);
    std::vector<int64_t> x_rows;
    for (int64_t i = 0; i < rows; ++i) x_rows.push_back(fields.small(0, static_cast<int32_t>(inputs) - 1));
    const bool chosen = fields.flag();
    a.offsets = offsets.data(), a.x_rows = chosen ? x_rows.data() : nullptr;
    a.x_stride = k + fields.small(0, 5), a.y_stride = n + fields.small(0, 5);
    const int64_t x_count = chosen ? inputs : rows;
    Buffer x(x_count ? ((x_count - 1) * a.x_stride + k) * element_bytes(a.x_dtype) : 0, fields.shift(), fields.seed());
    Buffer y(rows ? ((rows - 1) * a.y_stride + n) * element_bytes(a.x_dtype) : 0, 0, 1);
    a.x = x.data(), a.y = y.data();
    minifloat_moe(fields.isa(), &a);
}

void read(Fields& fields) {
    minifloat_read_args a = {};
    a.bytes = fields.flag() ? fields.small(0, 500) * 8ll : fields.size(4000);
    a.threads = fields.small(-1, 3);
    const bool possible = fits({a.bytes});
    if (!possible && a.bytes >= 0) return;
    Buffer data(possible ? a.bytes : 0, 0, fields.seed());
    a.data = fields.small(0, 15) ? data.data() : nullptr;
    minifloat_read(fields.isa(), &a);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static void (*const kFunctions[])(Fields&) = {
        quantize_rows, round_inputs, observe, divergence, draw, round_with_feedback, gram, linear, moe, read,
    };
    Fields fields(data, size);
    kFunctions[fields.small(0, sizeof kFunctions / sizeof *kFunctions - 1)](fields);
    return 0;
}
