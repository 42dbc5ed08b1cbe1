#!/usr/bin/env bash
# Tests the CPU kernels for aarch64 on an x86_64 machine: built with GCC's cross-linker, run under qemu-user.
#
#   tests/aarch64.sh [TEST...]    lints, and the tests of laser-decode and laser-cpu; names of tests are a filter
#
# It tells whether results are right, not how fast they come. It installs a Rust target, and on Debian qemu and GCC
# (200 MB). CARGO_TARGET_DIR is honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
build=(--release --locked --target "$target" --package laser-decode --package laser-cpu)

# What this machine cannot do is no failure; the word says what was not tested.
skip() {
    echo "tests/aarch64.sh: skipped: $*" >&2
    exit 0
}

install_all() {
    local missing=() sudo
    need() { command -v "$1" >/dev/null || missing+=("$2"); }
    need qemu-aarch64-static qemu-user-static
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    [[ -d /usr/aarch64-linux-gnu/include ]] || missing+=(libc6-dev-arm64-cross)
    if ((${#missing[@]})); then
        command -v apt-get >/dev/null || skip "everything: ${missing[*]} missing, and there is no apt-get"
        sudo=$([ "$(id -u)" = 0 ] || echo sudo)
        { $sudo apt-get update -qq && $sudo apt-get install -y -qq "${missing[@]}"; } ||
            skip "everything: ${missing[*]} could not be installed"
    fi
    [[ -d $(rustc --print sysroot)/lib/rustlib/$target ]] || rustup target add "$target" ||
        skip "everything: rustup could not add the target $target"
}

# A processor as qemu names it: "max" has all that qemu knows, cortex-a72 no dot products of bytes.
test_on() {
    local processor=$1
    shift
    echo "on $processor:"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -cpu $processor -L /usr/aarch64-linux-gnu" \
        cargo test "${build[@]}" --tests -- "$@"
}

[[ $(uname -sm) == "Linux x86_64" ]] || skip "everything: this is for Linux on x86_64, not $(uname -sm)"
install_all
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
cargo clippy "${build[@]}" --all-targets -- -D warnings
test_on max "$@"
test_on cortex-a72 "$@"
