"""Lists of all nights as Polars, one row per user and rank: python read_polars.py OUTPUT"""

import sys
from pathlib import Path

import polars as pl

output = sys.argv[1]

# Parts are in place while a night is under way, so only runs with a _SUCCESS count. If a night was run twice, a user
# has the list that was created later.
finished = Path(output, "recommendations", "kind=user").glob("dt=*/run=*/_SUCCESS")
lists = pl.scan_parquet([f"{success.parent}/*.parquet" for success in finished], hive_partitioning=True)
lists = lists.sort("created_timestamp", "run").unique(["entity_id", "dt"], keep="last")

# What [lists] rows = "item" writes.
rank = pl.int_ranges(1, pl.col("items").list.len() + 1)
ranks = lists.select("dt", "entity_id", rank=rank, item_id="items", score="scores")
ranks = ranks.explode("rank", "item_id", "score").sort("dt", "entity_id", "rank").collect()
print(ranks)
