"""Texts with their knowledge ids, all nights, as Polars: python read_polars.py OUTPUT"""

import sys
from pathlib import Path

import polars as pl

output = sys.argv[1]


def read(data_set):
    """One row per user and night: if a night was run twice, the row created later.

    Parts are in place while a night is under way, so only runs with a _SUCCESS count.
    """
    finished = Path(output, data_set, "kind=user").glob("dt=*/run=*/_SUCCESS")
    parts = pl.scan_parquet([f"{success.parent}/*.parquet" for success in finished], hive_partitioning=True)
    return parts.sort("created_timestamp", "run").unique(["entity_id", "dt"], keep="last")


texts = read("profiles").select("entity_id", "dt", "text", "text_tokens", "embedding")
ids = read("knowledge_ids").select("entity_id", "dt", "knowledge_ids")
joined = texts.join(ids, on=["entity_id", "dt"]).sort("dt", "entity_id").collect()
print(joined)
