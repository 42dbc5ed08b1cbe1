// Products with weights in blocks.
//
// Blocks are packed anew when a model is loaded: a tile of 16 outputs and 32 inputs lies together, in the order in
// which the lanes of a warp take it, and has as many bits as its blocks, or at most a fifth of a bit more for a weight.
// As GGUF has them, a lane gathered bytes: on an H200 products of 8 nodes with Q8_0 and Q4_K took twice the time of
// dense ones (docs/research/gpu.md). Tensor cores multiply quants, which are whole numbers that 16 bits hold exactly,
// and scales multiply sums of 16 or 32 inputs.
//
// Up to 64 nodes are multiplied with blocks as they are read. With more, dense products win back the time of writing
// the weights as T first.
#include "blocks.h"
#include "tensor.h"

#include <type_traits>

constexpr unsigned TILE_OUTPUTS = 16;
constexpr unsigned TILE_INPUTS = 32;

// Bytes of a tile: its quants by the planes of their bits, then what scales them, of each row beside that of the row
// eight further. Eight tiles of blocks of 256 lie behind their multipliers.
template <unsigned FORMAT>
constexpr unsigned LANE_BYTES = EIGHT_BITS<FORMAT> ? 16 : FOUR_BITS<FORMAT> ? 8 : 0;
template <unsigned FORMAT>
constexpr unsigned TWOS = 32 * LANE_BYTES<FORMAT>;
template <unsigned FORMAT>
constexpr unsigned ONES = TWOS<FORMAT> + 128 * TWO_BITS<FORMAT>;
template <unsigned FORMAT>
constexpr unsigned FACTORS = ONES<FORMAT> + 64 * ONE_BIT<FORMAT>;
template <unsigned FORMAT>
constexpr unsigned FACTOR_BYTES = !IN_PARTS<FORMAT> && HAS_MINIMUM<FORMAT> ? 4 : 2;
template <unsigned FORMAT>
constexpr unsigned TILE_BYTES = FACTORS<FORMAT> + TILE_OUTPUTS * FACTOR_BYTES<FORMAT>;
constexpr unsigned MULTIPLIERS = 4 * TILE_OUTPUTS;

// What engine/src/cuda/blocks.rs makes room for.
static_assert(TILE_BYTES<Q8_0> == 544 && TILE_BYTES<Q4_0> == 288 && TILE_BYTES<Q4_1> == 320 &&
              TILE_BYTES<Q5_0> == 352 && TILE_BYTES<Q5_1> == 384 && TILE_BYTES<Q2_K> == 160 &&
              TILE_BYTES<Q3_K> == 224 && TILE_BYTES<Q4_K> == 288 && TILE_BYTES<Q5_K> == 352 &&
              TILE_BYTES<Q6_K> == 416 && MULTIPLIERS == 64);

// Where a tile begins, and the multipliers of its blocks of 256.
template <unsigned FORMAT, typename Byte>
__device__ inline Byte* tile_at(Byte* packed, size_t tile, unsigned step, unsigned steps) {
    const size_t at = tile * steps + step;
    return packed + at * TILE_BYTES<FORMAT> + (IN_PARTS<FORMAT> ? (at / 8 + 1) * MULTIPLIERS : 0);
}

template <unsigned FORMAT, typename Byte>
__device__ inline Byte* multipliers_at(Byte* packed, size_t tile, unsigned step, unsigned steps) {
    return packed + (tile * steps + step) / 8 * (8 * TILE_BYTES<FORMAT> + MULTIPLIERS);
}

// Operands of two products of tensor cores, of 16 inputs each: in register `of` of product `product`, a lane has the
// output lane / 4 + 8 · (of % 2) and two neighbouring inputs from this one on. With a scale for 16 inputs each product
// has those of one; else a lane's inputs are neighbours, so that one load takes those of a node.
template <unsigned FORMAT>
__device__ inline unsigned input_of(unsigned inner, unsigned product, unsigned of) {
    return (IS_FINE<FORMAT> ? 16 * product + 4 * inner : 8 * inner + 4 * product) + of / 2 * 2;
}

