// Weights in blocks, as GGUF stores them (ggml-quants.c of llama.cpp): each a small number, a quant, that a scale
// multiplies and from whose product a minimum may be taken.
#pragma once

#include "number.h"

// As engine/src/cuda/blocks.rs numbers them. The first five have blocks of 32 weights of a row, each with an f16 scale.
// Blocks of the others have 256, an f16 that multiplies all of their scales, and scales of 4 to 8 bits.
enum Format : unsigned { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, DENSE };

template <unsigned F>
constexpr bool IN_PARTS = F >= Q2_K;
// Whether something is taken from a quant's product with its scale.
template <unsigned F>
constexpr bool HAS_MINIMUM = F == Q4_1 || F == Q5_1 || F == Q2_K || F == Q4_K || F == Q5_K;
// Whether scales belong to 16 weights, not to 32.
template <unsigned F>
constexpr bool IS_FINE = F == Q2_K || F == Q3_K || F == Q6_K;
// The bits of a quant, which lie apart.
template <unsigned F>
constexpr bool EIGHT_BITS = F == Q8_0;
template <unsigned F>
constexpr bool FOUR_BITS = F != Q8_0 && F != Q2_K && F != Q3_K;
template <unsigned F>
constexpr bool TWO_BITS = IS_FINE<F>;
template <unsigned F>
constexpr bool ONE_BIT = F == Q5_0 || F == Q5_1 || F == Q3_K || F == Q5_K;
// How far up in a quant its two bits and its single bit lie.
template <unsigned F>
constexpr unsigned TWO_BITS_AT = FOUR_BITS<F> ? 4 : 0;
template <unsigned F>
constexpr unsigned ONE_BIT_AT = FOUR_BITS<F> ? 4 : 2;

// What is taken from a quant, which has no sign.
template <unsigned F>
constexpr unsigned OFFSET = F == Q8_0 ? 128 : F == Q4_0 ? 8 : F == Q5_0 ? 16 : F == Q3_K ? 4 : F == Q6_K ? 32 : 0;

constexpr unsigned ALL_BLOCK_BYTES[] = {34, 18, 20, 22, 24, 84, 110, 144, 176, 210};
template <unsigned F>
constexpr unsigned BLOCK_BYTES = ALL_BLOCK_BYTES[F];
template <unsigned F>
constexpr unsigned BLOCK_INPUTS = IN_PARTS<F> ? 256 : 32;

// Of a row of blocks, the one that has an input.
template <unsigned FORMAT>
__device__ inline const unsigned char* block_of(const unsigned char* row, unsigned input) {
    return row + input / BLOCK_INPUTS<FORMAT> * BLOCK_BYTES<FORMAT>;
}

// The stored quant of a row's input.
template <unsigned FORMAT>
__device__ inline unsigned quant_of(const unsigned char* row, unsigned input) {
    const unsigned char* block = block_of<FORMAT>(row, input);
    const unsigned at = input % 32, part = input / 32 % 8, half = part / 4;
    if constexpr (FORMAT == Q8_0) {
        return block[2 + at] ^ 128u;
    } else if constexpr (!IN_PARTS<FORMAT>) {
        constexpr unsigned FIFTH = 2 + 2 * HAS_MINIMUM<FORMAT>, QUANTS = FIFTH + 4 * ONE_BIT<FORMAT>;
        const unsigned fifth = ONE_BIT<FORMAT> ? block[FIFTH + at / 8] >> at % 8 & 1 : 0;
        return (block[QUANTS + at % 16] >> at / 16 * 4 & 15) | fifth << 4;
    } else if constexpr (FORMAT == Q2_K) {
        return block[16 + half * 32 + at] >> part % 4 * 2 & 3;
    } else if constexpr (FORMAT == Q3_K) {
        return (block[32 + half * 32 + at] >> part % 4 * 2 & 3) | (block[at] >> part & 1) << 2;
    } else if constexpr (FORMAT == Q6_K) {
        const unsigned low = block[half * 64 + part % 2 * 32 + at] >> part % 4 / 2 * 4 & 15;
        return low | (block[128 + half * 32 + at] >> part % 4 * 2 & 3) << 4;
    } else {
        constexpr bool FIFTH = ONE_BIT<FORMAT>;
        const unsigned low = block[(FIFTH ? 48 : 16) + part / 2 * 32 + at] >> part % 2 * 4 & 15;
        return low | (FIFTH ? block[16 + at] >> part & 1 : 0) << 4;
    }
}

// The word of an f16 and, where there is a minimum, of another one behind it; they begin at any byte.
template <unsigned FORMAT>
__device__ inline unsigned halves_at(const unsigned char* at) {
    const unsigned first = at[0] | at[1] << 8;
    return HAS_MINIMUM<FORMAT> ? first | at[2] << 16 | unsigned(at[3]) << 24 : first;
}

// What scales 32 inputs of a row: an f16 and perhaps an f16 minimum, or two bytes of a block of 256: a scale and a
// minimum, or one for each 16.
template <unsigned FORMAT>
__device__ inline unsigned factors_of(const unsigned char* row, unsigned input) {
    const unsigned char* block = block_of<FORMAT>(row, input);
    const unsigned part = input / 32 % 8;
    if constexpr (!IN_PARTS<FORMAT>) {
        return halves_at<FORMAT>(block);
    } else if constexpr (FORMAT == Q2_K) {
        return block[2 * part] | block[2 * part + 1] << 8;
    } else if constexpr (FORMAT == Q6_K) {
        return block[192 + 2 * part] | block[193 + 2 * part] << 8;
    } else if constexpr (FORMAT == Q3_K) {
        unsigned both = 0;
        for (unsigned at = 0; at < 2; at++) {
            const unsigned sixteen = 2 * part + at, upper = block[104 + sixteen % 4] >> sixteen / 4 * 2 & 3;
            const unsigned lower = block[96 + sixteen % 8] >> sixteen / 8 * 4 & 15;
            both |= ((lower | upper << 4) + 224) % 256 << 8 * at;
        }
        return both;
    } else {
        // Of the last four parts, the upper two bits lie above those of the first four.
        const unsigned char* packed = block + 4;
        const bool early = part < 4;
        const unsigned low = packed[part + 4], other = packed[early ? part : part - 4], own = packed[part];
        const unsigned scale = early ? other & 63 : (low & 15) | other >> 6 << 4;
        return scale | (early ? low & 63 : low >> 4 | own >> 6 << 4) << 8;
    }
}

// Two f16 that multiply the scales and the minimums of a block of 256.
template <unsigned FORMAT>
__device__ inline unsigned multipliers_of(const unsigned char* row, unsigned input) {
    constexpr unsigned AT = FORMAT == Q2_K ? 80 : FORMAT == Q3_K ? 108 : FORMAT == Q6_K ? 208 : 0;
    return halves_at<FORMAT>(block_of<FORMAT>(row, input) + AT);
}
