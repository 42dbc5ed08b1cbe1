#!/usr/bin/env bash
# Sourced by run.sh: installs Feast, deltalake, DuckDB, pandas and Polars for the tests that read outputs (1 GB, one to two minutes)
# and exports their Python. LASER_TEST_HOME is honoured; whoever sets LASER_FEAST uses their own.

feast_home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/feast-0.67.0

if [[ -z ${LASER_FEAST:-} ]]; then
    # The copy of the list says that all of it was installed.
    if ! cmp -s tests/feast/requirements.txt "$feast_home/requirements.txt"; then
        python3 -m venv "$feast_home"
        "$feast_home/bin/pip" install --quiet --disable-pip-version-check -r tests/feast/requirements.txt
        # DuckDB would fetch them from its own site.
        "$feast_home/bin/python" -c 'from duckdb_extensions import import_extension as i; i("delta"); i("httpfs")'
        cp tests/feast/requirements.txt "$feast_home"
    fi
    LASER_FEAST=$feast_home/bin/python
fi

export LASER_FEAST
