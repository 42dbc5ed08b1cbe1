#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can tell, in ten minutes after the build.
#
#   tests/gpu.sh                all parts
#   tests/gpu.sh PART...        selftest: the device computes what the CPU does, in every architecture and precision
#                               parity: a night's strict texts in f32 are those of the CPU, or it fails; in bf16 it
#                               tells how many are
#                               steps: milliseconds of a step by sequences and nodes, and the device's floor
#                               paper: the paper's variants
#
# Figures go to output/gpu. LASER_GPU_MODEL names a model directory for steps and paper; without it they measure
# fixtures/profile-lm, padded to 886M parameters. LASER_GPU_TEXTS is how many texts of each kind paper takes, by default
# 12; 100 would take longer than all other parts.
# The CUDA toolkit must be installed (deploy/README.md), and CARGO_TARGET_DIR is honoured; where LASER_GPU_BIN names a
# folder with laser and laser-bench, these run and nothing is built. LASER_GPU_DEVICE=cpu tries the script itself
# without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "tests/gpu.sh: $*" >&2
    exit 1
}

device=${LASER_GPU_DEVICE:-cuda}
output=output/gpu
bin=${LASER_GPU_BIN:-${CARGO_TARGET_DIR:-target}/release}

# Kernels run only on the compute capability that they are compiled for.
build() {
    local features=()
    if [[ $device != cpu ]]; then
        command -v nvidia-smi >/dev/null || fail "no nvidia-smi: this machine has no NVIDIA GPU or no driver for it"
        nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader
    fi
    [[ -z ${LASER_GPU_BIN:-} ]] || return 0
    if [[ $device != cpu ]]; then
        command -v nvcc >/dev/null || fail "no nvcc: install the CUDA toolkit as deploy/README.md says"
        CUDA_COMPUTE_CAP=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
        [[ $CUDA_COMPUTE_CAP =~ ^[0-9]+$ ]] || fail "nvidia-smi names no GPU"
        export CUDA_COMPUTE_CAP
        features=(--features cuda)
    fi
    cargo build --release --workspace --locked "${features[@]}" --bin laser --bin laser-bench
}

# A model of 886M parameters whose texts are the small one's, or the one that is given.
model() {
    local padded=$output/886m
    if [[ -n ${LASER_GPU_MODEL:-} ]]; then
        echo "$LASER_GPU_MODEL"
    else
        [[ -d $padded ]] || "$bin/laser-bench" pad --model fixtures/profile-lm -o "$padded" --hidden 2048 --layers 16 \
            --heads 64 --intermediate 5632 --vocabulary 32000 >&2
        echo "$padded"
    fi
}

# The self-test reads no more of a model than its configuration, so a changed one is a model of another architecture.
# Heads of 80 are none that tensor cores attend to.
selftest() {
    local architecture width precision job jobs config
    for architecture in Llama Mistral Qwen2 Qwen3; do
        jobs=()
        for width in 32 64 80 128; do
            config=$output/selftest-$architecture-$width
            rm -rf "$config"
            cp -r fixtures/profile-lm "$config"
            sed -i -e "s/LlamaForCausalLM/${architecture}ForCausalLM/" -e "s/\"head_dim\": 32/\"head_dim\": $width/" \
                "$config/config.json"
            for precision in f32 f16 bf16 f32,isq=q8_0 f16,isq=q8_0 f16,isq=q4k bf16,isq=q6k; do
                selftest_of "$config" "$precision" "$architecture, heads of $width, $precision" &
                jobs+=($!)
            done
        done
        for job in "${jobs[@]}"; do
            wait "$job"
        done
    done
}

# A model in a precision, with the words that say which.
selftest_of() {
    local options=(--set "model.path=$1" --set "model.device=$device" --set "model.dtype=${2%,*}") found
    [[ $2 == *isq* ]] && options+=(--set "model.isq=${2#*=}")
    found=$("$bin/laser" selftest configs/demo.toml "${options[@]}") || fail "$3: the self-test fails"
    echo "$3: $found"
}

# In f32 all texts are equal on an H100 and an H200; one that differs is a fault to be found. In bf16 the two most
# probable tokens often tie but for the order of sums, and the share of texts that differ is the figure.
parity() {
    local dtype expected python=python3
    if ! python3 -c 'import pyarrow' 2>/dev/null; then
        python=$output/python/bin/python
        [[ -x $python ]] || python3 -m venv "$output/python"
        "$python" -m pip install --quiet --disable-pip-version-check pyarrow
    fi
    night cpu f32
    for dtype in f32 bf16; do
        expected=()
        [[ $dtype != f32 ]] || expected=(--equal)
        night "$device" "$dtype"
        echo "$device in $dtype against the CPU in f32:"
        "$python" tests/same_texts.py "${expected[@]}" "$output/night-cpu-f32" "$output/night-$device-$dtype" ||
            fail "parity: texts of $device in $dtype are not those of the CPU"
    done
}

# The demo's nights with strict verification.
night() {
    local to=$output/night-$1-$2
    rm -rf "$to"
    "$bin/laser" run configs/demo.toml --set verification.policy=strict --set "output.path=$to" \
        --set "model.device=$1" --set "model.dtype=$2" >"$to.log" 2>&1 || fail "see $to.log"
}

# What nvidia-smi calls the device.
device_name() {
    local index=${device#cuda}
    if [[ $device == cpu ]]; then
        echo "$device"
    else
        index=${index#:}
        nvidia-smi --id="${index:-0}" --query-gpu=name --format=csv,noheader
    fi
}

# With 600 tokens of context, as the estimates of docs/research/gpu.md have it.
steps() {
    local batch nodes tokens isq path name found=()
    path=$(model)
    name=$(device_name)
    for batch in 1 16 64 256; do
        tokens=
        for nodes in 1 2 4 16 64; do
            ((batch * nodes > 4096)) || tokens+=${tokens:+,}$((batch * nodes))
        done
        "$bin/laser-bench" engine --model "$path" --device "$device" --dtype bf16 --context 600 --batch "$batch" \
            --tokens "$tokens" --rounds 20 --output "$output/steps-$batch" --markdown
        found+=("$output/steps-$batch/engine.json")
    done
    python3 tests/gpu_floor.py "$name" "${found[@]}"
    # Up to 64 nodes are multiplied with the blocks as they are read.
    for isq in q8_0 q4k; do
        "$bin/laser-bench" engine --model "$path" --device "$device" --dtype f16 --isq "$isq" --context 600 \
            --tokens 1,8,16,32,64,65,256 --rounds 20 --output "$output/steps-$isq" --markdown
    done
}

# Variants of the paper's table 2, with one text at a time and with 64, or with all at once where there are fewer.
paper() {
    local batch path texts=${LASER_GPU_TEXTS:-12}
    path=$(model)
    for batch in 1 $((texts < 64 ? texts : 64)); do
        "$bin/laser-bench" paper --users-table fixtures/demo/tonight/users.parquet \
            --items-table fixtures/demo/tonight/items.parquet --model "$path" --old-model fixtures/profile-lm \
            --chat false --device "$device" --dtype bf16 --batch "$batch" --old-texts 100 --new-texts "$texts" \
            --output "$output/paper-$batch" --markdown
    done
}

(($#)) || set -- selftest parity steps paper
for part in "$@"; do
    [[ $part =~ ^(selftest|parity|steps|paper)$ ]] || fail "unknown part $part: expected selftest, parity, steps, paper"
done
mkdir -p "$output"
build
for part in "$@"; do
    echo "== $part"
    "$part"
done
