// Times products of few nodes with weights in blocks, and what unpacks them, on a GPU (docs/research/gpu.md):
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -I engine/cuda tests/cuda/products.cu -o products && ./products
//
// Microseconds of shapes of models of 886M and 8B parameters. Weights come from memory: 768 MB of them take turns.
#include "kernels.cu"

#include <algorithm>
#include <cstdio>

constexpr size_t POOL = size_t(768) << 20, MARGIN = size_t(512) << 20;
constexpr unsigned SHAPES[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336},
                                  {6144, 2048}, {2048, 2048}, {11264, 2048}, {2048, 5632}};

static unsigned char* pool;
static __half *x, *y;

// Any bits, but those of f16 between 2^-3 and 1.
__global__ void fill(unsigned* words, size_t count) {
    for (size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x; at < count; at += size_t(gridDim.x) * blockDim.x) {
        unsigned hash = unsigned(at) * 2654435761u;
        hash = (hash ^ hash >> 15) * 2246822519u;
        words[at] = ((hash ^ hash >> 13) & 0x8fff8fff) | 0x30003000;
    }
}

template <typename Work>
static float microseconds(Work work) {
    constexpr int COUNT = 24;
    cudaEvent_t start, end;
    cudaEventCreate(&start);
    cudaEventCreate(&end);
    for (int at = 0; at < 3; at++) {
        work(at);
    }
    cudaEventRecord(start);
    for (int at = 0; at < COUNT; at++) {
        work(at);
    }
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float milliseconds;
    cudaEventElapsedTime(&milliseconds, start, end);
    return 1000 * milliseconds / COUNT;
}

template <unsigned FORMAT>
static size_t bytes(size_t outputs, size_t inputs) {
    if constexpr (FORMAT == DENSE) {
        return 2 * outputs * inputs;
    } else {
        const size_t tiles = outputs / TILE_OUTPUTS * (inputs / TILE_INPUTS);
        return tiles * TILE_BYTES<FORMAT> + (IN_PARTS<FORMAT> ? tiles / 8 * MULTIPLIERS : 0);
    }
}

template <unsigned FORMAT>
static void times(const char* name, unsigned outputs, unsigned inputs) {
    const size_t size = (bytes<FORMAT>(outputs, inputs) + 255) / 256 * 256, copies = std::max<size_t>(1, POOL / size);
    auto weights = [&](int at) { return pool + at % copies * size; };
    auto product = [&](auto kernel, unsigned nodes, unsigned width) {
        const unsigned shared = 16 * width * ((nodes + NODES - 1) / NODES * NODES);
        printf(" %.1f", microseconds([&](int at) {
                   kernel<<<(outputs + width - 1) / width, 32 * PRODUCT_WARPS, shared>>>(
                       x, y, weights(at), nullptr, nullptr, inputs, outputs, 0, 0, FORMAT, nodes, 0);
               }));
    };
    printf("%s %u x %u, %.1f MB:", name, outputs, inputs, size / 1e6);
    product(few_product_1_f16, 1, 16);
    product(few_product_1_f16, 8, 16);
    if constexpr (FORMAT != DENSE) {
        product(few_product_2_f16, 16, 16);
        product(few_product_4_f16, 32, 32);
        product(few_product_8_f16, 64, 32);
        __half* to = reinterpret_cast<__half*>(pool + POOL);
        printf(" unpacking %.1f", microseconds([&](int at) {
                   unpack_blocks_f16<<<unsigned(size_t(outputs) * inputs / 16 / 256), 256>>>(
                       to, weights(at), nullptr, nullptr, inputs, outputs, 0, 0, FORMAT);
               }));
    }
    printf(" %s\n", cudaGetErrorString(cudaGetLastError()));
}

int main() {
    cudaMalloc(&pool, POOL + MARGIN);
    cudaMalloc(&x, 64 << 20);
    cudaMalloc(&y, 64 << 20);
    fill<<<1024, 256>>>(reinterpret_cast<unsigned*>(pool), (POOL + MARGIN) / 4);
    fill<<<1024, 256>>>(reinterpret_cast<unsigned*>(x), (64 << 20) / 4);
    printf("1, 8, 16, 32 and 64 nodes\n");
    for (const auto& [outputs, inputs] : SHAPES) {
#define TIMES(FORMAT) times<FORMAT>(#FORMAT, outputs, inputs);
        TIMES(DENSE)
        TIMES(Q8_0)
        TIMES(Q4_0)
        TIMES(Q4_1)
        TIMES(Q5_0)
        TIMES(Q5_1)
        TIMES(Q2_K)
        TIMES(Q3_K)
        TIMES(Q4_K)
        TIMES(Q5_K)
        TIMES(Q6_K)
    }
}
