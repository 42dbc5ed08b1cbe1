#!/usr/bin/env bash
# Sourced by run.sh: installs an S3 server for the tests of object stores and exports its path. LASER_TEST_HOME is
# honoured; whoever sets LASER_MOTO uses their own.

moto_home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/moto-5.2.5

if [[ -z ${LASER_MOTO:-} ]]; then
    if [[ ! -x $moto_home/bin/moto_server ]]; then
        python3 -m venv "$moto_home"
        "$moto_home/bin/pip" install --quiet --disable-pip-version-check 'moto[s3,server]==5.2.5'
    fi
    LASER_MOTO=$moto_home/bin/moto_server
fi

export LASER_MOTO
