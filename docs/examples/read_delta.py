"""Texts, embeddings and knowledge ids from the Delta tables ([output] table = "delta"): python read_delta.py OUTPUT 2026-01-02

OUTPUT is a directory or a URL; credentials come from the cloud's usual environment variables.
"""

import sys

import polars as pl
from deltalake import DeltaTable

output, night = sys.argv[1:]


def table(data_set):
    return f"{output}/{data_set}/kind=user"


# One night as pandas. The table has one row per user and night.
texts = DeltaTable(table("profiles")).to_pandas(partitions=[("dt", "=", night)])

# All nights as Polars.
ids = pl.scan_delta(table("knowledge_ids")).select("entity_id", "dt", "knowledge_ids")
profiles = pl.scan_delta(table("profiles")).select("entity_id", "dt", "text", "text_tokens", "embedding")
joined = profiles.join(ids, on=["entity_id", "dt"]).sort("dt", "entity_id").collect()

print(len(texts), "texts of", texts["text_tokens"].sum(), "tokens")
print(joined)
