// tree.cu and tree_tensor.cu against sums in f64, on random trees of random sequences whose rows lie anywhere.
//
// Usage: tree_test [CASES]; fails on a difference, and where a wrong bit of an ancestor makes none.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shim.h"

#include <cstdio>
#include <cstdlib>

#include "random.h"

#include "../tree.cu"
#include "../tree_tensor.cu"

struct Sequence {
    unsigned offset, cached, held;
    std::vector<int> parents;  // -1 for a root; the first ones are of held nodes
    std::vector<unsigned> rows;
};

// Words of a tile.
static const unsigned TILE = sizeof(Tile) / sizeof(unsigned);

// Tiles times key heads, as `difference` draws them for tensor cores.
static const unsigned BLOCKS_MOST = 3 * (40 * 5 / TENSOR_QUERIES + 1) * 3;

// As engine/src/tree_plan.rs writes it; with `wrong`, the last node does not see itself.
static std::vector<unsigned> plan(const std::vector<Sequence>& sequences, unsigned group, unsigned width, bool wrong,
                                  unsigned& tiles) {
    tiles = 0;
    for (const Sequence& of : sequences) {
        tiles += ((of.parents.size() - of.held) * group + width - 1) / width;
    }
    std::vector<unsigned> plan, words;
    for (const Sequence& of : sequences) {
        const unsigned tree = of.parents.size(), nodes = tree - of.held, rows = TILE * tiles + words.size();
        words.insert(words.end(), of.rows.begin(), of.rows.end());
        const unsigned bits = TILE * tiles + words.size();
        for (unsigned node = of.held; node < tree; node++) {
            std::vector<unsigned> seen((tree + 31) / 32);
            for (int at = node; at >= 0; at = of.parents[at]) {
                seen[at / 32] |= 1u << at % 32;
            }
            if (wrong && node + 1 == tree) {
                seen[node / 32] ^= 1u << node % 32;
            }
            words.insert(words.end(), seen.begin(), seen.end());
        }
        for (unsigned first = 0; first < nodes * group; first += width) {
            plan.insert(plan.end(), {of.offset, nodes, of.cached, of.held, rows, bits, first});
        }
    }
    plan.insert(plan.end(), words.begin(), words.end());
    return plan;
}

// The largest difference of a kernel, whose blocks have `threads` threads and `width` queries and share a context with
// others, `splits` of them, from the oracle.
template <typename T, typename Kernel>
static double difference(Kernel kernel, unsigned threads, unsigned width, unsigned splits, unsigned dim, bool wrong) {
    const unsigned kv_heads = 1 + below(3), group = 1 + below(5), heads = kv_heads * group;
    std::vector<Sequence> sequences(1 + below(3));
    unsigned nodes = 0, rows = 0;
    for (Sequence& of : sequences) {
        const unsigned own = 1 + below(40), chain = below(2);
        of.offset = nodes;
        of.cached = 1 + below(below(4) ? 50 : 150);
        of.held = below(2) ? below(own) : 0;
        for (unsigned node = 0; node < own; node++) {
            of.parents.push_back(chain ? int(node) - 1 : int(below(node + 1)) - 1);
        }
        nodes += own - of.held;
        rows += of.cached + own;
    }
    std::vector<unsigned> scattered(rows);
    for (unsigned row = 0; row < rows; row++) {
        scattered[row] = row;
    }
    std::shuffle(scattered.begin(), scattered.end(), source);
    unsigned taken = 0, tiles;
    for (Sequence& of : sequences) {
        const unsigned own = of.cached + of.parents.size();
        of.rows.assign(scattered.begin() + taken, scattered.begin() + taken + own);
        taken += own;
    }
    const auto queries = values<T>(size_t(nodes) * heads * dim);
    const auto keys = values<T>(size_t(kv_heads) * rows * dim), all = values<T>(keys.size());
    std::vector<T> found(queries.size());
    const auto words = plan(sequences, group, width, wrong, tiles);
    launch({tiles, kv_heads, splits}, threads, [&] {
        kernel(queries.data(), keys.data(), all.data(), found.data(), words.data(), rows, heads, kv_heads, dim);
    });
    double most = 0;
    for (const Sequence& of : sequences) {
        for (unsigned at = of.held * heads; at < of.parents.size() * heads; at++) {
            const unsigned node = at / heads, head = at % heads;
            const size_t place = (size_t(of.offset + node - of.held) * heads + head) * dim;
            std::vector<unsigned> seen(of.rows.begin(), of.rows.begin() + of.cached);
            for (int other = node; other >= 0; other = of.parents[other]) {
                seen.push_back(of.rows[of.cached + other]);
            }
            std::vector<double> result(dim), scores;
            double sum = 0, highest = -INFINITY;
            for (unsigned row : seen) {
                const size_t key = (size_t(head / group) * rows + row) * dim;
                double score = 0;
                for (unsigned part = 0; part < dim; part++) {
                    score += double(number(queries[place + part])) * number(keys[key + part]);
                }
                scores.push_back(score);
                highest = std::max(highest, score);
            }
            for (size_t one = 0; one < seen.size(); one++) {
                const double weight = std::exp(scores[one] - highest);
                sum += weight;
                for (unsigned part = 0; part < dim; part++) {
                    result[part] += weight * number(all[(size_t(head / group) * rows + seen[one]) * dim + part]);
                }
            }
            for (unsigned part = 0; part < dim; part++) {
                const double error = std::abs(number(found[place + part]) - result[part] / sum);
                most = error <= most ? most : error;  // NaN, too
            }
        }
    }
    return most;
}

