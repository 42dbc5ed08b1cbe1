// What attention knows of the sequences of a step.
#pragma once

#include "number.h"

// What a block works on; engine/src/tree_plan.rs writes it. Both places are in the same array of words, whose start is
// the tiles of all blocks.
struct Tile {
    unsigned offset;  // the sequence's first node in the batch
    unsigned nodes;   // its nodes in this step
    unsigned cached;  // its committed rows
    unsigned held;    // its nodes of earlier steps, which its tree begins with
    unsigned rows;    // where its rows are: the committed ones, then the tree's
    unsigned bits;    // where its ancestors are: for each node a bit for each of the tree, in words, itself included
    unsigned first;   // the first query, which is node * (heads / kv_heads) + head
};

// Nodes see the committed rows, themselves and their ancestors.
__device__ inline bool sees(const unsigned* plan, const Tile& tile, unsigned node, unsigned position) {
    if (position < tile.cached) {
        return true;
    }
    const unsigned other = position - tile.cached, tree = tile.held + tile.nodes, words = (tree + 31) / 32;
    return other < tree && (plan[tile.bits + node * words + other / 32] >> other % 32 & 1);
}
