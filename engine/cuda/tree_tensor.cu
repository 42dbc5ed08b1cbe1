// The attention of tree.cu on tensor cores, for keys of 16 bits and heads of 32, 64, 96 or 128.
//
// A block holds TENSOR_QUERIES queries of one sequence and one key head, and its warps share the context: each takes
// CHUNK rows, skips those of the others and keeps an online softmax of its own; what they found is merged at the end.
// Blocks of 64 queries, 16 for each warp, share the rows they read in the L1 cache, but were at most a tenth faster and
// mostly slower (docs/research/gpu.md).
//
// Few sequences with few key heads make few blocks, so several may share a context (split-K, as in Flash-Decoding, Dao
// et al. 2023): each leaves what it found in memory, and the one that comes last merges the parts, in an order that is
// the same whichever that is. So many multiprocessors read a long context without a second launch.
//
// Nothing is staged in shared memory. The order of a product's terms is free, so a lane takes as terms what it can load
// in 16 bytes: of a key 8 neighbouring elements for two products, of values 8 neighbouring dimensions of two rows.
#pragma once

#include "tensor.h"
#include "tree.h"

constexpr unsigned TENSOR_QUERIES = 16;
constexpr unsigned TENSOR_WARPS = 4;
constexpr unsigned CHUNK = 16;

// What a warp knows of its queries, of which a lane has the rows lane / 4 and lane / 4 + 8.
template <unsigned DIM>
struct Partial {
    float most[2] = {-1e30f, -1e30f}, sum[2] = {};
    float result[DIM / 8][4] = {};

    __device__ void scale(unsigned row, float by) {
        sum[row] *= by;
        for (auto& of : result) {
            of[2 * row] *= by;
            of[2 * row + 1] *= by;
        }
    }

    __device__ void raise(unsigned row, float to) {
        if (to > most[row]) {
            scale(row, exp2f(most[row] - to));
            most[row] = to;
        }
    }

    // A word at a time, a warp's beside each other.
    __device__ void give(float* to) const {
        for (unsigned row = 0; row < 2; row++) {
            to[32 * row] = most[row];
            to[32 * (2 + row)] = sum[row];
        }
        for (unsigned at = 0; at < DIM / 2; at++) {
            to[32 * (4 + at)] = result[at / 4][at % 4];
        }
    }

    // What `word` reads was given. A part that saw nothing has sums of 0, whatever its weight.
    template <typename Word>
    __device__ void merge(Word word) {
        float weight[2];
        for (unsigned row = 0; row < 2; row++) {
            const float to = word(32 * row);
            raise(row, to);
            weight[row] = exp2f(to - most[row]);
            sum[row] += weight[row] * word(32 * (2 + row));
        }
        for (unsigned at = 0; at < DIM / 2; at++) {
            result[at / 4][at % 4] += weight[at % 4 / 2] * word(32 * (4 + at));
        }
    }
};

// Words of all lanes.
template <unsigned DIM>
constexpr unsigned PARTIAL = 32 * (4 + DIM / 2);

// What the warps of the block found, in the first one's.
template <unsigned DIM>
__device__ void merge_warps(Partial<DIM>& own, float* shared) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned others = TENSOR_WARPS / 2; others > 0; others /= 2) {
        float* of_warp = shared + warp % others * PARTIAL<DIM> + lane;
        if (warp / others == 1) {
            own.give(of_warp);
        }
        __syncthreads();
        if (warp < others) {
            own.merge([&](unsigned at) { return of_warp[at]; });
        }
        __syncthreads();
    }
}

// What all blocks of a tile and key head found, in the first warp of the one that comes last; whether that is this one.
template <unsigned DIM>
__device__ bool merge_blocks(Partial<DIM>& own, float* shared, float* partials, unsigned* counters) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = gridDim.z - 1;
    const unsigned place = blockIdx.x * gridDim.y + blockIdx.y;
    float* parts = partials + size_t(place) * gridDim.z * PARTIAL<DIM> + lane;
    if (warp == 0) {
        own.give(parts + blockIdx.z * PARTIAL<DIM>);
    }
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
        // Whoever reads the number sees what was written before it. The last one makes it 0, for the next launch.
        __threadfence();
        is_last = atomicInc(counters + place, most) == most;
        __threadfence();
    }
    if (!__syncthreads_or(is_last)) {
        return false;
    }
    own = Partial<DIM>();
    for (unsigned part = warp; part <= most; part += TENSOR_WARPS) {
        // Not from the L1 cache, which does not know what other multiprocessors write.
        own.merge([&](unsigned at) { return __ldcg(parts + part * PARTIAL<DIM> + at); });
    }
    merge_warps(own, shared);
    return true;
}

