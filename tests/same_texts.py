#!/usr/bin/env python3
"""Counts the texts of one output that another output has otherwise, by kind.

    pip install pyarrow
    tests/same_texts.py [--equal] OUTPUT OTHER

Both are outputs of the same nights, generated twice, for example on two devices. With --equal it fails if any text
differs.
"""

import argparse
import sys
from pathlib import Path

import pyarrow.dataset


def texts(output):
    """Texts by kind and entity."""
    files = [str(file) for file in Path(output, "profiles").glob("kind=*/dt=*/run=*/part-*.parquet")]
    if not files:
        sys.exit(f"{output}: no texts")
    parts = pyarrow.dataset.dataset(files, partitioning="hive", partition_base_dir=str(Path(output, "profiles")))
    rows = parts.to_table(columns=["kind", "dt", "entity_id", "text"]).to_pylist()
    return {(row["kind"], row["dt"], row["entity_id"]): row["text"] for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", action="store_true", help="fail if any text differs")
    parser.add_argument("outputs", nargs=2, metavar="OUTPUT")
    options = parser.parse_args()
    one, other = map(texts, options.outputs)
    if one.keys() != other.keys():
        sys.exit(f"{len(one.keys() ^ other.keys())} entities have a text in one output only")
    differ = [key for key in one if one[key] != other[key]]
    for kind in sorted({key[0] for key in one}):
        own, count = ([key for key in keys if key[0] == kind] for keys in (differ, one))
        print(f"{kind}: {len(own)} of {len(count)} texts differ ({100 * len(own) / len(count):.1f} %)")
    if options.equal and differ:
        kind, date, entity = differ[0]
        sys.exit(f"{len(differ)} of {len(one)} texts differ, but none may; the first: {kind} {entity} of {date}")


if __name__ == "__main__":
    main()
