// Attention of draft trees over keys and values by row number.
//
// A block holds QUERIES queries of one sequence and one key head: query heads that share a key head are more queries,
// so that each key is read once for all of them. It walks over the sequence's rows, KEYS at a time, with the softmax
// online (Milakov and Gimelshein 2018). Keys and values are read in place, and ancestors are bits.
//
// Arithmetic bounds it, not memory: 1,024 nodes over 600 rows of 32 heads of 128 are 10 GFLOP a layer, on cores for f32
// without tensor cores.

#include "tree.h"

constexpr unsigned QUERIES = 8;
constexpr unsigned KEYS = 32;
constexpr unsigned WARPS = 4;
constexpr unsigned OWN = QUERIES / WARPS;  // queries of a warp
constexpr unsigned PARTS = 8;              // elements of a head in a lane: heads are of at most 256

// KEYS rows of one head from `position` on, as f32; lines of an odd number of words meet no bank twice.
template <typename T>
__device__ void load(float* to, const T* head, const unsigned* plan, const Tile& tile, unsigned position,
                     unsigned dim) {
    const unsigned total = tile.cached + tile.held + tile.nodes;
    for (unsigned at = threadIdx.x; at < KEYS * dim; at += 32 * WARPS) {
        const unsigned key = at / dim, part = at % dim;
        const bool exists = position + key < total;
        const size_t row = exists ? plan[tile.rows + position + key] : 0;
        // What does not exist has weight 0, and 0 times what memory held may be NaN.
        to[key * (dim + 1) + part] = exists ? number(head[row * dim + part]) : 0.0f;
    }
}

template <typename T>
__device__ void attend(const T* queries, const T* keys, const T* values, T* attended, const unsigned* plan,
                       unsigned rows, unsigned heads, unsigned kv_heads, unsigned dim) {
    extern __shared__ float shared[];
    float* query = shared;                    // [QUERIES, dim]
    float* line = query + QUERIES * dim;      // [KEYS, dim + 1], keys and then values
    float* scores = line + KEYS * (dim + 1);  // [QUERIES, KEYS]
    float* weights = scores + QUERIES * KEYS;
    const Tile tile = reinterpret_cast<const Tile*>(plan)[blockIdx.x];
    const unsigned group = heads / kv_heads, head = blockIdx.y;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned count = min(QUERIES, tile.nodes * group - tile.first);
    // Of a query: where its vector starts.
    auto place = [&](unsigned at) {
        const unsigned node = (tile.first + at) / group, of = (tile.first + at) % group;
        return (size_t(tile.offset + node) * heads + head * group + of) * dim;
    };
    for (unsigned at = threadIdx.x; at < QUERIES * dim; at += 32 * WARPS) {
        query[at] = at / dim < count ? number(queries[place(at / dim) + at % dim]) : 0.0f;
    }
    // Finite, so that a tile that a node sees nothing of gives weights of 0 and not NaN.
    float most[OWN], sum[OWN] = {}, result[OWN][PARTS] = {};
    for (unsigned own = 0; own < OWN; own++) {
        most[own] = -1e30f;
    }
    // Ancestors come before their nodes: nothing behind the last node is seen.
    const unsigned end = tile.cached + tile.held + (tile.first + count - 1) / group + 1;
    for (unsigned position = 0; position < end; position += KEYS) {
        load(line, keys + size_t(head) * rows * dim, plan, tile, position, dim);
        __syncthreads();
        float dot[OWN] = {};
        for (unsigned part = 0; part < dim; part++) {
            for (unsigned own = 0; own < OWN; own++) {
                dot[own] += line[lane * (dim + 1) + part] * query[(warp * OWN + own) * dim + part];
            }
        }
        for (unsigned own = 0; own < OWN; own++) {
            const unsigned at = warp * OWN + own;
            const bool seen = at < count && sees(plan, tile, (tile.first + at) / group, position + lane);
            dot[own] = seen ? dot[own] : -INFINITY;
            scores[at * KEYS + lane] = dot[own];
        }
        __syncthreads();
        load(line, values + size_t(head) * rows * dim, plan, tile, position, dim);
        for (unsigned own = 0; own < OWN; own++) {
            const unsigned at = (warp * OWN + own) * KEYS;
            const float before = most[own];
            for (unsigned key = 0; key < KEYS; key++) {
                most[own] = fmaxf(most[own], scores[at + key]);
            }
            weights[at + lane] = expf(dot[own] - most[own]);
            const float scale = expf(before - most[own]);
            sum[own] *= scale;
            for (unsigned part = 0; part < PARTS; part++) {
                result[own][part] *= scale;
            }
        }
        __syncthreads();
        for (unsigned key = 0; key < KEYS; key++) {
            for (unsigned own = 0; own < OWN; own++) {
                const float weight = weights[(warp * OWN + own) * KEYS + key];
                sum[own] += weight;
#pragma unroll
                for (unsigned part = 0; part < PARTS; part++) {
                    const unsigned at = lane + 32 * part;
                    result[own][part] += at < dim ? weight * line[key * (dim + 1) + at] : 0.0f;
                }
            }
        }
        __syncthreads();
    }
    for (unsigned own = 0; own < OWN; own++) {
        const unsigned at = warp * OWN + own;
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
            if (at < count && lane + 32 * part < dim) {
                store(attended + place(at) + lane + 32 * part, result[own][part] / sum[own]);
            }
        }
    }
}

// Grid [tiles, kv_heads], 128 threads, 4 · (QUERIES · dim + KEYS · (dim + 1) + 2 · QUERIES · KEYS) bytes. Queries and
// results are [nodes, heads, dim], the queries scaled; keys and values [kv_heads, rows, dim].
#define TREE_ATTEND(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        NAME(const T* queries, const T* keys, const T* values, T* attended, const unsigned* plan, unsigned rows,       \
             unsigned heads, unsigned kv_heads, unsigned dim) {                                                        \
        attend(queries, keys, values, attended, plan, rows, heads, kv_heads, dim);                                     \
    }

TREE_ATTEND(tree_attend_f32, float)
TREE_ATTEND(tree_attend_f16, __half)
TREE_ATTEND(tree_attend_bf16, __nv_bfloat16)
