"""Lists of one night as pandas, and as one row per user and rank: python read_pandas.py OUTPUT 2026-01-02"""

import json
import sys
from pathlib import Path

import pyarrow.dataset as ds

output, night = sys.argv[1:]

# _in_force.json names the one run of each night that counts. Runs that are under way are not in it.
folder = Path(output, "recommendations", "kind=user")
[run] = [entry["run"] for entry in json.loads((folder / "_in_force.json").read_text()) if entry["dt"] == night]
parts = [str(part) for part in folder.glob(f"dt={night}/run={run}/*.parquet")]
lists = ds.dataset(parts, partitioning="hive").to_table().to_pandas().set_index("entity_id").sort_index()

# What [lists] rows = "item" writes.
ranks = lists[["items", "scores"]].explode(["items", "scores"]).rename(columns={"items": "item_id", "scores": "score"})
ranks.insert(0, "rank", ranks.groupby("entity_id").cumcount() + 1)
print(ranks)
