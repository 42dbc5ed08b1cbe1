// blocks.cu against ggml's own way through a block, and its products against f64, for random shapes.
//
// Usage: blocks_test [CASES]; fails on a weight that differs and on a product beyond the rounding of its sums.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shim.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "random.h"

#include "../blocks.cu"

constexpr unsigned FORMATS = 10, SHORT_FORMATS = 5;

static unsigned block_inputs(unsigned format) { return format < SHORT_FORMATS ? 32 : 256; }

// What ggml makes of the same blocks, in f32; engine/src/blocks.rs holds candle to it.
constexpr uint64_t DIGESTS[FORMATS] = {
    0x78fbfb42c6d0daa5, 0x7eb31f22dbfe9825, 0x6180a9dc18e7f025, 0x24c63e5da87e1225,
    0x67a852fc9d302845, 0x2e07fa6a3386e425, 0xb5898782fd3c6525, 0x5b553aa358f64ca2,
    0x41b9c52955c054cf, 0x9d082f570655c55b};

// Where the f16 of a block lie.
static std::vector<unsigned> halves(unsigned format) {
    switch (format) {
        case Q8_0:
        case Q4_0:
        case Q5_0: return {0};
        case Q2_K: return {80, 82};
        case Q3_K: return {108};
        case Q6_K: return {208};
        default: return {0, 2};
    }
}

// Blocks of any bytes, whose f16 are from 2^-7 to 2^-3.
template <typename Byte>
static std::vector<unsigned char> blocks_of(unsigned format, size_t count, Byte byte) {
    std::vector<unsigned char> blocks(count * ALL_BLOCK_BYTES[format]);
    for (unsigned char& one : blocks) {
        one = byte();
    }
    for (size_t block = 0; block < count; block++) {
        for (unsigned at : halves(format)) {
            unsigned char& upper = blocks[block * ALL_BLOCK_BYTES[format] + at + 1];
            upper = (upper & 15) | 0x20;
        }
    }
    return blocks;
}

static float half_of(const unsigned char* at) {
    __half half;
    memcpy(&half, at, sizeof half);
    return __half2float(half);
}

static void scale_and_minimum(unsigned at, const unsigned char* packed, unsigned& scale, unsigned& minimum) {
    if (at < 4) {
        scale = packed[at] & 63;
        minimum = packed[at + 4] & 63;
    } else {
        scale = (packed[at + 4] & 15) | ((packed[at - 4] >> 6) << 4);
        minimum = (packed[at + 4] >> 4) | ((packed[at] >> 6) << 4);
    }
}

// dequantize_row_q8_0 and its like, for a block of 32.
static void weights_of_32(unsigned format, const unsigned char* block, float* to) {
    const bool is_shifted = format == Q4_1 || format == Q5_1, has_fifth = format == Q5_0 || format == Q5_1;
    const float scale = half_of(block), shift = is_shifted ? half_of(block + 2) : 0.0f;
    const unsigned char* quants = block + (is_shifted ? 4 : 2);
    if (format == Q8_0) {
        for (unsigned at = 0; at < 32; at++) {
            to[at] = float((signed char)quants[at]) * scale;
        }
        return;
    }
    uint32_t fifth = 0;
    if (has_fifth) {
        memcpy(&fifth, quants, 4);
        quants += 4;
    }
    const int less = is_shifted ? 0 : has_fifth ? 16 : 8;
    for (unsigned at = 0; at < 16; at++) {
        const int low = (quants[at] & 15) | int((fifth >> at) << 4 & 16);
        const int high = (quants[at] >> 4) | int((fifth >> (at + 12)) & 16);
        to[at] = float(low - less) * scale + shift;
        to[at + 16] = float(high - less) * scale + shift;
    }
}

static void weights_of_q2k(const unsigned char* block, float* to) {
    const unsigned char *scales = block, *quants = block + 16;
    const float all = half_of(block + 80), minimum = half_of(block + 82);
    for (unsigned half = 0; half < 2; half++, quants += 32) {
        for (unsigned shift = 0; shift < 8; shift += 2) {
            for (unsigned at = 0; at < 32; at++) {
                const unsigned factors = scales[at / 16];
                *to++ = all * float(factors & 15) * float((quants[at] >> shift) & 3) - minimum * float(factors >> 4);
            }
            scales += 2;
        }
    }
}

