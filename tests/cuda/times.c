// Times what a process calls of the CUDA driver, cuBLAS and cublasLt, on a GPU, and writes a table when it ends:
//
//   cc -O2 -shared -fPIC tests/cuda/times.c -o times.so
//   LASER_CUDA_TIMES=times.txt LD_PRELOAD=./times.so laser-bench engine --device cuda …
//
// Calls that the toolkit's own libraries make, as cuBLAS does for its launches, are part of the call that made them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef uint64_t Word;
// No function here has more parameters; those that one does not have are passed on unread.
typedef Word (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                         Word, Word, Word, Word, Word, Word, Word, Word);

#define CALLS(each)                                                                                                  \
    each(cuLaunchKernel) each(cuMemAllocAsync) each(cuMemFreeAsync) each(cuModuleGetFunction) each(cuCtxGetCurrent)  \
    each(cuMemcpyHtoDAsync_v2) each(cuMemcpyDtoHAsync_v2) each(cuMemsetD8Async) each(cuStreamSynchronize)            \
    each(cuCtxSynchronize) each(cublasGemmStridedBatchedEx) each(cublasLtMatmul) each(cublasLtMatmulAlgoGetHeuristic)

static double nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

#define TIMED(name)                                                                                                  \
    static struct { Function function; long calls; double nanoseconds; } of_##name;                                  \
    Word name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, Word k, Word l, Word m,  \
              Word n, Word o, Word p, Word q, Word r, Word s, Word t, Word u, Word v, Word w, Word x) {               \
        if (!of_##name.function) of_##name.function = (Function)dlsym(RTLD_NEXT, #name);                             \
        const double start = nanoseconds();                                                                          \
        const Word result = of_##name.function(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x);\
        of_##name.nanoseconds += nanoseconds() - start;                                                              \
        of_##name.calls++;                                                                                           \
        return result;                                                                                               \
    }
CALLS(TIMED)

#define WRITTEN(name)                                                                                                \
    if (of_##name.calls)                                                                                             \
        fprintf(to, "%-28s %9ld calls %9.1f ms %7.2f us each\n", #name, of_##name.calls, of_##name.nanoseconds / 1e6, \
                of_##name.nanoseconds / 1e3 / of_##name.calls);

__attribute__((destructor)) static void write_table(void) {
    const char* path = getenv("LASER_CUDA_TIMES");
    FILE* to = path ? fopen(path, "a") : stderr;
    if (!to) return;
    CALLS(WRITTEN)
    if (path) fclose(to);
}