template <unsigned DIM, typename T>
__device__ void attend_tensor(const T* queries, const T* keys, const T* values, T* attended, const unsigned* plan,
                              float* partials, unsigned* counters, unsigned rows, unsigned heads, unsigned kv_heads) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr unsigned OWN_DIM = DIM % 64 == 0 ? 8 : 4;  // neighbouring dimensions of a lane
    extern __shared__ float shared[];
    const Tile tile = reinterpret_cast<const Tile*>(plan)[blockIdx.x];
    const unsigned group = heads / kv_heads, head = blockIdx.y;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, outer = lane / 4, inner = lane % 4;
    const unsigned last = tile.nodes * group - 1, total = tile.cached + tile.held + tile.nodes;
    // Of a query: its node, and where its vector starts. Those behind the last one are computed as that one.
    auto node = [&](unsigned at) { return min(tile.first + at, last) / group; };
    auto place = [&](unsigned at) {
        const unsigned of = min(tile.first + at, last) % group;
        return (size_t(tile.offset + node(at)) * heads + head * group + of) * DIM;
    };
    const T* own_keys = keys + size_t(head) * rows * DIM;
    const T* own_values = values + size_t(head) * rows * DIM;

    unsigned query[DIM / 16][4];
    for (unsigned at = 0; at < DIM / 32; at++) {
        const auto low = words<4>(queries + place(outer) + 32 * at + 8 * inner);
        const auto high = words<4>(queries + place(outer + 8) + 32 * at + 8 * inner);
        for (unsigned half = 0; half < 2; half++) {
            query[2 * at + half][0] = low.numbers[2 * half];
            query[2 * at + half][1] = high.numbers[2 * half];
            query[2 * at + half][2] = low.numbers[2 * half + 1];
            query[2 * at + half][3] = high.numbers[2 * half + 1];
        }
    }
    Partial<DIM> own;
    // Ancestors come before their nodes: nothing behind the last node is seen.
    const unsigned end = tile.cached + tile.held + node(TENSOR_QUERIES - 1) + 1;
    // Blocks have as many chunks as each other, or one more: some none, if the context has fewer chunks than blocks.
    const unsigned chunks = (end + CHUNK - 1) / CHUNK, splits = gridDim.z;
    const unsigned behind = chunks * (blockIdx.z + 1) / splits;
    for (unsigned chunk = chunks * blockIdx.z / splits + warp; chunk < behind; chunk += TENSOR_WARPS) {
        const unsigned position = CHUNK * chunk;
        // What does not exist has weight 0, and a row that exists is finite.
        auto row = [&](unsigned at) { return size_t(plan[tile.rows + min(position + at, total - 1)]) * DIM; };
        const T* key[2] = {own_keys + row(outer), own_keys + row(outer + 8)};
        Line<unsigned, 4> loaded[2][DIM / 32];
        for (unsigned at = 0; at < DIM / 32; at++) {
            for (unsigned half = 0; half < 2; half++) {
                loaded[half][at] = words<4>(key[half] + 32 * at + 8 * inner);
            }
        }
        // Of rows 2 * inner and the next, and of those 8 behind.
        Line<unsigned, OWN_DIM / 2> value[DIM / 8 / OWN_DIM][4];
        for (unsigned of = 0; of < 4; of++) {
            const T* from = own_values + row(2 * inner + of % 2 + of / 2 * 8) + OWN_DIM * outer;
            for (unsigned at = 0; at < DIM / 8 / OWN_DIM; at++) {
                value[at][of] = words<OWN_DIM / 2>(from + 8 * OWN_DIM * at);
            }
        }
        float scores[2][4] = {};
        for (unsigned half = 0; half < 2; half++) {
            for (unsigned at = 0; at < DIM / 32; at++) {
                const unsigned* key = loaded[half][at].numbers;
                multiply_add(scores[half], query[2 * at], key[0], key[1], T());
                multiply_add(scores[half], query[2 * at + 1], key[2], key[3], T());
            }
        }
        const bool all = position + CHUNK <= tile.cached;
        float most[2] = {-1e30f, -1e30f};
        for (unsigned at = 0; at < 8; at++) {
            const unsigned half = at / 4, of = at / 2 % 2, one = at % 2;
            const bool seen = all || sees(plan, tile, node(outer + 8 * of), position + 8 * half + 2 * inner + one);
            float& score = scores[half][2 * of + one];
            score = seen ? score * LOG2_E : -INFINITY;
            most[of] = fmaxf(most[of], score);
        }
        for (unsigned of = 0; of < 2; of++) {
            most[of] = fmaxf(most[of], __shfl_xor_sync(0xffffffff, most[of], 1));
            most[of] = fmaxf(most[of], __shfl_xor_sync(0xffffffff, most[of], 2));
            own.raise(of, most[of]);
        }
        unsigned weights[4];
        for (unsigned at = 0; at < 4; at++) {
            const unsigned half = at / 2, of = at % 2;
            const float a = exp2f(scores[half][2 * of] - own.most[of]);
            const float b = exp2f(scores[half][2 * of + 1] - own.most[of]);
            own.sum[of] += a + b;
            weights[at] = pack<T>(a, b);
        }
        for (unsigned at = 0; at < DIM / 8; at++) {
            const auto& of = value[at / OWN_DIM];
            const unsigned word = at % OWN_DIM / 2;
            unsigned pair[2];
            for (unsigned half = 0; half < 2; half++) {
                const unsigned a = of[2 * half].numbers[word], b = of[2 * half + 1].numbers[word];
                pair[half] = at % 2 ? a >> 16 | (b & 0xffff0000) : (a & 0xffff) | b << 16;
            }
            multiply_add(own.result[at], weights, pair[0], pair[1], T());
        }
    }
    // A lane has summed over its own rows.
    for (unsigned of = 0; of < 2; of++) {
        own.sum[of] += __shfl_xor_sync(0xffffffff, own.sum[of], 1);
        own.sum[of] += __shfl_xor_sync(0xffffffff, own.sum[of], 2);
    }
    merge_warps(own, shared);
    if (splits > 1 && !merge_blocks(own, shared, partials, counters)) {
        return;
    }
    if (warp > 0) {
        return;
    }
    for (unsigned of = 0; of < 2; of++) {
        if (tile.first + outer + 8 * of > last) {
            continue;
        }
        T* to = attended + place(outer + 8 * of);
        const float scale = 1.0f / own.sum[of];
        for (unsigned at = 0; at < DIM / 8; at += OWN_DIM) {
            for (unsigned one = 0; one < 2; one++) {
                Line<T, OWN_DIM> found;
                for (unsigned dim = 0; dim < OWN_DIM; dim++) {
                    store(found.numbers + dim, own.result[at + dim][2 * of + one] * scale);
                }
                store(to + 8 * at + OWN_DIM * (2 * inner + one), found);
            }
        }
    }
}