static void weights_of_q3k(const unsigned char* block, float* to) {
    const unsigned char *high = block, *low = block + 32;
    uint32_t packed[4];
    memcpy(packed, block + 96, 12);
    const uint32_t upper = packed[2];
    packed[2] = ((packed[0] >> 4) & 0x0f0f0f0f) | (((upper >> 4) & 0x03030303) << 4);
    packed[3] = ((packed[1] >> 4) & 0x0f0f0f0f) | (((upper >> 6) & 0x03030303) << 4);
    packed[0] = (packed[0] & 0x0f0f0f0f) | ((upper & 0x03030303) << 4);
    packed[1] = (packed[1] & 0x0f0f0f0f) | (((upper >> 2) & 0x03030303) << 4);
    const signed char* scales = (const signed char*)packed;
    const float all = half_of(block + 108);
    unsigned mask = 1;
    for (unsigned half = 0; half < 2; half++, low += 32) {
        for (unsigned shift = 0; shift < 8; shift += 2, mask <<= 1, scales += 2) {
            for (unsigned at = 0; at < 32; at++) {
                const int quant = int((low[at] >> shift) & 3) - (high[at] & mask ? 0 : 4);
                *to++ = all * float(scales[at / 16] - 32) * float(quant);
            }
        }
    }
}

static void weights_of_q6k(const unsigned char* block, float* to) {
    const unsigned char *low = block, *high = block + 128;
    const signed char* scales = (const signed char*)block + 192;
    const float all = half_of(block + 208);
    for (unsigned half = 0; half < 2; half++, to += 128, low += 64, high += 32, scales += 8) {
        for (unsigned at = 0; at < 32; at++) {
            const int one = ((low[at] & 15) | ((high[at] & 3) << 4)) - 32;
            const int two = ((low[at + 32] & 15) | (((high[at] >> 2) & 3) << 4)) - 32;
            const int three = ((low[at] >> 4) | (((high[at] >> 4) & 3) << 4)) - 32;
            const int four = ((low[at + 32] >> 4) | (((high[at] >> 6) & 3) << 4)) - 32;
            to[at] = all * scales[at / 16] * one;
            to[at + 32] = all * scales[at / 16 + 2] * two;
            to[at + 64] = all * scales[at / 16 + 4] * three;
            to[at + 96] = all * scales[at / 16 + 6] * four;
        }
    }
}

// Q4_K and Q5_K.
static void weights_of_parts(bool has_fifth, const unsigned char* block, float* to) {
    const unsigned char* low = block + (has_fifth ? 48 : 16);
    for (unsigned part = 0; part < 8; part++, to += 32) {
        unsigned scale, minimum;
        scale_and_minimum(part, block + 4, scale, minimum);
        const float by = half_of(block) * float(scale), less = half_of(block + 2) * float(minimum);
        for (unsigned at = 0; at < 32; at++) {
            const unsigned nibble = part % 2 ? low[part / 2 * 32 + at] >> 4 : low[part / 2 * 32 + at] & 15;
            const bool fifth = has_fifth && block[16 + at] & (1 << part);
            to[at] = by * float(nibble + (fifth ? 16 : 0)) - less;
        }
    }
}

static void weights_of_block(unsigned format, const unsigned char* block, float* to) {
    switch (format) {
        case Q2_K: return weights_of_q2k(block, to);
        case Q3_K: return weights_of_q3k(block, to);
        case Q4_K:
        case Q5_K: return weights_of_parts(format == Q5_K, block, to);
        case Q6_K: return weights_of_q6k(block, to);
        default: return weights_of_32(format, block, to);
    }
}

static std::vector<float> weights_of(unsigned format, const std::vector<unsigned char>& blocks) {
    const size_t count = blocks.size() / ALL_BLOCK_BYTES[format];
    std::vector<float> all(count * block_inputs(format));
    for (size_t block = 0; block < count; block++) {
        weights_of_block(format, &blocks[block * ALL_BLOCK_BYTES[format]], &all[block * block_inputs(format)]);
    }
    return all;
}

