// Products with weights in blocks, which stay as GGUF stores them (ggml-quants.c of llama.cpp).
//
// Few nodes are multiplied with blocks as they are read, so that a step reads each weight once, in 2.6 to 8.5 bits. With
// more of them, dense products win back the time of writing the weights as T first.
#include "tensor.h"

#include <type_traits>

// Neighbouring weights of a row that a thread unpacks at a time. A row is whole blocks, so runs have numbers.
constexpr unsigned RUN = 8;

// As engine/src/cuda/blocks.rs numbers them.
enum Format : unsigned { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };

using Bytes = Line<unsigned, 2>;

// Eight bytes that begin at a multiple of two, or of eight.
__device__ inline Bytes bytes(const unsigned char* from) {
    const unsigned short* at = reinterpret_cast<const unsigned short*>(from);
    return {{at[0] | unsigned(at[1]) << 16, at[2] | unsigned(at[3]) << 16}};
}

__device__ inline Bytes aligned_bytes(const unsigned char* from) {
    return line<2>(reinterpret_cast<const unsigned*>(from));
}

// Of byte `at`, the bits from `shift` on.
__device__ inline unsigned bits(const Bytes& bytes, unsigned at, unsigned shift, unsigned mask) {
    return bytes.numbers[at / 4] >> (at % 4 * 8 + shift) & mask;
}

__device__ inline float half_at(const unsigned char* from) { return number(*reinterpret_cast<const __half*>(from)); }

// Scale and minimum of 32 of the weights of Q4_K and Q5_K, in 6 bits: of the last four, the upper two bits lie above
// those of the first four.
__device__ inline void six_bits(const unsigned char* block, unsigned part, float& scale, float& minimum) {
    const unsigned char* packed = block + 4;
    const bool early = part < 4;
    const unsigned low = packed[part + 4], other = packed[early ? part : part - 4], own = packed[part];
    const unsigned of_scale = early ? other & 63 : (low & 15) | other >> 6 << 4;
    const unsigned of_minimum = early ? low & 63 : low >> 4 | own >> 6 << 4;
    scale = half_at(block) * float(of_scale);
    minimum = half_at(block + 2) * float(of_minimum);
}

// The weights of a run of a block of 32: an f16 scale, of some formats an f16 that is added, of some the fifth bits of
// all quants, then the quants.
template <unsigned FORMAT>
__device__ inline void unpack_32(const unsigned char* blocks, size_t run, float (&weights)[RUN]) {
    constexpr bool BYTES = FORMAT == Q8_0, SHIFTED = FORMAT == Q4_1 || FORMAT == Q5_1;
    constexpr bool FIFTH = FORMAT == Q5_0 || FORMAT == Q5_1;
    constexpr unsigned QUANTS = 2 + 2 * SHIFTED + 4 * FIFTH, BLOCK = QUANTS + (BYTES ? 32 : 16);
    const unsigned quarter = run % 4;
    const unsigned char* block = blocks + run / 4 * BLOCK;
    const Bytes quants = bytes(block + QUANTS + RUN * (BYTES ? quarter : quarter % 2));
    const float scale = half_at(block), shift = SHIFTED ? half_at(block + 2) : 0.0f;
    const unsigned fifth = FIFTH ? block[QUANTS - 4 + quarter] : 0;
    for (unsigned at = 0; at < RUN; at++) {
        if (BYTES) {
            weights[at] = scale * float((signed char)bits(quants, at, 0, 255));
        } else {
            const int quant = int(bits(quants, at, quarter / 2 * 4, 15) | (fifth >> at & 1) << 4);
            weights[at] = scale * float(quant - (SHIFTED ? 0 : FIFTH ? 16 : 8)) + shift;
        }
    }
}

