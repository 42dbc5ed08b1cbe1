// Random numbers for tests of kernels.
#pragma once

#include <random>
#include <vector>

#include "../number.h"

inline std::mt19937 source(1);

inline unsigned below(unsigned limit) { return source() % limit; }

// Normally distributed, times `scale`.
template <typename T>
std::vector<T> values(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal;
    std::vector<T> all(count);
    for (T& value : all) {
        store(&value, scale * normal(source));
    }
    return all;
}

// Half a unit in the last place of a number near 1; of f32, in which kernels round several times, eight halves.
template <typename T>
constexpr double HALF_UNIT = 0x1p-21;
template <>
constexpr double HALF_UNIT<__half> = 0x1p-11;
template <>
constexpr double HALF_UNIT<__nv_bfloat16> = 0x1p-8;
