#!/usr/bin/env bash
# Tests the GPU path on a machine without a GPU.
#
#   tests/cuda.sh               all parts
#   tests/cuda.sh PART...       kernels: our own kernels on the host, against sums in f64 (engine/cuda/host/)
#                               fake_driver: the engine on a driver without a device (tests/cuda/driver.cpp)
#
# It installs the CUDA toolkit from PyPI (1.2 GB) beside the tools of the other tests (LASER_TEST_HOME is honoured). The
# first run compiles the kernels of candle and mistral.rs, 12 minutes on two cores. CARGO_TARGET_DIR is honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "tests/cuda.sh: $*" >&2
    exit 1
}

# What this machine cannot do is no failure; the word says what was not tested.
skip() {
    echo "tests/cuda.sh: skipped: $*" >&2
    exit 0
}

# Sets CUDA_HOME to a toolkit with nvcc, and what its users look at.
install_cuda() {
    local home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/cuda-13.0
    [[ $(uname -sm) == "Linux x86_64" ]] || skip "everything: $(uname -sm) has no CUDA toolkit on PyPI"
    if [[ ! -f $home/done ]]; then
        command -v g++ >/dev/null || skip "everything: nvcc needs g++"
        python3 -m venv "$home" || skip "everything: python3 has no venv"
        "$home/bin/pip" install --quiet --disable-pip-version-check \
            nvidia-{cuda-nvcc,nvvm,cuda-crt,cuda-runtime,cuda-cccl,cuda-nvrtc,cublas}==13.0.* nvidia-curand==10.4.* ||
            skip "everything: nvcc could not be installed from PyPI"
        link_libraries "$(echo "$home"/lib/python3*/site-packages/nvidia/cu13)"
        touch "$home/done"
    fi
    CUDA_HOME=$(echo "$home"/lib/python3*/site-packages/nvidia/cu13)
    export CUDA_HOME CUDA_COMPUTE_CAP=80 PATH=$CUDA_HOME/bin:$PATH
    export LIBRARY_PATH=$CUDA_HOME/lib LD_LIBRARY_PATH=$CUDA_HOME/lib
}

# The names that linkers look for, which the packages lack, and a stand-in for the driver's library.
link_libraries() {
    local library
    ln -sfn lib "$1/lib64"
    for library in "$1"/lib/lib*.so.*; do
        ln -sf "${library##*/}" "${library%.so.*}.so"
    done
    functions "$1" cuda.h cudaTypedefs.h | sed 's/.*/void &(void) {}/' |
        cc -shared -fPIC -w -x c - -Wl,-soname,libcuda.so.1 -o "$1/lib/libcuda.so"
}

# What looks like a function in headers of a toolkit.
functions() {
    local home=$1 name='\b(cu[A-Z]|cublas|curand|nvrtc|cuda|__cuda)[A-Za-z0-9]+(_v[0-9]+)?(_ptsz|_ptds)?\b'
    shift
    (cd "$home/include" && grep -ohE "$name" "$@") | sort -u
}

# The driver without a device, in a folder of libraries that take the place of the toolkit's: six names of one file.
build_driver() {
    local to=$1 name
    mkdir -p "$to"
    g++ -std=c++17 -O1 -Wall -Wextra -Werror -fPIC -isystem "$CUDA_HOME/include" -c tests/cuda/driver.cpp \
        -o "$to/driver.o"
    # Every other function of the toolkit ends the process with its name.
    {
        printf '#include <stdio.h>\n#include <stdlib.h>\n'
        printf '#define NONE(name) void name(void) { fprintf(stderr, "fake CUDA driver: no " #name "\\n"); abort(); }\n'
        functions "$CUDA_HOME" cuda.h cuda_runtime_api.h crt/host_runtime.h cublas_api.h cublasLt.h curand.h nvrtc.h |
            sed -E 's/^cuda[A-Z].*/&\n&_ptsz\n&_ptds/' | sort -u |
            grep -vxFf <(nm -g --defined-only "$to/driver.o" | awk '{ print $3 }') | sed 's/.*/NONE(&)/'
    } | cc -c -fPIC -w -x c - -o "$to/none.o"
    # Programs look for the functions under these versions.
    for name in libcublas.so.13 libcublasLt.so.13 libcudart.so.13 libcurand.so.10 libnvrtc.so.13; do
        echo "$name { };"
    done >"$to/versions"
    g++ -shared "$to/driver.o" "$to/none.o" -Wl,-soname,libcuda.so.1 -Wl,--version-script="$to/versions" \
        -o "$to/libcuda.so.1"
    for name in libcublas.so.13 libcublasLt.so.13 libcudart.so.13 libcurand.so.10 libnvrtc.so.13; do
        ln -sf libcuda.so.1 "$to/$name"
    done
}

