#!/usr/bin/env bash
# Passes all tests: formatting, lints, documentation, unit, property and integration tests.
# Installs what they need (on Debian: a C compiler). CARGO_TARGET_DIR is honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

need() { command -v "$1" >/dev/null || missing+=("$2"); }
missing=()
need cc gcc
need make make
need python3 python3
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if ((${#missing[@]})); then
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq "${missing[@]}"
fi

# Two NATS servers, for the tests of the queue.
source tests/nats.sh

# Servers of S3 and of Azure's blob storage, for the tests of object stores.
source tests/moto.sh
source tests/azurite.sh

# A text encoder, for the tests of embeddings.
source tests/encoder.sh

# Feast, DuckDB, pandas and Polars, for the tests that read what is written.
source tests/feast.sh

# deploy/ is built and validated without a cluster.
tests/deploy.sh

# The same profile as the main job's, so that mistralrs is compiled once.
cargo fmt --all --check
cargo clippy --release --workspace --all-targets --locked -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --locked --document-private-items
cargo test --release --workspace --locked --lib --bins --tests
