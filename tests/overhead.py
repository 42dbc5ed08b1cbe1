#!/usr/bin/env python3
"""What the distributed mode costs: a coordinator and one worker over NATS against `laser run` on the same work.

    tests/overhead.py --laser target/release/laser --nats "$LASER_NATS_NEW"

Both take turns. Every text is generated, strictly, with trees of a fixed size, so that the work is the same to the
token. Generation is from the first lease to the last commit, by the worker's own log; the job is from the start of the
processes to the end of the one that publishes. CPU seconds are of all processes, the NATS server's included.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
[model]
path = "{model}"
{input}
[output]
path = "{output}"
[prompt]
user = "plain/films"
item = "plain/films"
chat = false
max_tokens = 300
[generate]
max_new_tokens = {tokens}
batch = 4
[verification]
policy = "strict"
[draft]
adaptive = false
nodes = 12
[pools.user]
grouping = "router"
clusters = 3
[pools.item]
grouping = "attribute"
attributes = ["genres"]
[run]
date = "{date}"
carry_forward = false
shard_rows = 32
audit_share = 0.0
[queue]
url = "nats://127.0.0.1:{port}"
"""


def start(laser, command, config, log):
    environment = os.environ | {"RUST_LOG": "laser=info,laser_coordinator=info,laser_worker=debug"}
    with open(log, "w") as file:
        return subprocess.Popen([laser, command, config], env=environment, stdout=subprocess.DEVNULL, stderr=file)


def finish(process):
    """CPU seconds of a process that ends well."""
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 143), f"{process.args} ended with {code}"
    return usage.ru_utime + usage.ru_stime


def generation(log):
    """Seconds from the first lease to the last commit."""
    times = [
        datetime.fromisoformat(line.split()[0].replace("Z", "+00:00"))
        for line in log.read_text().splitlines()
        if ": leased " in line or ": committed " in line
    ]
    return (times[-1] - times[0]).total_seconds()


def embedded(laser, config, folder, _):
    began = time.monotonic()
    cpu = finish(start(laser, "run", config, folder / "run.log"))
    return generation(folder / "run.log"), time.monotonic() - began, cpu


def distributed(laser, config, folder, nats):
    before = cpu_of(nats)
    began = time.monotonic()
    coordinator = start(laser, "coordinator", config, folder / "coordinator.log")
    worker = start(laser, "worker", config, folder / "worker.log")
    cpu = finish(coordinator)
    job = time.monotonic() - began
    worker.terminate()
    cpu += finish(worker)
    return generation(folder / "worker.log"), job, cpu + cpu_of(nats) - before


def cpu_of(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laser", required=True)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def tables(night):
    """The demo's tables of a night."""
    return "".join(f'[[input]]\npath = "{ROOT}/fixtures/demo/{night}/{kind}.parquet"\n' for kind in ["users", "items"])


def measure(options, folder):
    port = 20000 + os.getpid() % 10000
    nats = subprocess.Popen(
        [options.nats, "-js", "-sd", folder / "nats", "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    settings = {"model": ROOT / "fixtures/profile-lm", "tokens": options.tokens, "port": port}
    config = folder / "laser.toml"
    config.write_text(CONFIG.format(input=tables("last-night"), output=folder / "out", date="2026-01-01", **settings))
    finish(start(options.laser, "run", config, folder / "last-night.log"))
    tonight = tables("tonight") + f'[[previous]]\npath = "{folder}/out"\n'
    modes = {"embedded": embedded, "distributed": distributed}
    found = {name: [] for name in modes}
    try:
        for repetition in range(-1, options.repetitions):
            # Each goes first as often as the other; the first round makes the streams and counts for nothing.
            for name in sorted(modes, reverse=repetition % 2 == 1):
                output = folder / f"{name}{repetition}"
                output.mkdir()
                config.write_text(CONFIG.format(input=tonight, output=output, date="2026-01-02", **settings))
                if repetition < 0:
                    finish(start(options.laser, "doctor", config, output / "doctor.log"))
                    continue
                found[name].append(modes[name](options.laser, config, output, nats))
                print(name, *(f"{seconds:.2f}" for seconds in found[name][-1]), flush=True)
    finally:
        nats.kill()
        nats.wait()
    for index, what in enumerate(["generation", "job", "CPU"]):
        values = {name: statistics.median(run[index] for run in runs) for name, runs in found.items()}
        pairs = [d[index] / e[index] for d, e in zip(found["distributed"], found["embedded"])]
        print(
            f"{what}: embedded {values['embedded']:.2f} s, distributed {values['distributed']:.2f} s (medians); ratio of "
            f"the pairs {statistics.median(pairs):.4f} ({min(pairs):.4f} to {max(pairs):.4f})"
        )


main()
