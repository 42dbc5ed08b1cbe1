// What a layer does between its products and attention, as few launches: a step of a small batch waits for these.
#include "number.h"

constexpr unsigned HEAD_PARTS = 4;  // pairs of a head in a lane: heads are of at most 256

// sums = x + y as T holds them, which may be written over x, and norms = sums / rms(sums) * weight; all [nodes, width],
// of which a thread takes COUNT neighbours at a time. Without y sums are x. Grid [nodes].
template <unsigned COUNT, typename T>
__device__ void add_norm(const T* x, const T* y, const T* weight, T* sums, T* norms, unsigned width, float eps) {
    extern __shared__ float shared[];
    const size_t row = size_t(blockIdx.x) * width;
    const unsigned first = COUNT * threadIdx.x, step = COUNT * blockDim.x;
    float squares = 0.0f;
    for (unsigned at = first; at < width; at += step) {
        const auto one = line<COUNT>(x + row + at), two = y ? line<COUNT>(y + row + at) : Line<T, COUNT>();
        Line<T, COUNT> sum;
        for (unsigned part = 0; part < COUNT; part++) {
            store(sum.numbers + part, number(one.numbers[part]) + number(two.numbers[part]));
            squares += number(sum.numbers[part]) * number(sum.numbers[part]);
        }
        store(sums + row + at, sum);
    }
    const float scale = rsqrtf(block_sum(squares, shared) / float(width) + eps);
    for (unsigned at = first; at < width; at += step) {
        const auto sum = line<COUNT>(sums + row + at), by = line<COUNT>(weight + at);
        Line<T, COUNT> norm;
        for (unsigned part = 0; part < COUNT; part++) {
            store(norm.numbers + part, number(sum.numbers[part]) * scale * number(by.numbers[part]));
        }
        store(norms + row + at, norm);
    }
}

template <typename T>
__device__ void add_norm(const T* x, const T* y, const T* weight, T* sums, T* norms, unsigned width, float eps) {
    if (width % WIDE<T> == 0) {
        add_norm<WIDE<T>>(x, y, weight, sums, norms, width, eps);
    } else {
        add_norm<1>(x, y, weight, sums, norms, width, eps);
    }
}

// silu(gate) * up, both [nodes, width] in rows that begin `stride` apart; a thread takes COUNT neighbours.
// Grid [nodes, ceil(width / WIDE / threads)].
template <unsigned COUNT, typename T>
__device__ void silu_mul(const T* gate, const T* up, T* product, unsigned width, unsigned stride) {
    const unsigned first = (blockIdx.y * blockDim.x + threadIdx.x) * WIDE<T>;
    for (unsigned at = first; at < min(first + WIDE<T>, width); at += COUNT) {
        const size_t from = size_t(blockIdx.x) * stride + at;
        const auto one = line<COUNT>(gate + from), two = line<COUNT>(up + from);
        Line<T, COUNT> result;
        for (unsigned part = 0; part < COUNT; part++) {
            const float x = number(one.numbers[part]);
            store(result.numbers + part, x / (1.0f + expf(-x)) * number(two.numbers[part]));
        }
        store(product + size_t(blockIdx.x) * width + at, result);
    }
}

template <typename T>
__device__ void silu_mul(const T* gate, const T* up, T* product, unsigned width, unsigned stride) {
    if (width % WIDE<T> == 0 && stride % WIDE<T> == 0) {
        silu_mul<WIDE<T>>(gate, up, product, width, stride);
    } else {
        silu_mul<1>(gate, up, product, width, stride);
    }
}

// Of a node's heads, queries are biased, normed, rotated and scaled to [nodes, heads, dim], and so are keys, without
// the scale, to the rows from `start` on of the cache, [kv_heads, rows, dim]; values are biased and written there. Rows
// of queries begin `query_stride` apart, those of keys and of values `key_stride`.
// `angles` are the cosines and then the sines of each node. A bias or norm that is null is none.
//
// A warp has a head. Grid [nodes, ceil((heads + 2 * kv_heads) / warps)].
template <typename T>
__device__ void rotate_write(const T* query, const T* key, const T* value, const T* query_bias, const T* key_bias,
                             const T* value_bias, const T* query_norm, const T* key_norm, const float* angles,
                             T* rotated, T* keys, T* values, unsigned heads, unsigned kv_heads, unsigned dim,
                             unsigned rows, unsigned start, unsigned query_stride, unsigned key_stride, float eps,
                             float scale) {
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
    from += size_t(node) * (is_query ? query_stride : key_stride) + head * dim;

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

// The rows [kv_heads, rows, dim] that `kept` names, one behind the other at the start of [kv_heads, to_rows, dim]; a
// thread takes COUNT neighbours. Grid [ceil(kept * dim / WIDE / threads), kv_heads].
template <unsigned COUNT, typename T>
__device__ void move_rows(const T* from, T* to, const unsigned* kept, unsigned count, unsigned rows, unsigned to_rows,
                          unsigned dim) {
    const size_t first = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE<T>, all = size_t(count) * dim;
    for (size_t at = first; at < min(first + WIDE<T>, all); at += COUNT) {
        const size_t row = kept[at / dim];
        const auto moved = line<COUNT>(from + (blockIdx.y * size_t(rows) + row) * dim + at % dim);
        store(to + blockIdx.y * size_t(to_rows) * dim + at, moved);
    }
}

template <typename T>
__device__ void move_rows(const T* from, T* to, const unsigned* kept, unsigned count, unsigned rows, unsigned to_rows,
                          unsigned dim) {
    if (dim % WIDE<T> == 0) {
        move_rows<WIDE<T>>(from, to, kept, count, rows, to_rows, dim);
    } else {
        move_rows<1>(from, to, kept, count, rows, to_rows, dim);
    }
}

#define LAYER(SUFFIX, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_norm_##SUFFIX(const T* x, const T* y, const T* weight, T* sums, T* norms, unsigned width, float eps) {     \
        add_norm(x, y, weight, sums, norms, width, eps);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        silu_mul_##SUFFIX(const T* gate, const T* up, T* product, unsigned width, unsigned stride) {                   \
        silu_mul(gate, up, product, width, stride);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        move_rows_##SUFFIX(const T* from, T* to, const unsigned* kept, unsigned count, unsigned rows,                  \
                           unsigned to_rows, unsigned dim) {                                                           \
        move_rows(from, to, kept, count, rows, to_rows, dim);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) rotate_write_##SUFFIX(                                           \
        const T* query, const T* key, const T* value, const T* query_bias, const T* key_bias, const T* value_bias,     \
        const T* query_norm, const T* key_norm, const float* angles, T* rotated, T* keys, T* values, unsigned heads,   \
        unsigned kv_heads, unsigned dim, unsigned rows, unsigned start, unsigned query_stride, unsigned key_stride,    \
        float eps, float scale) {                                                                                      \
        rotate_write(query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm, angles, rotated, keys, \
                     values, heads, kv_heads, dim, rows, start, query_stride, key_stride, eps, scale);                 \
    }

LAYER(f32, float)
LAYER(f16, __half)
LAYER(bf16, __nv_bfloat16)
