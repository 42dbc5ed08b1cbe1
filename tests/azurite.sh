#!/usr/bin/env bash
# Sourced by run.sh: installs a server of Azure's blob storage for the tests of object stores and exports its path.
# LASER_TEST_HOME is honoured; whoever sets LASER_AZURITE uses their own.

azurite_home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/azurite-3.37.0

if [[ -z ${LASER_AZURITE:-} ]]; then
    if ! command -v npm >/dev/null; then
        azurite_sudo=$([ "$(id -u)" = 0 ] || echo sudo)
        $azurite_sudo apt-get update -qq
        $azurite_sudo apt-get install -y -qq --no-install-recommends nodejs npm
    fi
    if [[ ! -x $azurite_home/node_modules/.bin/azurite-blob ]]; then
        # One to two minutes, once. An installation that was interrupted is no installation: npm fails on its remains.
        rm -rf "$azurite_home" "$azurite_home.part"
        npm install --loglevel=error --no-audit --no-fund --ignore-scripts --prefix "$azurite_home.part" azurite@3.37.0
        mv "$azurite_home.part" "$azurite_home"
    fi
    LASER_AZURITE=$azurite_home/node_modules/.bin/azurite-blob
fi

export LASER_AZURITE