// Packs what a lane takes of a tile; `blocks` are rows as GGUF has them. What does not exist is what is last.
template <unsigned FORMAT>
__device__ void pack_lane(const unsigned char* blocks, unsigned char* packed, unsigned outputs, unsigned inputs,
                          size_t at) {
    const unsigned lane = at % 32, outer = lane / 4, inner = lane % 4, steps = inputs / TILE_INPUTS;
    const unsigned step = at / 32 % steps, first = TILE_INPUTS * step;
    const size_t tile = at / 32 / steps, row_bytes = size_t(inputs / BLOCK_INPUTS<FORMAT>) * BLOCK_BYTES<FORMAT>;
    const unsigned char* rows[2];
    for (unsigned of = 0; of < 2; of++) {
        rows[of] = blocks + min(unsigned(TILE_OUTPUTS * tile + outer + 8 * of), outputs - 1) * row_bytes;
    }
    unsigned eights[4] = {}, fours[2] = {}, twos = 0, ones = 0;
    for (unsigned at = 0; at < 16; at++) {
        const unsigned product = at / 8, of = at / 2 % 4, upper = at % 2, pair = 4 * product + of;
        const unsigned quant = quant_of<FORMAT>(rows[of % 2], first + input_of<FORMAT>(inner, product, of) + upper);
        eights[pair / 2] |= quant << 8 * (pair % 2) << 16 * upper;
        fours[product] |= (quant & 15) << 4 * of << 16 * upper;
        twos |= (quant >> TWO_BITS_AT<FORMAT> & 3) << 2 * pair << 16 * upper;
        ones |= (quant >> ONE_BIT_AT<FORMAT> & 1) << pair << 8 * upper;
    }
    unsigned char* to = tile_at<FORMAT>(packed, tile, step, steps);
    if constexpr (EIGHT_BITS<FORMAT>) {
        const Line<unsigned, 4> all = {{eights[0], eights[1], eights[2], eights[3]}};
        store(reinterpret_cast<unsigned*>(to) + 4 * lane, all);
    } else if constexpr (FOUR_BITS<FORMAT>) {
        store(reinterpret_cast<unsigned*>(to) + 2 * lane, Line<unsigned, 2>{{fours[0], fours[1]}});
    }
    if constexpr (TWO_BITS<FORMAT>) {
        reinterpret_cast<unsigned*>(to + TWOS<FORMAT>)[lane] = twos;
    }
    if constexpr (ONE_BIT<FORMAT>) {
        reinterpret_cast<unsigned short*>(to + ONES<FORMAT>)[lane] = ones;
    }
    for (unsigned of = 0; of < 2 && inner == 0; of++) {
        const unsigned factors = factors_of<FORMAT>(rows[of], first), row = 2 * outer + of;
        if constexpr (FACTOR_BYTES<FORMAT> == 4) {
            reinterpret_cast<unsigned*>(to + FACTORS<FORMAT>)[row] = factors;
        } else {
            reinterpret_cast<unsigned short*>(to + FACTORS<FORMAT>)[row] = factors;
        }
        if (IN_PARTS<FORMAT> && step % 8 == 0) {
            unsigned char* multipliers = multipliers_at<FORMAT>(packed, tile, step, steps);
            reinterpret_cast<unsigned*>(multipliers)[row] = multipliers_of<FORMAT>(rows[of], first);
        }
    }
}

// The quants that a lane has of a tile, two in a word.
using Pairs = unsigned[2][4];

