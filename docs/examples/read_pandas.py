"""Texts, embeddings and knowledge ids of one night as pandas and numpy: python read_pandas.py OUTPUT 2026-01-02"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

output, night = sys.argv[1:]


def read(data_set):
    """One row per user, of the night's run that is in force."""
    folder = Path(output, data_set, "kind=user")
    [run] = [entry["run"] for entry in json.loads((folder / "_in_force.json").read_text()) if entry["dt"] == night]
    parts = [str(part) for part in folder.glob(f"dt={night}/run={run}/*.parquet")]
    return ds.dataset(parts, partitioning="hive").to_table().to_pandas().set_index("entity_id").sort_index()


texts = read("profiles")
embeddings = np.stack(texts["embedding"])
ids = np.stack(read("knowledge_ids")["knowledge_ids"])
print(len(texts), "texts of", texts["text_tokens"].sum(), "tokens")
print("embeddings", embeddings.shape, embeddings.dtype, "ids", ids.shape, ids.dtype)
