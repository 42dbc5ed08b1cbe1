// Wrong calls that the driver of driver.cpp must find. Takes this file's own PTX.

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

extern "C" __global__ void scale(float* values, unsigned count, float factor) {
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) values[at] *= factor;
}

struct Range {
    float* first;
    uint64_t count;
};

extern "C" __global__ void zero(Range range) {
    if (threadIdx.x < range.count) range.first[threadIdx.x] = 0.0f;
}

namespace {

int counts;
int failures = 0;
uint64_t errors_before = 0;

// Words of the file that driver.cpp describes.
enum Word {
    launches = 0,
    live_bytes = 11,
    refusals = 14,
    errors = 15,
    capability = 16,
    memory_bytes = 17,
    lookups = 20,
};

uint64_t get(Word word) {
    uint64_t value = 0;
    return pread(counts, &value, 8, 8 * word) == 8 ? value : 0;
}
void set(Word word, uint64_t value) {
    if (pwrite(counts, &value, 8, 8 * word) != 8) std::abort();
}

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    failures++;
}

// A call that returns this, and is an error of the program or not.
template <typename Result>
void expect(Result got, Result expected, uint64_t wrong, const char* what) {
    const uint64_t made = get(errors) - errors_before;
    if (got != expected || made != wrong)
        std::fprintf(stderr, "%s: returned %d and made %lu errors\n", what, int(got), made), failures++;
    errors_before += made;
}

#define RIGHT(call) expect(call, decltype(call)(0), 0, #call)
#define WRONG(call, code) expect(call, code, 1, #call)

void memory() {
    CUdeviceptr a, b;
    char host[100] = {1, 2, 3};
    RIGHT(cuMemAlloc(&a, 100));
    RIGHT(cuMemcpyHtoD(a + 50, host, 50));
    WRONG(cuMemcpyHtoD(a + 50, host, 51), CUDA_ERROR_INVALID_VALUE);
    WRONG(cuMemcpyDtoH(host, a - 1, 1), CUDA_ERROR_INVALID_VALUE);
    RIGHT(cuMemcpyDtoH(host + 90, a + 50, 3));
    expect(host[91] == 2, "a download returns what was uploaded");
    RIGHT(cuMemFree(a));
    WRONG(cuMemFree(a), CUDA_ERROR_INVALID_VALUE);
    RIGHT(cuMemAlloc(&b, 100));
    expect(a != b, "addresses are not used again");
    WRONG(cuMemcpyDtoD(b, a, 10), CUDA_ERROR_INVALID_VALUE);
    WRONG(cuMemsetD8Async(a, 0, 10, nullptr), CUDA_ERROR_INVALID_VALUE);
    RIGHT(cuMemFree(b));
    WRONG(cuMemAlloc(&a, 0), CUDA_ERROR_INVALID_VALUE);
    set(memory_bytes, 1000);
    RIGHT(cuMemAlloc(&a, 600));
    expect(cuMemAlloc(&b, 500), CUDA_ERROR_OUT_OF_MEMORY, 0, "an allocation beyond the memory");
    expect(get(refusals) == 1, "it is counted");
    size_t free, total;
    RIGHT(cuMemGetInfo(&free, &total));
    expect(free == 400 && total == 1000, "free memory");
    RIGHT(cuMemFree(a));
    set(memory_bytes, 0);
    expect(get(live_bytes) == 0, "all is given back");
}

CUresult launch(CUfunction kernel, unsigned grid, unsigned block, unsigned shared, CUdeviceptr data) {
    unsigned count = 10;
    float factor = 2.0f;
    void* arguments[] = {&data, &count, &factor};
    return cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, shared, nullptr, arguments, nullptr);
}