template <unsigned FORMAT>
__device__ inline void load_quants(const unsigned char* tile, unsigned lane, Pairs& pairs) {
    Line<unsigned, 4> eights = {};
    Line<unsigned, 2> fours = {};
    unsigned twos = 0, ones = 0;
    if constexpr (EIGHT_BITS<FORMAT>) {
        eights = line<4>(reinterpret_cast<const unsigned*>(tile) + 4 * lane);
    } else if constexpr (FOUR_BITS<FORMAT>) {
        fours = line<2>(reinterpret_cast<const unsigned*>(tile) + 2 * lane);
    }
    if constexpr (TWO_BITS<FORMAT>) {
        twos = reinterpret_cast<const unsigned*>(tile + TWOS<FORMAT>)[lane];
    }
    if constexpr (ONE_BIT<FORMAT>) {
        const unsigned both = reinterpret_cast<const unsigned short*>(tile + ONES<FORMAT>)[lane];
        ones = (both & 255) | both >> 8 << 16;
    }
#pragma unroll
    for (unsigned product = 0; product < 2; product++) {
#pragma unroll
        for (unsigned of = 0; of < 4; of++) {
            const unsigned pair = 4 * product + of;
            unsigned quants = 0;
            if constexpr (EIGHT_BITS<FORMAT>) {
                quants = eights.numbers[pair / 2] >> 8 * (pair % 2) & 0x00ff00ff;
            } else if constexpr (FOUR_BITS<FORMAT>) {
                quants = fours.numbers[product] >> 4 * of & 0x000f000f;
            }
            if constexpr (TWO_BITS<FORMAT>) {
                quants |= (twos >> 2 * pair & 0x00030003) << TWO_BITS_AT<FORMAT>;
            }
            if constexpr (ONE_BIT<FORMAT>) {
                quants |= (ones >> pair & 0x00010001) << ONE_BIT_AT<FORMAT>;
            }
            pairs[product][of] = quants;
        }
    }
}

// Two quants less their offset, as T: a number whose last bit of 16 is worth 1 takes them in, and is taken from them.
template <unsigned FORMAT>
__device__ inline unsigned signed_pair(unsigned quants, __half) {
    return less<__half>(quants | 0x64006400, 0x64006400 + 0x10001 * OFFSET<FORMAT>);
}

template <unsigned FORMAT>
__device__ inline unsigned signed_pair(unsigned quants, __nv_bfloat16) {
    if constexpr (EIGHT_BITS<FORMAT>) {
        // Seven bits fit behind 128; the eighth says whether 128 or 256 is to be taken away.
        return less<__nv_bfloat16>((quants & 0x007f007f) | 0x43004300, (~quants & 0x00800080) | 0x43004300);
    } else {
        return less<__nv_bfloat16>(quants | 0x43004300, 0x43004300 + 0x10001 * OFFSET<FORMAT>);
    }
}

// What multiplies the quants of a lane's two outputs, and what is taken from the products; of two times 16 inputs, or
// of all 32.
struct Scales {
    float by[2][2], less[2][2];
};

__device__ inline float half_of(unsigned word, unsigned upper) {
    return number(__ushort_as_half((unsigned short)(word >> 16 * upper)));
}

template <unsigned FORMAT>
__device__ inline Scales load_scales(const unsigned char* tile, const unsigned char* multipliers, unsigned outer) {
    Scales scales = {};
    if constexpr (FACTOR_BYTES<FORMAT> == 4) {
        const auto both = line<2>(reinterpret_cast<const unsigned*>(tile + FACTORS<FORMAT>) + 2 * outer);
        for (unsigned row = 0; row < 2; row++) {
            scales.by[row][0] = half_of(both.numbers[row], 0);
            scales.less[row][0] = -half_of(both.numbers[row], 1);  // there it is added
        }
        return scales;
    }
    const unsigned factors = reinterpret_cast<const unsigned*>(tile + FACTORS<FORMAT>)[outer];
    if constexpr (!IN_PARTS<FORMAT>) {
        scales.by[0][0] = half_of(factors, 0);
        scales.by[1][0] = half_of(factors, 1);
        return scales;
    }
    const auto all = line<2>(reinterpret_cast<const unsigned*>(multipliers) + 2 * outer);
    for (unsigned row = 0; row < 2; row++) {
        const float by = half_of(all.numbers[row], 0), less = half_of(all.numbers[row], 1);
        const unsigned first = factors >> 16 * row & 255, second = factors >> (16 * row + 8) & 255;
        if constexpr (FORMAT == Q2_K) {
            scales.by[row][0] = by * float(first & 15);
            scales.by[row][1] = by * float(second & 15);
            scales.less[row][0] = less * float(first >> 4);
            scales.less[row][1] = less * float(second >> 4);
        } else if constexpr (IS_FINE<FORMAT>) {
            scales.by[row][0] = by * float((signed char)first);
            scales.by[row][1] = by * float((signed char)second);
        } else {
            scales.by[row][0] = by * float(first);
            scales.less[row][0] = less * float(second);
        }
    }
    return scales;
}

