// top_k.cu against a sort, for random rows with ties and with infinities.
//
// Usage: top_k_test [CASES]; fails on another token and on log probabilities that differ.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shim.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "random.h"

#include "../top_k.cu"

template <typename T, typename Kernel>
static bool is_found(Kernel kernel) {
    const unsigned rows = 1 + below(3), width = 1 + below(2000), k = 1 + below(std::min(width, 9u));
    auto logits = values<T>(rows * width, 3.0f);
    const bool has_ties = below(2);
    for (T& logit : logits) {
        // Steps of a half make ties; a masked token is -inf.
        store(&logit, below(50) == 0 ? -INFINITY : has_ties ? std::round(2 * number(logit)) / 2 : number(logit));
    }
    std::vector<unsigned> found(2 * rows * k);
    launch({rows, 1}, 256, [&] { kernel(logits.data(), found.data(), width, k); });
    for (unsigned row = 0; row < rows; row++) {
        const T* of = &logits[row * width];
        std::vector<unsigned> order;
        double sum = 0;
        for (unsigned token = 0; token < width; token++) {
            order.push_back(token);
            sum += std::exp(double(number(of[token])));
        }
        const auto is_before = [&](unsigned a, unsigned b) { return number(of[a]) > number(of[b]); };
        std::stable_sort(order.begin(), order.end(), is_before);
        for (unsigned at = 0; at < k; at++) {
            const unsigned* pair = &found[2 * (row * k + at)];
            const double expected = number(of[order[at]]) - std::log(sum);
            float log_probability;
            std::memcpy(&log_probability, pair + 1, 4);
            const bool is_close = std::isinf(expected) ? log_probability == expected
                                                       : std::abs(log_probability - expected) < 1e-4;
            if (pair[0] != order[at] || (sum > 0 && !is_close)) {
                std::printf("row %u of %u, place %u of %u: token %u with %g, not %u with %g\n", row, width, at, k,
                            pair[0], log_probability, order[at], expected);
                return false;
            }
        }
    }
    return true;
}

int main(int count, char** arguments) {
    const int cases = count > 1 ? std::atoi(arguments[1]) : 20;
    for (int at = 0; at < cases; at++) {
        if (!is_found<float>(top_k_f32) || !is_found<__half>(top_k_f16) || !is_found<__nv_bfloat16>(top_k_bf16)) {
            return 1;
        }
    }
    std::printf("top_k: %d cases\n", cases);
}
