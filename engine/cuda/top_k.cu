// What rows of logits say of the next token: the most probable ones, the target's choice, and the entropy.
#include "sample.h"

// A token of a row, or none.
struct Best {
    float logit;
    unsigned token;
};

// Larger logits first, of equal ones the lower token. What is no number is never first.
__device__ inline bool before(const Best& a, const Best& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

__device__ inline Best first(const Best& a, const Best& b) { return before(b, a) ? b : a; }

// The first of a block's; `shared` has two words for each warp.
__device__ inline Best block_first(Best best, float* shared) {
    for (unsigned other = 16; other > 0; other /= 2) {
        const float logit = __shfl_xor_sync(0xffffffff, best.logit, other);
        const unsigned token = __shfl_xor_sync(0xffffffff, best.token, other);
        best = first(best, {logit, token});
    }
    const unsigned warps = blockDim.x / 32;
    Best* of_warps = reinterpret_cast<Best*>(shared);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = best;
    }
    __syncthreads();
    for (unsigned warp = 0; warp < warps; warp++) {
        best = first(best, of_warps[warp]);
    }
    __syncthreads();
    return best;
}

// Σ exp(x) and Σ x · exp(x) over a row.
struct Sums {
    float sum, weighted;

    __device__ float entropy() const { return logf(sum) - weighted / sum; }
};

template <typename T>
__device__ Sums sums(const Weights<T>& weights, float* shared) {
    Sums all = {0.0f, 0.0f};
    for (unsigned token = threadIdx.x; token < weights.width; token += blockDim.x) {
        // Finite, so that a token of probability 0 adds 0.
        const float x = fmaxf((number(weights.logits[token]) - weights.max) * weights.sharpness, -200.0f);
        all.sum += expf(x);
        all.weighted += expf(x) * x;
    }
    all.sum = block_sum(all.sum, shared);
    __syncthreads();
    all.weighted = block_sum(all.weighted, shared);
    __syncthreads();
    return all;
}

// For each row of logits [rows, width] the k first tokens, as pairs of a token and the bits of its log probability over
// the row, then another such pair, the choice, and the bits of the entropy in nats and of ln Σ p^sharpness, both at the
// temperature of the draw. A token is found in a pass over the row, which the L2 cache holds, among those behind the
// one before it. Without `draws`, or where its sharpness is 0, the first token is the choice.
// Grid [rows].
template <typename T>
__device__ void top_k(const T* logits, unsigned* found, const Draw* draws, unsigned width, unsigned k) {
    extern __shared__ float shared[];
    const T* row = logits + size_t(blockIdx.x) * width;
    unsigned* to = found + size_t(blockIdx.x) * (2 * k + 4);
    float max = 0.0f, normaliser = 0.0f, log_normaliser = 0.0f;
    Sums all = {1.0f, 0.0f};
    Best last = {INFINITY, 0}, choice = last;
    for (unsigned at = 0; at < k; at++) {
        Best best = {-INFINITY, ~0u};
        for (unsigned token = threadIdx.x; token < width; token += blockDim.x) {
            const Best one = {number(row[token]), token};
            if (at == 0 || before(last, one)) {
                best = first(best, one);
            }
        }
        best = block_first(best, shared);
        if (at == 0) {
            choice = best;
            max = best.logit;
            all = sums(Weights<T>{row, width, max, 1.0f}, shared);
            normaliser = max + logf(all.sum);
        }
        if (threadIdx.x == 0) {
            to[2 * at] = best.token;
            to[2 * at + 1] = __float_as_uint(best.logit - normaliser);
        }
        last = best;
    }
    const Draw draw = draws == nullptr ? Draw{} : draws[blockIdx.x];
    const float sharpness = __uint_as_float(draw.sharpness);
    if (sharpness > 0.0f && choice.token < width) {
        const Weights<T> weights = {row, width, max, sharpness};
        choice.token = race(weights, least_weight(weights, draw, shared), draw, shared);
        choice.logit = number(row[choice.token]);
        if (sharpness != 1.0f) {
            all = sums(weights, shared);
            log_normaliser = logf(all.sum) - (normaliser - max) * sharpness;
        }
    }
    if (threadIdx.x == 0) {
        to[2 * k] = choice.token;
        to[2 * k + 1] = __float_as_uint(choice.logit - normaliser);
        to[2 * k + 2] = __float_as_uint(all.entropy());
        to[2 * k + 3] = __float_as_uint(log_normaliser);
    }
}

#define TOP_K(SUFFIX, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        top_k_##SUFFIX(const T* logits, unsigned* found, const Draw* draws, unsigned width, unsigned k) {              \
        top_k(logits, found, draws, width, k);                                                                         \
    }

TOP_K(f32, float)
TOP_K(f16, __half)
TOP_K(bf16, __nv_bfloat16)
