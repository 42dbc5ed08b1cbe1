// What a kernel needs of CUDA, for g++: the threads of a block are threads, and blocks run one after another.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#define __launch_bounds__(threads)
using std::min;

struct Index {
    unsigned x = 0, y = 0;
};
inline thread_local Index threadIdx;
inline Index blockIdx;
inline pthread_barrier_t block;
float shared[48 * 1024 / sizeof(float)];

inline void __syncthreads() {
#ifndef WITHOUT_BARRIERS
    pthread_barrier_wait(&block);
#endif
}

template <typename Kernel>
void launch(Index grid, unsigned threads, Kernel kernel) {
    pthread_barrier_init(&block, nullptr, threads);
    std::vector<std::thread> all;
    for (unsigned thread = 0; thread < threads; thread++) {
        all.emplace_back([&, thread] {
            threadIdx.x = thread;
            for (unsigned at = 0; at < grid.x * grid.y; at++) {
                if (thread == 0) {
                    blockIdx = {at % grid.x, at / grid.x};
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
    pthread_barrier_destroy(&block);
}
