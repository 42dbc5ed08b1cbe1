#!/usr/bin/env python3
"""Prints what steps of a model took, and the floor: what the device cannot undercut.

    tests/gpu_floor.py DEVICE ENGINE.JSON...

DEVICE is what nvidia-smi calls the GPU, each ENGINE.JSON what `laser-bench engine` measured there in bf16. A step reads
the weights once, and multiplies and adds for each weight and token. The floor is the longer of both, at the bandwidth
and the peak of the device's data sheet. Attention, its keys and values, and launches come on top.
"""

import json
import sys

# Bytes per second, and operations per second in bf16 without sparsity, by NVIDIA's data sheets.
DEVICES = {
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H100 PCIe": (2.0e12, 756e12),
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312e12),
    "NVIDIA A100 80GB PCIe": (1.94e12, 312e12),
    "NVIDIA L40S": (0.864e12, 362e12),
    "NVIDIA L4": (0.3e12, 121e12),
}

WEIGHT_BYTES = 2
OPERATIONS = 2


def weights(report):
    """Weights that a step multiplies with; the report has the rate at which they were read."""
    options, step = report["options"], report["forwards"][0]
    if options["dtype"] != "bf16" or options["isq"] is not None or step["weight_bandwidth"] is None:
        sys.exit("expected figures of a model directory in bf16, not quantised")
    return round(step["weight_bandwidth"] * step["median_seconds"] / WEIGHT_BYTES)


def rows(report, bandwidth, peak):
    """Sequences × nodes, milliseconds, those of reading and of arithmetic, and the step relative to the longer one."""
    count, batch = weights(report), report["options"]["batch"]
    reading = 1e3 * count * WEIGHT_BYTES / bandwidth
    for step in report["forwards"]:
        arithmetic = 1e3 * OPERATIONS * count * step["tokens"] / peak
        took = 1e3 * step["median_seconds"]
        yield (
            f"{batch} × {step['tokens'] // batch}", f"{took:.2f}", f"{reading:.2f}", f"{arithmetic:.2f}",
            f"{took / max(reading, arithmetic):.1f}",
        )


def main(device, *files):
    if device not in DEVICES:
        print(f"{device}: no floor, since tests/gpu_floor.py does not know its bandwidth and peak")
        return
    bandwidth, peak = DEVICES[device]
    reports = [json.load(open(file)) for file in files]
    print(
        f"{device}, {bandwidth / 1e12:.2f} TB/s and {peak / 1e12:.0f} TFLOP/s by its data sheet, "
        f"{weights(reports[0]) / 1e6:.1f}M weights in bf16:\n"
    )
    print("| sequences × nodes | ms | reading the weights, ms | arithmetic, ms | step over floor |")
    print("|---|---|---|---|---|")
    for report in reports:
        for row in rows(report, bandwidth, peak):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