// The weights of a run of a block of 256.
template <unsigned FORMAT>
__device__ inline void unpack_256(const unsigned char* blocks, size_t run, float (&weights)[RUN]) {
    const unsigned part = run / 4 % 8, half = part / 4, quarter = run % 4, sixteen = 2 * part + quarter / 2;
    if constexpr (FORMAT == Q2_K) {
        const unsigned char* block = blocks + run / 32 * 84;
        const Bytes quants = bytes(block + 16 + half * 32 + RUN * quarter);
        const unsigned factors = block[sixteen];
        const float scale = half_at(block + 80) * float(factors & 15), less = half_at(block + 82) * float(factors >> 4);
        for (unsigned at = 0; at < RUN; at++) {
            weights[at] = scale * float(bits(quants, at, part % 4 * 2, 3)) - less;
        }
    } else if constexpr (FORMAT == Q3_K) {
        const unsigned char* block = blocks + run / 32 * 110;
        const Bytes high = bytes(block + RUN * quarter), low = bytes(block + 32 + half * 32 + RUN * quarter);
        const unsigned char* packed = block + 96;
        const unsigned upper = packed[8 + sixteen % 4] >> sixteen / 4 * 2 & 3;
        const unsigned factor = (packed[sixteen % 8] >> sixteen / 8 * 4 & 15) | upper << 4;
        const float scale = half_at(block + 108) * float(int(factor) - 32);
        for (unsigned at = 0; at < RUN; at++) {
            const unsigned quant = bits(low, at, part % 4 * 2, 3) | bits(high, at, part, 1) << 2;
            weights[at] = scale * float(int(quant) - 4);
        }
    } else if constexpr (FORMAT == Q6_K) {
        const unsigned char* block = blocks + run / 32 * 210;
        const Bytes low = bytes(block + half * 64 + part % 2 * 32 + RUN * quarter);
        const Bytes high = bytes(block + 128 + half * 32 + RUN * quarter);
        const float scale = half_at(block + 208) * float((signed char)block[192 + sixteen]);
        for (unsigned at = 0; at < RUN; at++) {
            const unsigned quant = bits(low, at, part % 4 / 2 * 4, 15) | bits(high, at, part % 4 * 2, 3) << 4;
            weights[at] = scale * float(int(quant) - 32);
        }
    } else {
        constexpr bool FIFTH = FORMAT == Q5_K;
        const unsigned char* block = blocks + run / 32 * (FIFTH ? 176 : 144);
        const Bytes low = aligned_bytes(block + (FIFTH ? 48 : 16) + part / 2 * 32 + RUN * quarter);
        Bytes fifth = {};
        if (FIFTH) {
            fifth = aligned_bytes(block + 16 + RUN * quarter);
        }
        float scale, minimum;
        six_bits(block, part, scale, minimum);
        for (unsigned at = 0; at < RUN; at++) {
            const unsigned quant = bits(low, at, part % 2 * 4, 15) | bits(fifth, at, part, 1) << 4;
            weights[at] = scale * float(quant) - minimum;
        }
    }
}

template <unsigned FORMAT>
__device__ inline void unpack(const unsigned char* blocks, size_t run, float (&weights)[RUN]) {
    if constexpr (FORMAT < Q2_K) {
        unpack_32<FORMAT>(blocks, run, weights);
    } else {
        unpack_256<FORMAT>(blocks, run, weights);
    }
}

// Calls with a format that is known at compile time.
template <unsigned FORMAT = Q8_0, typename Work>
__device__ inline void with_format(unsigned format, Work work) {
    if constexpr (FORMAT < Q6_K) {
        if (format != FORMAT) {
            return with_format<FORMAT + 1>(format, work);
        }
    }
    work(std::integral_constant<unsigned, FORMAT>());
}

// Projections of one input, whose outputs stand one behind the other: at most three, some null.
struct Parts {
    const unsigned char* blocks[3];
    unsigned outputs[3];
    unsigned formats;  // a byte each
};

__device__ inline unsigned ceil_div(unsigned a, unsigned b) { return (a + b - 1) / b; }