// As `difference`, of the kernel for any heads.
template <typename T, typename Kernel>
static double scalar(Kernel kernel, bool wrong = false) {
    return difference<T>(kernel, 32 * WARPS, QUERIES, 1, 8 * (1 + below(32)), wrong);
}

// Of a kernel for tensor cores.
template <typename T, typename Kernel>
static double tensor(Kernel kernel, unsigned dim, bool wrong = false) {
    const unsigned splits = 1 + below(9);  // contexts have from 1 to 12 chunks
    std::vector<float> partials(BLOCKS_MOST * splits * 32 * (4 + dim / 2), NAN);
    std::vector<unsigned> counters(BLOCKS_MOST);
    auto of_heads = [&](const T* queries, const T* keys, const T* values, T* attended, const unsigned* plan,
                        unsigned rows, unsigned heads, unsigned kv_heads, unsigned) {
        kernel(queries, keys, values, attended, plan, splits > 1 ? partials.data() : nullptr,
               splits > 1 ? counters.data() : nullptr, rows, heads, kv_heads);
    };
    const double most = difference<T>(of_heads, 32 * TENSOR_WARPS, TENSOR_QUERIES, splits, dim, wrong);
    return std::count(counters.begin(), counters.end(), 0) == std::ssize(counters) ? most : INFINITY;
}

// Of all for tensor cores.
static double tensor_f16() {
    return std::max({tensor<__half>(tree_attend_32_f16, 32), tensor<__half>(tree_attend_64_f16, 64),
                     tensor<__half>(tree_attend_96_f16, 96), tensor<__half>(tree_attend_128_f16, 128)});
}

static double tensor_bf16() {
    return std::max({tensor<__nv_bfloat16>(tree_attend_32_bf16, 32), tensor<__nv_bfloat16>(tree_attend_64_bf16, 64),
                     tensor<__nv_bfloat16>(tree_attend_96_bf16, 96), tensor<__nv_bfloat16>(tree_attend_128_bf16, 128)});
}

int main(int count, char** arguments) {
    const int cases = count > 1 ? std::atoi(arguments[1]) : 20;
    double wrong = 0, tensor_wrong = 0;
    for (int at = 0; at < cases; at++) {
        const double f32 = scalar<float>(tree_attend_f32), f16 = scalar<__half>(tree_attend_f16);
        const double bf16 = scalar<__nv_bfloat16>(tree_attend_bf16);
        const double on_f16 = tensor_f16(), on_bf16 = tensor_bf16();
        // Values are below 5: half a unit in the last place of f16 is 0.002, and of bf16 0.016. Weights are rounded
        // to these before tensor cores multiply values by them.
        if (!(f32 < 1e-4 && f16 < 3e-3 && bf16 < 2e-2 && on_f16 < 6e-3 && on_bf16 < 4e-2)) {
            std::printf("case %d: differences of %g in f32, %g in f16, %g in bf16; on tensor cores of %g and %g\n", at,
                        f32, f16, bf16, on_f16, on_bf16);
            return 1;
        }
        wrong = std::max(wrong, scalar<float>(tree_attend_f32, true));
        tensor_wrong = std::max(tensor_wrong, tensor<__half>(tree_attend_64_f16, 64, true));
    }
    std::printf("%d cases; a wrong bit makes a difference of %g, on tensor cores of %g\n", cases, wrong, tensor_wrong);
    return wrong > 0.1 && tensor_wrong > 0.1 ? 0 : 1;
}
