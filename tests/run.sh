#!/usr/bin/env bash
# Passes the tests. CARGO_TARGET_DIR is honoured.
#
#   tests/run.sh            all of them; installs what they need (on Debian 12, about 2 GB)
#   tests/run.sh --quick    formatting, lints, and the tests that need no server and no download
#
# What could not be tested is named at the end; a program that this script installs is never among it.
set -euo pipefail
cd "$(dirname "$0")/.."

# Crates that the README's first command compiles, at most: the first build must not grow unseen.
crates_max=491
# The same for all commands: another selection of features compiles the dependencies again.
build=(--release --workspace --locked --features mistralrs --config tests/profile.toml)
target=${CARGO_TARGET_DIR:-target}
log=$(mktemp -d)
trap 'rm -r "$log"' EXIT

fail() {
    echo "tests/run.sh: $*" >&2
    exit 1
}

case ${1:-} in
--quick) quick=1 ;;
"") quick= ;;
*) fail "unknown argument $1; expected --quick or none" ;;
esac

install_all() {
    [[ $(uname -sm) == "Linux x86_64" ]] || fail "$(uname -sm): the test servers are for Linux on x86_64; --quick needs none"
    need() { command -v "$1" >/dev/null || missing+=("$2"); }
    local missing=() sudo
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
    # A browser, for the run report.
    source tests/chromium.sh
    # deploy/ is built and validated without a cluster.
    tests/deploy.sh
}

# Modules and tests that need what install_all installs.
needs_servers=(
    nats:: old_nats:: new_nats:: together:: distributed:: outages:: soak:: sources:: tracing:: telemetry:: doctor:: azure:: s3:: feast:: report::
    workers_make_the_embeddings_of_one_process_and_need_the_encoder
    a_shard_that_misses_the_deadline_still_has_the_column
    coordinator_and_workers_judge_each_pool_once
    a_damaged_audit_ends_the_coordinator_and_not_the_night
    audited_texts_are_compared_by_the_encoder
    embeddings_are_those_of_sentence_transformers
)

# All targets and the doctests.
run_tests() {
    cargo test "${build[@]}" -- "$@" 2>&1 | tee "$log/tests"
}

# The README's first command, on the binary that the tests have built.
run_demo() {
    "$target/release/laser" run configs/demo.toml --set "output.path=$log/demo"
    "$target/release/laser" verify "$log/demo"
}

count_crates() {
    local crates
    crates=$(cargo tree --locked --edges normal,build --prefix none | sed 's/ (.*//' | sort -u | wc -l)
    echo "crates of the first build: $crates, at most $crates_max"
    ((crates <= crates_max)) || fail "the README's first command compiles too many crates; cargo tree shows them"
}

cargo fmt --all --check
[[ $quick ]] || install_all

cold=$([[ -d $target/release/deps ]] || echo cold)
started=$SECONDS
cargo test "${build[@]}" --no-run
built=$((SECONDS - started))
cargo clippy "${build[@]}" --all-targets -- -D warnings
if [[ $quick ]]; then
    run_tests "${needs_servers[@]/#/--skip=}"
else
    RUSTDOCFLAGS="-D warnings" cargo doc "${build[@]}" --no-deps --document-private-items
    run_tests
    run_demo
fi

echo
count_crates
if [[ $cold ]]; then
    echo "build of everything, with tests and mistralrs, from an empty target directory: $built s"
fi
grep -o 'skipped: .*' "$log/tests" | sort -u || true
if [[ $quick ]]; then
    filtered=$(sed -n 's/.*; \([0-9]*\) filtered out;.*/\1/p' "$log/tests" | awk '{n += $1} END {print n}')
    echo "left out: $filtered tests that need a server or a download, deploy/, rustdoc, the demo (tests/run.sh has them)"
fi
echo "passed in $SECONDS s"
