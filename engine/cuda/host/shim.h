// What a kernel needs of CUDA, for g++: the threads of a block are threads, and blocks run one after another, in an
// order drawn for each launch.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __launch_bounds__(...)
using std::min;

struct Index {
    unsigned x = 0, y = 1, z = 1;
};
inline thread_local Index threadIdx;
inline Index blockIdx, blockDim, gridDim;
inline pthread_barrier_t block, warps[32];
alignas(16) float shared[48 * 1024 / sizeof(float)];

inline void __syncthreads() {
#ifndef WITHOUT_BARRIERS
    pthread_barrier_wait(&block);
#endif
}

// Whether a thread of the block says so.
inline bool __syncthreads_or(int predicate) {
    static int given[1024];
    given[threadIdx.x] = predicate;
    __syncthreads();
    const bool any = std::any_of(given, given + blockDim.x, [](int one) { return one != 0; });
    __syncthreads();
    return any;
}

// No two blocks run at once, so fences order nothing, and no cache is stale.
inline void __threadfence() {}

template <typename T>
T __ldcg(const T* from) {
    return *from;
}

// What was there, and then one more, or 0 behind `most`.
inline unsigned atomicInc(unsigned* at, unsigned most) {
    std::atomic_ref<unsigned> counter(*at);
    unsigned before = counter;
    while (!counter.compare_exchange_weak(before, before < most ? before + 1 : 0)) {
    }
    return before;
}

// What another thread of the warp gives; all of the warp must call it.
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned other) {
    static T given[1024];
    given[threadIdx.x] = value;
    pthread_barrier_wait(&warps[threadIdx.x / 32]);
    const T taken = given[threadIdx.x ^ other];
    pthread_barrier_wait(&warps[threadIdx.x / 32]);
    return taken;
}

// d += a · b on tensor cores, of 16 × 16 by 16 × 8; lanes have the elements that the PTX ISA says (mma.m16n8k16).
template <typename T>
void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T) {
    static T left[32][16][16], right[32][8][16];  // of each warp; the right one by columns
    const unsigned warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    auto put = [](T* to, unsigned word) { std::copy_n(reinterpret_cast<const T*>(&word), 2, to); };
    for (unsigned at = 0; at < 4; at++) {
        put(&left[warp][row + at % 2 * 8][pair + at / 2 * 8], a[at]);
    }
    put(&right[warp][row][pair], b0);
    put(&right[warp][row][pair + 8], b1);
    pthread_barrier_wait(&warps[warp]);
    for (unsigned at = 0; at < 4; at++) {
        for (unsigned term = 0; term < 16; term++) {
            d[at] += number(left[warp][row + at / 2 * 8][term]) * number(right[warp][pair + at % 2][term]);
        }
    }
    pthread_barrier_wait(&warps[warp]);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }

// Threads are a multiple of 32.
template <typename Kernel>
void launch(Index grid, unsigned threads, Kernel kernel) {
    static std::mt19937 source(2);
    std::vector<unsigned> order(grid.x * grid.y * grid.z);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), source);
    gridDim = grid;
    blockDim = {threads};
    pthread_barrier_init(&block, nullptr, threads);
    for (unsigned warp = 0; warp < threads / 32; warp++) {
        pthread_barrier_init(&warps[warp], nullptr, 32);
    }
    std::vector<std::thread> all;
    for (unsigned thread = 0; thread < threads; thread++) {
        all.emplace_back([&, thread] {
            threadIdx.x = thread;
            for (unsigned at : order) {
                if (thread == 0) {
                    blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
                }
                pthread_barrier_wait(&block);
                kernel();
                pthread_barrier_wait(&block);
            }
        });
    }
    for (std::thread& thread : all) {
        thread.join();
    }
    for (unsigned warp = 0; warp < threads / 32; warp++) {
        pthread_barrier_destroy(&warps[warp]);
    }
    pthread_barrier_destroy(&block);
}
