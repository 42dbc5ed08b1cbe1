#!/usr/bin/env bash
# Nights with random faults for MINUTES (10 if not given): tests/cli/soak.rs. LASER_SOAK_SEED chooses the faults.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/nats.sh
source tests/moto.sh
export LASER_SOAK_MINUTES=${1:-10}
exec cargo test --release --workspace --locked --features mistralrs --config tests/profile.toml --test cli soak -- \
    --nocapture