// Calls with a format that is known at compile time, LAST at most.
template <unsigned LAST, unsigned FORMAT = Q8_0, typename Work>
__device__ inline void with_format(unsigned format, Work work) {
    if constexpr (FORMAT < LAST) {
        if (format != FORMAT) {
            return with_format<LAST, FORMAT + 1>(format, work);
        }
    }
    work(std::integral_constant<unsigned, FORMAT>());
}

// Projections of one input, whose outputs stand one behind the other: at most three, some null.
struct Parts {
    const unsigned char* weights[3];
    unsigned outputs[3];
    unsigned formats;  // a byte each
};

__device__ inline unsigned ceil_div(unsigned a, unsigned b) { return (a + b - 1) / b; }

// One of them, the outputs before it, and where it is reached.
struct Part {
    const unsigned char* weights;
    unsigned outputs, format, before;
    size_t at;
};

// The part that has number `at` where each has `count(outputs)` of something; the last one's number may be too large.
// Registers have no addresses, so that no index of a part is a variable.
template <typename Count>
__device__ inline Part part_of(const Parts& parts, size_t at, Count count) {
    Part part = {parts.weights[0], parts.outputs[0], parts.formats & 255, 0, at};
#pragma unroll
    for (unsigned next = 1; next < 3; next++) {
        if (parts.outputs[next] > 0 && part.at >= count(part.outputs)) {
            part = {parts.weights[next], parts.outputs[next], parts.formats >> 8 * next & 255,
                    part.before + part.outputs, part.at - count(part.outputs)};
        }
    }
    return part;
}

constexpr unsigned NODES = 8;  // of a product of tensor cores
constexpr unsigned PRODUCT_WARPS = 8;

// Tiles of outputs of a warp: with more nodes two, which share the inputs that they read.
template <unsigned TILES>
constexpr unsigned OUTPUT_TILES = TILES < 4 ? 1 : 2;

// What a lane has of the sums of a warp: for each 16 outputs and 8 nodes, two outputs of two nodes.
template <unsigned TILES>
using WarpSums = float[OUTPUT_TILES<TILES>][TILES][4];

// A node's inputs for two products of tensor cores.
template <unsigned FORMAT, typename T>
__device__ inline Line<unsigned, 4> load_inputs(const T* x, unsigned inner) {
    if constexpr (IS_FINE<FORMAT>) {
        const auto first = words<2>(x + 4 * inner), second = words<2>(x + 16 + 4 * inner);
        return {{first.numbers[0], first.numbers[1], second.numbers[0], second.numbers[1]}};
    } else {
        return words<4>(x + 8 * inner);
    }
}