// Grid [tiles, kv_heads, splits], 32 * TENSOR_WARPS threads, 4 · TENSOR_WARPS / 2 · PARTIAL bytes; tensors as those of
// tree_attend. With more than one split, `partials` are [tiles, kv_heads, splits, PARTIAL], and `counters`
// [tiles, kv_heads] are 0 before and after.
#define TREE_ATTEND_TENSOR(DIM, SUFFIX, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * TENSOR_WARPS, 2)                                                 \
        tree_attend_##DIM##_##SUFFIX(const T* queries, const T* keys, const T* values, T* attended,                    \
                                     const unsigned* plan, float* partials, unsigned* counters, unsigned rows,         \
                                     unsigned heads, unsigned kv_heads) {                                              \
        attend_tensor<DIM>(queries, keys, values, attended, plan, partials, counters, rows, heads, kv_heads);          \
    }

TREE_ATTEND_TENSOR(32, f16, __half)
TREE_ATTEND_TENSOR(64, f16, __half)
TREE_ATTEND_TENSOR(96, f16, __half)
TREE_ATTEND_TENSOR(128, f16, __half)
TREE_ATTEND_TENSOR(32, bf16, __nv_bfloat16)
TREE_ATTEND_TENSOR(64, bf16, __nv_bfloat16)
TREE_ATTEND_TENSOR(96, bf16, __nv_bfloat16)
TREE_ATTEND_TENSOR(128, bf16, __nv_bfloat16)