// FNV-1a over the weights of 50 blocks of bytes that a linear congruential generator gives.
static uint64_t digest(unsigned format) {
    uint32_t state = format;
    const auto blocks = blocks_of(format, 50, [&] { return (state = state * 1664525 + 1013904223) >> 24; });
    uint64_t hash = 0xcbf29ce484222325;
    for (float weight : weights_of(format, blocks)) {
        hash = (hash ^ std::bit_cast<uint32_t>(weight)) * 0x100000001b3;
    }
    return hash;
}

static std::vector<unsigned char> packed(unsigned format, const std::vector<unsigned char>& blocks, unsigned outputs,
                                         unsigned inputs) {
    const size_t tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * (inputs / TILE_INPUTS);
    size_t bytes = 0;
    with_format<Q6_K>(format, [&](auto of) {
        constexpr unsigned FORMAT = decltype(of)::value;
        bytes = tiles * TILE_BYTES<FORMAT> + (IN_PARTS<FORMAT> ? tiles / 8 * MULTIPLIERS : 0);
    });
    std::vector<unsigned char> to(bytes + 1, 7);
    launch({unsigned(tiles * 32 + 255) / 256, 1}, 256,
           [&] { pack_blocks_u8(blocks.data(), to.data(), outputs, inputs, format); });
    if (to[bytes] != 7) {
        std::printf("format %u is packed into more than %zu bytes\n", format, bytes);
        std::exit(1);
    }
    return to;
}

// One to three projections of one input, of formats of their own; dense ones of T.
template <typename T>
struct Projections {
    unsigned inputs, count = 1 + below(3), outputs[3] = {}, all = 0, formats = 0;
    std::vector<unsigned char> blocks[3];
    std::vector<T> dense[3];
    std::vector<float> weights;  // [all, inputs]

    Projections(unsigned outputs_most, bool has_dense) {
        const bool is_short = below(3) == 0;
        inputs = is_short ? 32 * (1 + below(20)) : 256 * (1 + below(4));
        for (unsigned part = 0; part < count; part++) {
            outputs[part] = 1 + below(outputs_most);
            const bool is_dense = has_dense && below(3) == 0;
            const unsigned format = is_dense ? DENSE : below(is_short ? SHORT_FORMATS : FORMATS);
            formats |= format << 8 * part;
            const auto own = is_dense ? add_dense(part) : add_blocks(part, format);
            weights.insert(weights.end(), own.begin(), own.end());
            all += outputs[part];
        }
    }

    std::vector<float> add_dense(unsigned part) {
        dense[part] = values<T>(outputs[part] * inputs);
        std::vector<float> own;
        for (const T& weight : dense[part]) {
            own.push_back(number(weight));
        }
        return own;
    }

    std::vector<float> add_blocks(unsigned part, unsigned format) {
        const auto stored = blocks_of(format, size_t(outputs[part]) * inputs / block_inputs(format),
                                      [] { return below(256); });
        blocks[part] = packed(format, stored, outputs[part], inputs);
        return weights_of(format, stored);
    }

    const unsigned char* part(unsigned at) const {
        const void* dense_part = dense[at].data();
        return at >= count ? nullptr : dense[at].empty() ? blocks[at].data() : (const unsigned char*)dense_part;
    }

    // The largest weight that shares a block with an input: what sums are rounded by.
    float largest(unsigned output, unsigned input) const {
        const float* block = &weights[output * inputs + input / 32 * 32];
        float most = 0;
        for (unsigned at = 0; at < 32; at++) {
            most = std::max(most, std::abs(block[at]));
        }
        return most;
    }
};