// Adds a product of quants, and takes the minimums times the sums of inputs, `ones`.
template <unsigned FORMAT, typename T>
__device__ inline void add_scaled(float (&sums)[4], const Pairs& quants, const Scales& scales,
                                  const Line<unsigned, 4>& terms, const float (&ones)[2][4]) {
    constexpr unsigned GROUPS = 1 + IS_FINE<FORMAT>;
    float products[2][4] = {};
    for (unsigned product = 0; product < 2; product++) {
        multiply_add(products[GROUPS == 1 ? 0 : product], quants[product], terms.numbers[2 * product],
                     terms.numbers[2 * product + 1], T());
    }
    for (unsigned group = 0; group < GROUPS; group++) {
        for (unsigned at = 0; at < 4; at++) {
            sums[at] += scales.by[at / 2][group] * products[group][at];
            if (HAS_MINIMUM<FORMAT>) {
                sums[at] -= scales.less[at / 2][group] * ones[group][at];
            }
        }
    }
}

// Adds a warp's share of all inputs, in blocks.
template <unsigned TILES, unsigned FORMAT, typename T>
__device__ inline void multiply(const T* x, const Part& part, unsigned nodes, unsigned inputs, WarpSums<TILES>& sums) {
    constexpr unsigned OUTPUTS = OUTPUT_TILES<TILES>;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    const unsigned steps = inputs / TILE_INPUTS, last = (part.outputs - 1) / TILE_OUTPUTS;
    const unsigned all_ones = pack<T>(1.0f, 1.0f);
    const unsigned one[4] = {all_ones, all_ones, all_ones, all_ones};
#pragma unroll(TILES == 1 ? 4 : TILES == 2 ? 2 : 1)
    for (unsigned step = warp; step < steps; step += PRODUCT_WARPS) {
        Pairs quants[OUTPUTS];
        Scales scales[OUTPUTS];
        for (unsigned of = 0; of < OUTPUTS; of++) {
            const size_t tile = min(unsigned(OUTPUTS * part.at + of), last);
            const unsigned char* at = tile_at<FORMAT>(part.weights, tile, step, steps);
            load_quants<FORMAT>(at, lane, quants[of]);
            scales[of] = load_scales<FORMAT>(at, multipliers_at<FORMAT>(part.weights, tile, step, steps), outer);
            for (unsigned pair = 0; pair < 8; pair++) {
                quants[of][pair / 4][pair % 4] = signed_pair<FORMAT>(quants[of][pair / 4][pair % 4], T());
            }
        }
        for (unsigned tile = 0; tile < TILES; tile++) {
            const size_t node = min(NODES * tile + outer, nodes - 1);
            const auto terms = load_inputs<FORMAT>(x + node * inputs + TILE_INPUTS * step, inner);
            float ones[2][4] = {};
            if constexpr (HAS_MINIMUM<FORMAT>) {
                for (unsigned product = 0; product < 2; product++) {
                    multiply_add(ones[IS_FINE<FORMAT> ? product : 0], one, terms.numbers[2 * product],
                                 terms.numbers[2 * product + 1], T());
                }
            }
            for (unsigned of = 0; of < OUTPUTS; of++) {
                add_scaled<FORMAT, T>(sums[of][tile], quants[of], scales[of], terms, ones);
            }
        }
    }
}

// The same with rows [outputs, inputs] of T.
template <unsigned TILES, typename T>
__device__ inline void multiply_dense(const T* x, const Part& part, unsigned nodes, unsigned inputs,
                                      WarpSums<TILES>& sums) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    const T* rows[2];
    for (unsigned of = 0; of < 2; of++) {
        const size_t row = min(unsigned(TILE_OUTPUTS * part.at + 8 * of + outer), part.outputs - 1);
        rows[of] = reinterpret_cast<const T*>(part.weights) + row * inputs;
    }
