// top_k.cu against a sort, for random rows with ties and with infinities, and its draws against their definition.
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

// Philox4x32 as its paper has it, with 7 rounds.
static void philox(unsigned (&counter)[4], unsigned low, unsigned high) {
    for (unsigned round = 0; round < 7; round++) {
        const unsigned long long a = 0xd2511f53ull * counter[0], c = 0xcd9e8d57ull * counter[2];
        const unsigned next[4] = {unsigned(c >> 32) ^ counter[1] ^ low, unsigned(c),
                                  unsigned(a >> 32) ^ counter[3] ^ high, unsigned(a)};
        std::copy(next, next + 4, counter);
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
}

// When a token of this probability arrives.
static double arrival(const Draw& draw, unsigned token, double probability) {
    unsigned counter[4] = {token / 64 * 16 + token % 16, draw.place, 0, 0};
    philox(counter, draw.key_low, draw.key_high);
    return -std::log1p(-(counter[token % 64 / 16] + 0.5) / 4294967296.0) / probability;
}

static float float_of(unsigned bits) { return std::bit_cast<float>(bits); }

static Draw any_draw(unsigned width) {
    const float sharpness = std::vector{0.0f, 0.5f, 1.0f, 2.0f}[below(4)];
    const float top_p = std::vector{0.1f, 0.6f, 1.0f}[below(3)];
    return {unsigned(source()), unsigned(source()), below(100), std::bit_cast<unsigned>(sharpness),
            below(2) ? ~0u : 1 + below(width), std::bit_cast<unsigned>(top_p)};
}

// Whether `choice` is what the row draws, but for what rounding may decide.
template <typename T>
static bool is_drawn(const T* row, const std::vector<unsigned>& order, const Draw& draw, unsigned choice) {
    const float sharpness = float_of(draw.sharpness), top_p = float_of(draw.top_p);
    if (sharpness == 0.0f) {
        return choice == order[0];
    }
    const auto weight = [&](unsigned token) {
        return std::exp((number(row[token]) - number(row[order[0]])) * double(sharpness));
    };
    std::vector<unsigned> kept;
    for (unsigned token : order) {
        if (kept.size() < draw.top_k || weight(token) == weight(kept.back())) {
            kept.push_back(token);
        }
    }
    double total = 0;
    for (unsigned token : kept) {
        total += weight(token);
    }
    // The least weight of the first tokens that have so much of all.
    const auto least = [&](double goal) {
        double sum = 0;
        for (unsigned token : kept) {
            sum += weight(token);
            if (sum >= goal * total) {
                return weight(token);
            }
        }
        return 0.0;
    };
    // What surely stays, and what may.
    const double sure = top_p < 1.0f ? least(top_p * (1 - 1e-5)) : 0.0;
    const double possible = top_p < 1.0f ? least(top_p * (1 + 1e-5)) : 0.0;
    const bool may = std::find(kept.begin(), kept.end(), choice) != kept.end() &&
                     weight(choice) >= possible * (1 - 1e-5);
    const double time = arrival(draw, choice, weight(choice));
    bool is_first = true;
    for (unsigned token : kept) {
        is_first &= weight(token) < sure * (1 + 1e-5) || weight(token) < 1e-30 ||
                    time <= arrival(draw, token, weight(token)) * (1 + 1e-4);
    }
    if (!may || !is_first) {
        std::printf("token %u of weight %g at %g was drawn: %s\n", choice, weight(choice), time,
                    may ? "another is earlier" : "it may not");
    }
    return may && is_first;
}

template <typename T, typename Kernel>
static bool is_found(Kernel kernel) {
    const unsigned rows = 1 + below(3), width = 1 + below(2000), k = 1 + below(std::min(width, 9u));
    auto logits = values<T>(rows * width, 3.0f);
    const bool has_ties = below(2);
    for (T& logit : logits) {
        // Steps of a half make ties; a masked token is -inf.
        store(&logit, below(50) == 0 ? -INFINITY : has_ties ? std::round(2 * number(logit)) / 2 : number(logit));
    }
    const unsigned words = 2 * k + 4;
    std::vector<unsigned> found(rows * words);
    std::vector<Draw> draws;
    for (unsigned row = 0; row < rows; row++) {
        draws.push_back(any_draw(width));
    }
    const bool is_greedy = below(4) == 0;
    const Draw* given = is_greedy ? nullptr : draws.data();
    launch({rows, 1}, 256, [&] { kernel(logits.data(), found.data(), given, width, k); });
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
            const unsigned* pair = &found[row * words + 2 * at];
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
        if (!(sum > 0)) {
            continue;
        }
        const unsigned* rest = &found[row * words + 2 * k];
        const Draw draw = is_greedy ? Draw{} : draws[row];
        const double log_probability = number(of[rest[0]]) - std::log(sum);
        if (!is_drawn(of, order, draw, rest[0]) || std::abs(float_of(rest[1]) - log_probability) > 1e-4) {
            std::printf("choice %u with %g, not %g\n", rest[0], float_of(rest[1]), log_probability);
            return false;
        }
        const double sharpness = float_of(draw.sharpness) > 0 ? float_of(draw.sharpness) : 1;
        double tempered = 0, weighted = 0;
        for (unsigned token = 0; token < width; token++) {
            const double log = number(of[token]) - std::log(sum), weight = std::exp(sharpness * log);
            tempered += weight;
            weighted += weight > 0 ? weight * sharpness * log : 0;
        }
        const double entropy = std::log(tempered) - weighted / tempered;
        if (!(std::abs(float_of(rest[2]) - entropy) < 1e-4) ||
            !(std::abs(float_of(rest[3]) - std::log(tempered)) < 1e-4)) {
            std::printf("entropy %g and normaliser %g, not %g and %g\n", float_of(rest[2]), float_of(rest[3]), entropy,
                        std::log(tempered));
            return false;
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
