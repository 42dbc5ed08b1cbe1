// All kernels, as engine/build.rs compiles them.
#include "blocks.cu"
#include "layer.cu"
#include "top_k.cu"
#include "tree.cu"
#include "tree_tensor.cu"