#pragma unroll 4
    for (unsigned step = warp; step < inputs / TILE_INPUTS; step += PRODUCT_WARPS) {
        const unsigned input = TILE_INPUTS * step + 8 * inner;
        Pairs pairs;
        for (unsigned of = 0; of < 2; of++) {
            const auto own = words<4>(rows[of] + input);
            for (unsigned at = 0; at < 4; at++) {
                pairs[at / 2][at % 2 * 2 + of] = own.numbers[at];
            }
        }
        for (unsigned tile = 0; tile < TILES; tile++) {
            const size_t node = min(NODES * tile + outer, nodes - 1);
            const auto terms = words<4>(x + node * inputs + input);
            multiply_add(sums[0][tile], pairs[0], terms.numbers[0], terms.numbers[1], T());
            multiply_add(sums[0][tile], pairs[1], terms.numbers[2], terms.numbers[3], T());
        }
    }
}

// y = x Wᵀ for at most NODES · TILES nodes, x [nodes, inputs] and y [nodes, all outputs], which is f32 if `is_wide`
// says so. The warps of a block share the inputs of its outputs; their sums are added in the order of warps, after each
// of the last four is added to one of the first. Grid [tiles of all parts], 32 · PRODUCT_WARPS threads, a float for each
// output, node and two warps.
template <unsigned TILES, typename T>
__device__ void few_product(const T* x, void* y, Parts parts, unsigned nodes, unsigned inputs, unsigned is_wide) {
    extern __shared__ float shared[];
    constexpr unsigned OUTPUTS = TILE_OUTPUTS * OUTPUT_TILES<TILES>, SUMS = OUTPUTS * NODES * TILES;
    constexpr unsigned HALF = PRODUCT_WARPS / 2;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    const unsigned all = parts.outputs[0] + parts.outputs[1] + parts.outputs[2];
    const Part part = part_of(parts, blockIdx.x, [](unsigned outputs) { return ceil_div(outputs, OUTPUTS); });

    WarpSums<TILES> sums = {};
    // With more nodes cublasLt multiplies dense weights.
    with_format<TILES == 1 ? DENSE : Q6_K>(part.format, [&](auto format) {
        constexpr unsigned FORMAT = decltype(format)::value;
        if constexpr (FORMAT == DENSE) {
            multiply_dense<TILES>(x, part, nodes, inputs, sums);
        } else {
            multiply<TILES, FORMAT>(x, part, nodes, inputs, sums);
        }
    });
    for (unsigned turn = 0; turn < 2; turn++) {
        if (warp / HALF != turn) {
#pragma unroll
            for (unsigned at = 0; at < SUMS / 32; at++) {
                const unsigned of = at / (4 * TILES), tile = at / 4 % TILES, own = at % 4;
                const unsigned node = NODES * tile + 2 * inner + own % 2;
                float* to = shared + SUMS * (warp % HALF) + OUTPUTS * node + TILE_OUTPUTS * of + outer + own / 2 * 8;
                *to = turn == 0 ? sums[of][tile][own] : sums[of][tile][own] + *to;
            }
        }
        __syncthreads();
    }
    for (unsigned at = threadIdx.x; at < SUMS; at += 32 * PRODUCT_WARPS) {
        const unsigned node = at / OUTPUTS, output = unsigned(OUTPUTS * part.at) + at % OUTPUTS;
        if (node >= nodes || output >= part.outputs) {
            continue;
        }
        float sum = 0.0f;
        for (unsigned other = 0; other < HALF; other++) {
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

// Lanes of all tiles of so many outputs.
__device__ inline size_t lanes_of(unsigned outputs, unsigned inputs) {
    return size_t(ceil_div(outputs, TILE_OUTPUTS)) * (inputs / TILE_INPUTS) * 32;
}

// The weights of all parts, [all outputs, inputs]; a thread makes those of a lane. Grid [ceil(lanes / threads)].
template <typename T>
__device__ void unpack_blocks(T* to, Parts parts, unsigned inputs) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const Part part = part_of(parts, at, [&](unsigned outputs) { return lanes_of(outputs, inputs); });
    if (part.at >= lanes_of(part.outputs, inputs)) {
        return;
    }
    const unsigned lane = at % 32, outer = lane / 4, inner = lane % 4, steps = inputs / TILE_INPUTS;
    const unsigned step = part.at / 32 % steps;
    const size_t tile = part.at / 32 / steps;
    with_format<Q6_K>(part.format, [&](auto format) {
        constexpr unsigned FORMAT = decltype(format)::value;
        const unsigned char* from = tile_at<FORMAT>(part.weights, tile, step, steps);
        Pairs quants;
        load_quants<FORMAT>(from, lane, quants);
        const auto scales = load_scales<FORMAT>(from, multipliers_at<FORMAT>(part.weights, tile, step, steps), outer);
        for (unsigned row = 0; row < 2; row++) {
            float weights[8];
            for (unsigned at = 0; at < 8; at++) {
                const unsigned product = at / 4, group = IS_FINE<FORMAT> ? product : 0;
                const unsigned quant = quants[product][at / 2 % 2 * 2 + row] >> at % 2 * 16 & 0xffff;
                const float signed_quant = float(int(quant) - int(OFFSET<FORMAT>));
                weights[at] = scales.by[row][group] * signed_quant - scales.less[row][group];
            }
            // Neighbours of a fine format are 4, of others 8: lines of 8 bytes with gaps took twice the time.
            constexpr unsigned LENGTH = IS_FINE<FORMAT> || sizeof(T) == 4 ? 4 : 8;
            const size_t output = TILE_OUTPUTS * tile + outer + 8 * row;
            for (unsigned first = 0; first < 8 && output < part.outputs; first += LENGTH) {
                Line<T, LENGTH> written;
                for (unsigned of = 0; of < LENGTH; of++) {
                    store(written.numbers + of, weights[first + of]);
                }
                const size_t input = TILE_INPUTS * step + input_of<FORMAT>(inner, first / 4, 0);
                store(to + (part.before + output) * inputs + input, written);
            }
        }
    });
}

// Grid [ceil(lanes / threads)].
extern "C" __global__ void __launch_bounds__(256)
    pack_blocks_u8(const unsigned char* blocks, unsigned char* packed, unsigned outputs, unsigned inputs,
                   unsigned format) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < lanes_of(outputs, inputs)) {
        with_format<Q6_K>(format, [&](auto of) {
            pack_lane<decltype(of)::value>(blocks, packed, outputs, inputs, at);
        });
    }
}

