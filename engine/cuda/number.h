// Numbers of all dtypes as f32, in which the kernels compute, and their sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline float number(float x) { return x; }
__device__ inline float number(__half x) { return __half2float(x); }
__device__ inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(__half* to, float x) { *to = __float2half(x); }
__device__ inline void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }

// Neighbouring numbers, in one load.
template <typename T, unsigned COUNT>
struct alignas(COUNT * sizeof(T)) Line {
    T numbers[COUNT];
};

template <typename T>
constexpr unsigned WIDE = 16 / sizeof(T);

template <unsigned COUNT, typename T>
__device__ inline Line<T, COUNT> line(const T* from) {
    return *reinterpret_cast<const Line<T, COUNT>*>(from);
}

template <unsigned COUNT, typename T>
__device__ inline void store(T* to, const Line<T, COUNT>& from) {
    *reinterpret_cast<Line<T, COUNT>*>(to) = from;
}

__device__ inline float warp_sum(float x) {
    for (unsigned other = 16; other > 0; other /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, other);
    }
    return x;
}

// Sums over a block of at most 32 warps, which all of its threads get. `shared` has a float for each warp.
__device__ inline float block_sum(float x, float* shared) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) {
        sum += shared[warp];
    }
    return sum;
}