# Whole schedules of every architecture and precision on "cuda:0", and the number of calls that they make.
fake_driver() {
    local driver
    driver=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fake-cuda
    local tests=(--release --locked --package laser-engine --features cuda --test engine)
    build_driver "$driver"
    export LASER_FAKE_CUDA=$driver/counts
    # Only tests have the driver: nvcc and cargo want the toolkit's libraries.
    rm -f "$LASER_FAKE_CUDA"
    test_driver "$driver"
    cargo test "${tests[@]}" --no-run
    rm -f "$LASER_FAKE_CUDA"
    LD_LIBRARY_PATH=$driver cargo test "${tests[@]}" cuda::
}

# The wrong calls that the driver must find.
test_driver() {
    # Machine code for one capability, as mistral.rs' build makes it.
    local nvcc=(nvcc -std=c++17 -gencode=arch=compute_80,code=sm_80 tests/cuda/driver_test.cu)
    "${nvcc[@]}" -ptx -o "$1/driver_test.ptx"
    "${nvcc[@]}" --cudart=shared -L"$CUDA_HOME/lib" -lcuda -lcublas -lcublasLt -o "$1/driver_test"
    LD_LIBRARY_PATH=$1 "$1/driver_test" "$1/driver_test.ptx" || fail "the driver of tests/cuda overlooks wrong calls"
}

# Our own kernels: no spills, and results as f64 gives them, with threads of the host as those of a block. Those for
# tensor cores keep their operands in registers; of 224, two blocks of attention fit on a multiprocessor, of 128 two of
# a product of few nodes, and of 255 one of such a product of 64 nodes.
kernels() {
    local to capability name
    to=$(mktemp -d)
    for capability in 80 89 90; do
        nvcc -std=c++17 -arch=sm_$capability -cubin -Xptxas -v engine/cuda/kernels.cu -o "$to/kernels" 2>"$to/log"
        awk '/spill stores/ && !/ 0 bytes spill stores, 0 bytes spill loads/ { exit 1 }
             /Function properties/ { most = $NF ~ /^tree_attend_[0-9]/ ? 224 : $NF ~ /^few_product/ ? 128 : 64 }
             /Function properties/ && $NF ~ /^few_product_8/ { most = 255 }
             / registers/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^registers/ && $i > most) exit 1 }' "$to/log" ||
            fail "a kernel takes more registers than it may (64, on tensor cores 128 to 255), or spills: $(<"$to/log")"
    done
    for name in tree layer top_k blocks; do
        on_the_host "$name" "$to"
    done
    rm -r "$to"
}

# A kernel against its oracle and under ThreadSanitizer, which must miss the barriers when they are gone.
on_the_host() {
    local test=$2/$1
    local build=(g++ -std=c++20 -O2 -Wall -Wextra -Werror -Wno-unknown-pragmas -isystem "$CUDA_HOME/include" -pthread
        "engine/cuda/host/$1_test.cpp" -o "$test")
    "${build[@]}"
    "$test" 20
    "${build[@]}" -g -fsanitize=thread
    "$test" 5
    "${build[@]}" -g -fsanitize=thread -DWITHOUT_BARRIERS
    if TSAN_OPTIONS=halt_on_error=1 "$test" 1 >/dev/null 2>&1; then
        fail "the kernels of $1 pass without their barriers"
    fi
}

(($#)) || set -- kernels fake_driver
for part in "$@"; do
    [[ $part =~ ^(kernels|fake_driver)$ ]] || fail "unknown part $part; expected kernels or fake_driver"
done
install_cuda
for part in "$@"; do
    "$part"
done