// One of them, the outputs before it, and where it is reached.
struct Part {
    const unsigned char* blocks;
    unsigned outputs, format, before;
    size_t at;
};

// The part that has number `at` where each has `count(outputs)` of something; the last one's number may be too large.
// Registers have no addresses, so that no index of a part is a variable.
template <typename Count>
__device__ inline Part part_of(const Parts& parts, size_t at, Count count) {
    Part part = {parts.blocks[0], parts.outputs[0], parts.formats & 255, 0, at};
#pragma unroll
    for (unsigned next = 1; next < 3; next++) {
        if (parts.outputs[next] > 0 && part.at >= count(part.outputs)) {
            part = {parts.blocks[next], parts.outputs[next], parts.formats >> 8 * next & 255,
                    part.before + part.outputs, part.at - count(part.outputs)};
        }
    }
    return part;
}

constexpr unsigned TILE_OUTPUTS = 16;
constexpr unsigned TILE_COLUMNS = 8;
constexpr unsigned PRODUCT_WARPS = 8;
constexpr unsigned STEP = 4 * RUN;  // inputs that a warp takes at a time

// Adds a warp's share of TILE_OUTPUTS outputs from `first` on for TILE_COLUMNS · TILES nodes. Of two products of tensor
// cores a lane has those terms that it can load at once: a run of the outputs lane / 4 and lane / 4 + 8 each, and the
// same inputs of the nodes lane / 4 of each tile.
template <unsigned TILES, unsigned FORMAT, typename T>
__device__ inline void multiply_blocks(const T* x, const unsigned char* blocks, unsigned first, unsigned outputs,
                                       unsigned nodes, unsigned inputs, float (&sums)[TILES][4]) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    // What does not exist is computed as what is last.
    const size_t low = size_t(min(first + outer, outputs - 1)) * (inputs / RUN) + inner;
    const size_t high = size_t(min(first + outer + 8, outputs - 1)) * (inputs / RUN) + inner;
#pragma unroll(TILES < 4 ? 2 : 1)
    for (unsigned step = warp; step < inputs / STEP; step += PRODUCT_WARPS) {
        float one[RUN], two[RUN];
        unpack<FORMAT>(blocks, low + 4 * step, one);
        unpack<FORMAT>(blocks, high + 4 * step, two);
        unsigned weights[2][4];
        for (unsigned at = 0; at < RUN / 2; at++) {
            weights[at / 2][at % 2 * 2] = pack<T>(one[2 * at], one[2 * at + 1]);
            weights[at / 2][at % 2 * 2 + 1] = pack<T>(two[2 * at], two[2 * at + 1]);
        }
        for (unsigned tile = 0; tile < TILES; tile++) {
            const unsigned node = min(TILE_COLUMNS * tile + outer, nodes - 1);
            const auto terms = words<4>(x + size_t(node) * inputs + STEP * step + RUN * inner);
            multiply_add(sums[tile], weights[0], terms.numbers[0], terms.numbers[1], T());
            multiply_add(sums[tile], weights[1], terms.numbers[2], terms.numbers[3], T());
        }
    }
}

