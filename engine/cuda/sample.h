// The token that a row of logits draws under noise that is a function of text, place and token: the same as on the CPU
// (decode/src/sampling.rs, cpu/src/sample.rs), where the logits are.
#pragma once

#include "number.h"

// How a row draws; six words in this order. A sharpness of 0 takes the most probable token.
struct Draw {
    unsigned key_low, key_high, place, sharpness, top_k, top_p;
};

constexpr unsigned LANES = 16, NOISE_BLOCK = 4 * LANES, ROUNDS = 7;

// The noise of four tokens, which are LANES apart: Philox4x32.
struct Noise {
    unsigned words[4];
};

__device__ inline Noise noise(const Draw& draw, unsigned counter) {
    Noise x = {{counter, draw.place, 0, 0}};
    unsigned low = draw.key_low, high = draw.key_high;
    for (unsigned round = 0; round < ROUNDS; round++) {
        const unsigned a = x.words[0], c = x.words[2];
        x = {{__umulhi(0xcd9e8d57, c) ^ x.words[1] ^ low, 0xcd9e8d57 * c,
              __umulhi(0xd2511f53, a) ^ x.words[3] ^ high, 0xd2511f53 * a}};
        low += 0x9e3779b9;
        high += 0xbb67ae85;
    }
    return x;
}

// A row of logits as weights in 0..=1.
template <typename T>
struct Weights {
    const T* logits;
    unsigned width;
    float max, sharpness;

    __device__ float operator[](unsigned token) const {
        const float x = (number(logits[token]) - max) * sharpness;
        return x > -87.0f ? expf(x) : 0.0f;
    }

    // Of all tokens of at least this weight their number or the sum of their weights.
    template <bool COUNT>
    __device__ float from(float least, float* shared) const {
        float sum = 0.0f;
        for (unsigned token = threadIdx.x; token < width; token += blockDim.x) {
            const float weight = (*this)[token];
            sum += weight >= least ? (COUNT ? 1.0f : weight) : 0.0f;
        }
        sum = block_sum(sum, shared);
        __syncthreads();
        return sum;
    }

    // The largest weight, from `least` on, that so many tokens reach, or tokens of so large a sum: by halving the range
    // of its bits, which are in the order of the numbers.
    template <bool COUNT>
    __device__ float reached(float goal, float least, float* shared) const {
        unsigned low = __float_as_uint(least), high = __float_as_uint(1.0f) + 1;
        while (high - low > 1) {
            const unsigned middle = low + (high - low) / 2;
            if (from<COUNT>(__uint_as_float(middle), shared) >= goal) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return __uint_as_float(low);
    }
};

// The weight that a token needs to be drawn.
template <typename T>
__device__ float least_weight(const Weights<T>& weights, const Draw& draw, float* shared) {
    const float top_p = __uint_as_float(draw.top_p);
    float least = 0.0f;
    if (draw.top_k < weights.width) {
        least = weights.template reached<true>(draw.top_k, least, shared);
    }
    if (top_p < 1.0f) {
        const float total = weights.template from<false>(least, shared);
        least = weights.template reached<false>(top_p * total, least, shared);
    }
    return least;
}

// A token and when it arrives.
struct Arrival {
    double time;
    unsigned token;
};

__device__ inline Arrival earlier(const Arrival& a, const Arrival& b) {
    return b.time < a.time || (b.time == a.time && b.token < a.token) ? b : a;
}

// The first token of at least this weight to arrive. `shared` has four words for each warp.
template <typename T>
__device__ unsigned race(const Weights<T>& weights, float least, const Draw& draw, float* shared) {
    Arrival first = {INFINITY, 0};
    const unsigned counters = (weights.width + NOISE_BLOCK - 1) / NOISE_BLOCK * LANES;
    for (unsigned counter = threadIdx.x; counter < counters; counter += blockDim.x) {
        const Noise words = noise(draw, counter);
        for (unsigned part = 0; part < 4; part++) {
            const unsigned token = counter / LANES * NOISE_BLOCK + part * LANES + counter % LANES;
            const float weight = token < weights.width ? weights[token] : -1.0f;
            const double uniform = (words.words[part] + 0.5) / 4294967296.0;
            // No token arrives before its uniform number over its weight: few logarithms are left.
            if (weight >= least && uniform <= first.time * weight) {
                first = earlier(first, {-log(1.0 - uniform) / weight, token});
            }
        }
    }
    for (unsigned other = 16; other > 0; other /= 2) {
        const double time = __shfl_xor_sync(0xffffffff, first.time, other);
        const unsigned token = __shfl_xor_sync(0xffffffff, first.token, other);
        first = earlier(first, {time, token});
    }
    Arrival* of_warps = reinterpret_cast<Arrival*>(shared);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = first;
    }
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) {
        first = earlier(first, of_warps[warp]);
    }
    __syncthreads();
    return first.token;
}