void modules(const std::string& ptx) {
    CUmodule module;
    CUfunction kernel, by_struct;
    CUdeviceptr data;
    set(capability, 75);
    WRONG(cuModuleLoadData(&module, ptx.c_str()), CUDA_ERROR_NO_BINARY_FOR_GPU);
    set(capability, 90);
    RIGHT(cuModuleLoadData(&module, ptx.c_str()));
    set(capability, 80);
    WRONG(cuModuleGetFunction(&kernel, module, "scal"), CUDA_ERROR_NOT_FOUND);
    RIGHT(cuModuleGetFunction(&kernel, module, "scale"));
    RIGHT(cuModuleGetFunction(&by_struct, module, "zero"));
    RIGHT(cuMemAlloc(&data, 40));
    RIGHT(launch(kernel, 1, 32, 0, data));
    WRONG(launch(kernel, 0, 32, 0, data), CUDA_ERROR_INVALID_VALUE);
    WRONG(launch(kernel, 1, 1025, 0, data), CUDA_ERROR_INVALID_VALUE);
    WRONG(launch(kernel, 1, 32, 100 << 10, data), CUDA_ERROR_INVALID_VALUE);
    RIGHT(cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100 << 10));
    RIGHT(launch(kernel, 1, 32, 100 << 10, data));
    WRONG(launch(kernel, 1, 32, 0, data + 41), CUDA_ERROR_ILLEGAL_ADDRESS);
    Range range{reinterpret_cast<float*>(data), 10};
    void* arguments[] = {&range};
    RIGHT(cuLaunchKernel(by_struct, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    RIGHT(cuMemFree(data));
    WRONG(launch(kernel, 1, 32, 0, data), CUDA_ERROR_ILLEGAL_ADDRESS);
    WRONG(cuLaunchKernel(by_struct, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
}

// Kernels in machine code for 8.0, as mistralrs' are.
void objects() {
    const uint64_t before = get(launches);
    scale<<<1, 32>>>(nullptr, 0, 1.0f);
    RIGHT(cudaGetLastError());
    expect(get(launches) == before + 1, "a launch is counted");
    set(capability, 86);
    scale<<<1, 32>>>(nullptr, 0, 1.0f);
    RIGHT(cudaGetLastError());
    set(capability, 90);
    scale<<<1, 32>>>(nullptr, 0, 1.0f);
    WRONG(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
    set(capability, 80);
    scale<<<1, 2048>>>(nullptr, 0, 1.0f);
    WRONG(cudaGetLastError(), cudaErrorInvalidValue);
}

void products() {
    cublasHandle_t blas;
    CUdeviceptr a, b, c;
    RIGHT(cublasCreate(&blas));
    RIGHT(cuMemAlloc(&a, 4 * 6 * 2));
    RIGHT(cuMemAlloc(&b, 4 * 12 * 2));
    RIGHT(cuMemAlloc(&c, 4 * 8 * 2));
    const float one = 1.0f;
    // Two products of 2 × 3 by 3 × 4.
    const auto product = [&](cublasOperation_t left, int leading, int batch) {
        return cublasGemmStridedBatchedEx(blas, left, CUBLAS_OP_N, 2, 4, 3, &one, reinterpret_cast<void*>(a),
            CUDA_R_32F, leading, 6, reinterpret_cast<void*>(b), CUDA_R_32F, 3, 12, &one, reinterpret_cast<void*>(c),
            CUDA_R_32F, 2, 8, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    };
    RIGHT(product(CUBLAS_OP_N, 2, 2));
    RIGHT(product(CUBLAS_OP_T, 3, 2));
    WRONG(product(CUBLAS_OP_T, 2, 2), CUBLAS_STATUS_INVALID_VALUE);
    WRONG(product(CUBLAS_OP_N, 3, 2), CUBLAS_STATUS_EXECUTION_FAILED);
    WRONG(product(CUBLAS_OP_N, 2, 3), CUBLAS_STATUS_EXECUTION_FAILED);
    RIGHT(cuMemFree(b));
    WRONG(product(CUBLAS_OP_N, 2, 2), CUBLAS_STATUS_EXECUTION_FAILED);
}

// The same with cublasLt, which multiplies by the algorithm of the shape.
void products_by_algorithm() {
    cublasLtHandle_t blas;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t left, right, result, other;
    CUdeviceptr a, b, c, scratch;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    RIGHT(cublasLtCreate(&blas));
    RIGHT(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    RIGHT(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    // The left one is 2 × 3 once it is transposed.
    RIGHT(cublasLtMatrixLayoutCreate(&left, CUDA_R_32F, 3, 2, 3));
    RIGHT(cublasLtMatrixLayoutCreate(&right, CUDA_R_32F, 3, 4, 3));
    RIGHT(cublasLtMatrixLayoutCreate(&result, CUDA_R_32F, 2, 4, 2));
    RIGHT(cublasLtMatrixLayoutCreate(&other, CUDA_R_32F, 2, 3, 2));
    RIGHT(cuMemAlloc(&a, 4 * 6));
    RIGHT(cuMemAlloc(&b, 4 * 12));
    RIGHT(cuMemAlloc(&c, 4 * 8));
    RIGHT(cuMemAlloc(&scratch, 100));
    const float one = 1.0f;
    cublasLtMatmulHeuristicResult_t found;
    const auto product = [&](cublasLtMatrixLayout_t to, size_t bytes) {
        void* const of = reinterpret_cast<void*>(c);
        return cublasLtMatmul(blas, description, &one, reinterpret_cast<void*>(a), left, reinterpret_cast<void*>(b),
            right, &one, of, to, of, to, &found.algo, reinterpret_cast<void*>(scratch), bytes, nullptr);
    };
    const auto look_up = [&](cublasLtMatrixLayout_t to) {
        int count;
        return cublasLtMatmulAlgoGetHeuristic(blas, description, left, right, to, to, nullptr, 1, &found, &count);
    };
    const uint64_t before = get(launches), lookups_before = get(lookups);
    RIGHT(look_up(result));
    RIGHT(product(result, 100));
    expect(get(launches) == before + 1 && get(lookups) == lookups_before + 1, "a product and its lookup are counted");
    WRONG(product(result, 101), CUBLAS_STATUS_INVALID_VALUE);
    WRONG(product(other, 100), CUBLAS_STATUS_INVALID_VALUE);
    RIGHT(look_up(other));
    WRONG(product(other, 100), CUBLAS_STATUS_INVALID_VALUE);
    RIGHT(look_up(result));
    RIGHT(cuMemFree(b));
    WRONG(product(result, 100), CUBLAS_STATUS_EXECUTION_FAILED);
}

}  // namespace

int main(int, char** arguments) {
    counts = open(std::getenv("LASER_FAKE_CUDA"), O_RDWR | O_CREAT, 0600);
    CUcontext context;
    CUdeviceptr data;
    WRONG(cuMemAlloc(&data, 1), CUDA_ERROR_INVALID_CONTEXT);
    RIGHT(cuDevicePrimaryCtxRetain(&context, 0));
    RIGHT(cuCtxSetCurrent(context));
    std::ifstream file(arguments[1]);
    memory();
    modules({std::istreambuf_iterator<char>(file), {}});
    objects();
    products();
    products_by_algorithm();
    return failures != 0;
}