template <typename T, typename Kernel>
static bool unpacks(Kernel kernel) {
    const Projections<T> of(40, false);
    std::vector<T> found(of.weights.size() + 8);
    store(&found[of.weights.size()], 7.0f);
    unsigned lanes = 0;
    for (unsigned outputs : of.outputs) {
        lanes += (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * of.inputs / TILE_INPUTS * 32;
    }
    launch({(lanes + 255) / 256, 1}, 256, [&] {
        kernel(found.data(), of.part(0), of.part(1), of.part(2), of.inputs, of.outputs[0], of.outputs[1],
               of.outputs[2], of.formats);
    });
    for (size_t at = 0; at < of.weights.size(); at++) {
        T expected;
        store(&expected, of.weights[at]);
        if (number(found[at]) != number(expected)) {
            std::printf("weight %zu is %g, not %g\n", at, number(found[at]), of.weights[at]);
            return false;
        }
    }
    return number(found[of.weights.size()]) == 7.0f;
}

// The largest error of a product, in what f32 sums of so many terms and the result may be rounded by: weights are not
// rounded, whatever T is.
template <unsigned TILES, typename T, typename Kernel>
static double product_error(Kernel kernel) {
    const Projections<T> of(80, TILES == 1);
    const unsigned nodes = 1 + below(NODES * TILES), is_wide = below(2);
    const auto x = values<T>(nodes * of.inputs);
    std::vector<float> wide(nodes * of.all);
    std::vector<T> found(nodes * of.all);
    unsigned blocks = 0;
    for (unsigned outputs : of.outputs) {
        blocks += ceil_div(outputs, TILE_OUTPUTS * OUTPUT_TILES<TILES>);
    }
    launch({blocks, 1}, 32 * PRODUCT_WARPS, [&] {
        kernel(x.data(), is_wide ? (void*)wide.data() : found.data(), of.part(0), of.part(1), of.part(2), of.inputs,
               of.outputs[0], of.outputs[1], of.outputs[2], of.formats, nodes, is_wide);
    });
    double most = 0;
    for (unsigned output = 0; output < of.all; output++) {
        std::vector<double> expected(nodes), size(nodes);
        for (unsigned at = 0; at < of.inputs; at++) {
            const double weight = of.weights[output * of.inputs + at], largest = of.largest(output, at);
            for (unsigned node = 0; node < nodes; node++) {
                const double input = number(x[node * of.inputs + at]);
                expected[node] += weight * input;
                size[node] += largest * std::abs(input);
            }
        }
        for (unsigned node = 0; node < nodes; node++) {
            const unsigned at = node * of.all + output;
            const double value = is_wide ? wide[at] : number(found[at]);
            const double rounding = 0x1p-20 * size[node] + (is_wide ? 0 : HALF_UNIT<T> * std::abs(expected[node]));
            const double error = std::abs(value - expected[node]) / rounding;
            most = error <= most ? most : error;  // NaN, too
        }
    }
    return most;
}

int main(int count, char** arguments) {
    for (unsigned format = 0; format < FORMATS; format++) {
        if (digest(format) != DIGESTS[format]) {
            std::printf("format %u: weights with digest %#lx\n", format, digest(format));
            return 1;
        }
    }
    const int cases = count > 1 ? std::atoi(arguments[1]) : 20;
    double most = 0;
    for (int at = 0; at < cases; at++) {
        if (!unpacks<float>(unpack_blocks_f32) || !unpacks<__half>(unpack_blocks_f16) ||
            !unpacks<__nv_bfloat16>(unpack_blocks_bf16)) {
            std::printf("case %d: wrong weights\n", at);
            return 1;
        }
        const double errors[] = {
            product_error<1, __half>(few_product_1_f16), product_error<2, __half>(few_product_2_f16),
            product_error<4, __half>(few_product_4_f16), product_error<8, __half>(few_product_8_f16),
            product_error<1, __nv_bfloat16>(few_product_1_bf16), product_error<2, __nv_bfloat16>(few_product_2_bf16),
            product_error<4, __nv_bfloat16>(few_product_4_bf16), product_error<8, __nv_bfloat16>(few_product_8_bf16)};
        for (double error : errors) {
            most = error <= most ? most : error;
        }
        if (!(most < 1.1)) {
            std::printf("case %d: an error of %g of what rounding explains\n", at, most);
            return 1;
        }
    }
    std::printf("blocks: %d cases, errors of at most %g of what rounding explains\n", cases, most);
}
