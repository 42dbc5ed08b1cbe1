#!/usr/bin/env bash
# Sourced by run.sh: installs a browser for the tests of the run report and exports its path. Whoever sets
# LASER_CHROMIUM uses their own.

if [[ -z ${LASER_CHROMIUM:-} ]]; then
    if ! command -v chromium >/dev/null; then
        chromium_sudo=$([ "$(id -u)" = 0 ] || echo sudo)
        $chromium_sudo apt-get update -qq
        # Without fonts it draws no text.
        $chromium_sudo apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
    fi
    LASER_CHROMIUM=$(command -v chromium)
fi

export LASER_CHROMIUM