#define UNPACK_BLOCKS(SUFFIX, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        unpack_blocks_##SUFFIX(T* to, const unsigned char* a, const unsigned char* b, const unsigned char* c,          \
                               unsigned inputs, unsigned of_a, unsigned of_b, unsigned of_c, unsigned formats) {       \
        unpack_blocks(to, {{a, b, c}, {of_a, of_b, of_c}, formats}, inputs);                                           \
    }

#define FEW_PRODUCT(TILES, SUFFIX, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * PRODUCT_WARPS, TILES < 8 ? 2 : 1)                                 \
        few_product_##TILES##_##SUFFIX(const T* x, void* y, const unsigned char* a, const unsigned char* b,            \
                                       const unsigned char* c, unsigned inputs, unsigned of_a, unsigned of_b,          \
                                       unsigned of_c, unsigned formats, unsigned nodes, unsigned is_wide) {            \
        few_product<TILES>(x, y, {{a, b, c}, {of_a, of_b, of_c}, formats}, nodes, inputs, is_wide);                    \
    }

UNPACK_BLOCKS(f32, float)
UNPACK_BLOCKS(f16, __half)
UNPACK_BLOCKS(bf16, __nv_bfloat16)
FEW_PRODUCT(1, f16, __half)
FEW_PRODUCT(2, f16, __half)
FEW_PRODUCT(4, f16, __half)
FEW_PRODUCT(8, f16, __half)
FEW_PRODUCT(1, bf16, __nv_bfloat16)
FEW_PRODUCT(2, bf16, __nv_bfloat16)
FEW_PRODUCT(4, bf16, __nv_bfloat16)
FEW_PRODUCT(8, bf16, __nv_bfloat16)
