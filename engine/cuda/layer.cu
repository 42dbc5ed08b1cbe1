// What a layer does between its products and attention, as few launches: a step of a small batch waits for these.
#include "number.h"

constexpr unsigned HEAD_PARTS = 4;  // pairs of a head in a lane: heads are of at most 256

// sums = x + y as T holds them, and norms = sums / rms(sums) * weight; all [nodes, width]. Grid [nodes].
template <typename T>
__device__ void add_norm(const T* x, const T* y, const T* weight, T* sums, T* norms, unsigned width, float eps) {
    extern __shared__ float shared[];
    const size_t row = size_t(blockIdx.x) * width;
    float squares = 0.0f;
    for (unsigned at = threadIdx.x; at < width; at += blockDim.x) {
        store(sums + row + at, number(x[row + at]) + number(y[row + at]));
        const float sum = number(sums[row + at]);
        squares += sum * sum;
    }
    const float scale = rsqrtf(block_sum(squares, shared) / float(width) + eps);
    for (unsigned at = threadIdx.x; at < width; at += blockDim.x) {
        store(norms + row + at, number(sums[row + at]) * scale * number(weight[at]));
    }
}

// silu(gate) * up. Grid [ceil(count / threads)].
template <typename T>
__device__ void silu_mul(const T* gate, const T* up, T* product, unsigned count) {
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        const float x = number(gate[at]);
        store(product + at, x / (1.0f + expf(-x)) * number(up[at]));
    }
}

// Of a node's heads, queries are biased, normed, rotated and scaled to [nodes, heads, dim], and so are keys, without
// the scale, to the rows from `start` on of the cache, [kv_heads, rows, dim]; values are biased and written there.
// `angles` are the cosines and then the sines of each node. A bias or norm that is null is none.
//
// A warp has a head. Grid [nodes, ceil((heads + 2 * kv_heads) / warps)].
template <typename T>
__device__ void rotate_write(const T* query, const T* key, const T* value, const T* query_bias, const T* key_bias,
                             const T* value_bias, const T* query_norm, const T* key_norm, const float* angles,
                             T* rotated, T* keys, T* values, unsigned heads, unsigned kv_heads, unsigned dim,
                             unsigned rows, unsigned start, float eps, float scale) {
    const unsigned node = blockIdx.x, lane = threadIdx.x % 32, pairs = dim / 2;
    const unsigned at = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= heads + 2 * kv_heads) {
        return;
    }
    const bool is_query = at < heads, is_key = !is_query && at < heads + kv_heads;
    const unsigned head = is_query ? at : is_key ? at - heads : at - heads - kv_heads;
    const T* from = is_query ? query : is_key ? key : value;
    const T* bias = is_query ? query_bias : is_key ? key_bias : value_bias;
    const T* norm = is_query ? query_norm : is_key ? key_norm : nullptr;
    const size_t row = size_t(head) * rows + start + node;
    T* to = is_query ? rotated + (size_t(node) * heads + head) * dim : (is_key ? keys : values) + row * dim;
    from += (size_t(node) * (is_query ? heads : kv_heads) + head) * dim;

    float low[HEAD_PARTS], high[HEAD_PARTS], squares = 0.0f;
    for (unsigned part = 0; part < HEAD_PARTS; part++) {
        const unsigned one = lane + 32 * part, two = one + pairs;
        const bool exists = one < pairs;
        low[part] = exists ? number(from[one]) + (bias ? number(bias[head * dim + one]) : 0.0f) : 0.0f;
        high[part] = exists ? number(from[two]) + (bias ? number(bias[head * dim + two]) : 0.0f) : 0.0f;
        squares += low[part] * low[part] + high[part] * high[part];
    }
    const float factor = norm ? rsqrtf(warp_sum(squares) / float(dim) + eps) : 1.0f;
    for (unsigned part = 0; part < HEAD_PARTS; part++) {
        const unsigned one = lane + 32 * part, two = one + pairs;
        if (one >= pairs) {
            break;
        }
        float a = low[part], b = high[part];
        if (norm) {
            a *= factor * number(norm[one]);
            b *= factor * number(norm[two]);
        }
        if (is_query || is_key) {
            const float cosine = angles[size_t(node) * dim + one], sine = angles[size_t(node) * dim + two];
            const float before = a;
            a = before * cosine - b * sine;
            b = b * cosine + before * sine;
        }
        store(to + one, is_query ? a * scale : a);
        store(to + two, is_query ? b * scale : b);
    }
}

#define LAYER(SUFFIX, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_norm_##SUFFIX(const T* x, const T* y, const T* weight, T* sums, T* norms, unsigned width, float eps) {     \
        add_norm(x, y, weight, sums, norms, width, eps);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        silu_mul_##SUFFIX(const T* gate, const T* up, T* product, unsigned count) {                                    \
        silu_mul(gate, up, product, count);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) rotate_write_##SUFFIX(                                           \
        const T* query, const T* key, const T* value, const T* query_bias, const T* key_bias, const T* value_bias,     \
        const T* query_norm, const T* key_norm, const float* angles, T* rotated, T* keys, T* values, unsigned heads,   \
        unsigned kv_heads, unsigned dim, unsigned rows, unsigned start, float eps, float scale) {                      \
        rotate_write(query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm, angles, rotated, keys, \
                     values, heads, kv_heads, dim, rows, start, eps, scale);                                           \
    }

LAYER(f32, float)
LAYER(f16, __half)
LAYER(bf16, __nv_bfloat16)
