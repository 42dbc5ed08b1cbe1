"""Lists of one night as pandas, and as one row per user and rank: python read_pandas.py OUTPUT 2026-01-02"""

import sys
from pathlib import Path

import pyarrow.dataset as ds

output, night = sys.argv[1:]

# Parts are in place while a run is under way, so only runs with a _SUCCESS count. If the night was run twice, a user
# has the list that was created later.
finished = Path(output, "recommendations", "kind=user", f"dt={night}").glob("run=*/_SUCCESS")
parts = [str(part) for success in finished for part in success.parent.glob("*.parquet")]
lists = ds.dataset(parts, partitioning="hive").to_table().to_pandas().sort_values(["created_timestamp", "run"])
lists = lists.drop_duplicates("entity_id", keep="last").set_index("entity_id").sort_index()

# What [lists] rows = "item" writes.
ranks = lists[["items", "scores"]].explode(["items", "scores"]).rename(columns={"items": "item_id", "scores": "score"})
ranks.insert(0, "rank", ranks.groupby("entity_id").cumcount() + 1)
print(ranks)