// y = x Wᵀ for at most TILE_COLUMNS · TILES nodes, x [nodes, inputs] and y [nodes, all outputs], which is f32 if
// `is_wide` says so. The warps of a block share the inputs of TILE_OUTPUTS outputs; their sums are added in the order of
// warps. Grid [tiles of all parts], 32 · PRODUCT_WARPS threads, a float for each warp, output and node.
template <unsigned TILES, typename T>
__device__ void blocks_product(const T* x, void* y, Parts parts, unsigned nodes, unsigned inputs, unsigned is_wide) {
    extern __shared__ float shared[];
    constexpr unsigned SUMS = TILE_OUTPUTS * TILE_COLUMNS * TILES;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    const unsigned all = parts.outputs[0] + parts.outputs[1] + parts.outputs[2];
    const Part part = part_of(parts, blockIdx.x, [](unsigned outputs) { return ceil_div(outputs, TILE_OUTPUTS); });
    const unsigned first = TILE_OUTPUTS * part.at;

    float sums[TILES][4] = {};
    with_format(part.format, [&](auto format) {
        multiply_blocks<TILES, format>(x, part.blocks, first, part.outputs, nodes, inputs, sums);
    });
    for (unsigned at = 0; at < 4 * TILES; at++) {
        const unsigned node = TILE_COLUMNS * (at / 4) + 2 * inner + at % 2, output = outer + 8 * (at % 4 / 2);
        shared[SUMS * warp + TILE_OUTPUTS * node + output] = sums[at / 4][at % 4];
    }
    __syncthreads();
    for (unsigned at = threadIdx.x; at < SUMS; at += 32 * PRODUCT_WARPS) {
        const unsigned node = at / TILE_OUTPUTS, output = first + at % TILE_OUTPUTS;
        if (node >= nodes || output >= part.outputs) {
            continue;
        }
        float sum = 0.0f;
        for (unsigned other = 0; other < PRODUCT_WARPS; other++) {
            sum += shared[SUMS * other + at];
        }
        const size_t to = size_t(node) * all + part.before + output;
        if (is_wide) {
            store(static_cast<float*>(y) + to, sum);
        } else {
            store(static_cast<T*>(y) + to, sum);
        }
    }
}

// The weights of all parts, [all outputs, inputs]; a thread makes a run. Grid [ceil(runs / threads)].
template <typename T>
__device__ void unpack_blocks(T* to, Parts parts, unsigned inputs) {
    const size_t run = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    auto runs = [&](unsigned outputs) { return size_t(outputs) * (inputs / RUN); };
    const Part part = part_of(parts, run, runs);
    if (part.at >= runs(part.outputs)) {
        return;
    }
    float weights[RUN];
    with_format(part.format, [&](auto format) { unpack<format>(part.blocks, part.at, weights); });
    for (unsigned first = 0; first < RUN; first += WIDE<T>) {
        Line<T, WIDE<T>> written;
        for (unsigned of = 0; of < WIDE<T>; of++) {
            store(written.numbers + of, weights[first + of]);
        }
        store(to + RUN * run + first, written);
    }
}

#define UNPACK_BLOCKS(SUFFIX, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        unpack_blocks_##SUFFIX(T* to, const unsigned char* a, const unsigned char* b, const unsigned char* c,          \
                               unsigned inputs, unsigned of_a, unsigned of_b, unsigned of_c, unsigned formats) {       \
        unpack_blocks(to, {{a, b, c}, {of_a, of_b, of_c}, formats}, inputs);                                           \
    }

#define BLOCKS_PRODUCT(TILES, SUFFIX, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * PRODUCT_WARPS, 2)                                                 \
        blocks_product_##TILES##_##SUFFIX(const T* x, void* y, const unsigned char* a, const unsigned char* b,         \
                                          const unsigned char* c, unsigned inputs, unsigned of_a, unsigned of_b,       \
                                          unsigned of_c, unsigned formats, unsigned nodes, unsigned is_wide) {         \
        blocks_product<TILES>(x, y, {{a, b, c}, {of_a, of_b, of_c}, formats}, nodes, inputs, is_wide);                 \
    }

UNPACK_BLOCKS(f32, float)
UNPACK_BLOCKS(f16, __half)
UNPACK_BLOCKS(bf16, __nv_bfloat16)
BLOCKS_PRODUCT(1, f16, __half)
BLOCKS_PRODUCT(2, f16, __half)
BLOCKS_PRODUCT(4, f16, __half)
BLOCKS_PRODUCT(1, bf16, __nv_bfloat16)
BLOCKS_PRODUCT(2, bf16, __nv_bfloat16)
BLOCKS_PRODUCT(4, bf16, __nv_bfloat16)
