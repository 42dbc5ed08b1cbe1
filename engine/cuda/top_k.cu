// The most probable tokens of rows of logits.
#include "number.h"

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

// For each row of logits [rows, width] the k first tokens, as pairs of a token and the bits of its log probability over
// the row. A token is found in a pass over the row, which the L2 cache holds, among those behind the one before it.
// Grid [rows].
template <typename T>
__device__ void top_k(const T* logits, unsigned* found, unsigned width, unsigned k) {
    extern __shared__ float shared[];
    const T* row = logits + size_t(blockIdx.x) * width;
    unsigned* to = found + size_t(blockIdx.x) * 2 * k;
    float normaliser = 0.0f;
    Best last = {INFINITY, 0};
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
            float sum = 0.0f;
            for (unsigned token = threadIdx.x; token < width; token += blockDim.x) {
                sum += expf(number(row[token]) - best.logit);
            }
            normaliser = best.logit + logf(block_sum(sum, shared));
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            to[2 * at] = best.token;
            to[2 * at + 1] = __float_as_uint(best.logit - normaliser);
        }
        last = best;
    }
}

#define TOP_K(SUFFIX, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        top_k_##SUFFIX(const T* logits, unsigned* found, unsigned width, unsigned k) {                                 \
        top_k(logits, found, width, k);                                                                                \
    }

TOP_K(f32, float)
TOP_K(f16, __half)
TOP_K(bf16, __nv_bfloat16)
