"""Lists of all nights as Polars, one row per user and rank: python read_polars.py OUTPUT"""

import json
import sys
from pathlib import Path

import polars as pl

output = sys.argv[1]

# _in_force.json names the one run of each night that counts. Runs that are under way are not in it.
folder = Path(output, "recommendations", "kind=user")
in_force = json.loads((folder / "_in_force.json").read_text())
parts = [f"{folder}/dt={night['dt']}/run={night['run']}/*.parquet" for night in in_force]
lists = pl.scan_parquet(parts, hive_partitioning=True)

# What [lists] rows = "item" writes.
rank = pl.int_ranges(1, pl.col("items").list.len() + 1)
ranks = lists.select("dt", "entity_id", rank=rank, item_id="items", score="scores")
ranks = ranks.explode("rank", "item_id", "score").sort("dt", "entity_id", "rank").collect()
print(ranks)
