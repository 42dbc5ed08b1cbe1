"""Texts with their knowledge ids, all nights, as Polars: python read_polars.py OUTPUT"""

import json
import sys
from pathlib import Path

import polars as pl

output = sys.argv[1]


def read(data_set):
    """One row per user and night, of the night's run that is in force."""
    folder = Path(output, data_set, "kind=user")
    in_force = json.loads((folder / "_in_force.json").read_text())
    parts = [f"{folder}/dt={night['dt']}/run={night['run']}/*.parquet" for night in in_force]
    return pl.scan_parquet(parts, hive_partitioning=True)


texts = read("profiles").select("entity_id", "dt", "text", "text_tokens", "embedding")
ids = read("knowledge_ids").select("entity_id", "dt", "knowledge_ids")
joined = texts.join(ids, on=["entity_id", "dt"]).sort("dt", "entity_id").collect()
print(joined)
