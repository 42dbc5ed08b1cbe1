// Products on tensor cores.
#pragma once

#include "number.h"

#include <type_traits>

#ifdef __CUDACC__
// d += a · b, of 16 × 16 by 16 × 8 (PTX ISA, mma.m16n8k16).
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Two numbers in a word, the first in its lower half.
template <typename T>
__device__ inline unsigned pack(float a, float b) {
    T both[2];
    store(both, a);
    store(both + 1, b);
    unsigned word;
    memcpy(&word, both, sizeof word);
    return word;
}

// Words of two numbers, one less the other.
template <typename T>
__device__ inline unsigned less(unsigned a, unsigned b) {
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Two left, right;
    memcpy(static_cast<void*>(&left), &a, sizeof left);
    memcpy(static_cast<void*>(&right), &b, sizeof right);
    const Two difference = __hsub2(left, right);
    unsigned word;
    memcpy(&word, &difference, sizeof word);
    return word;
}

// Consecutive words of numbers of 16 bits.
template <unsigned WORDS, typename T>
__device__ inline Line<unsigned, WORDS> words(const T* from) {
    return line<WORDS>(reinterpret_cast<const unsigned*>(from));
}
