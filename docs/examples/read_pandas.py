"""Texts, embeddings and knowledge ids of one night as pandas and numpy: python read_pandas.py OUTPUT 2026-01-02"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

output, night = sys.argv[1:]


def read(data_set):
    """One row per user: if the night was run twice, the row created later.

    Parts are in place while a run is under way, so only runs with a _SUCCESS count.
    """
    finished = Path(output, data_set, "kind=user", f"dt={night}").glob("run=*/_SUCCESS")
    parts = [str(part) for success in finished for part in success.parent.glob("*.parquet")]
    frame = ds.dataset(parts, partitioning="hive").to_table().to_pandas().sort_values(["created_timestamp", "run"])
    return frame.drop_duplicates("entity_id", keep="last").set_index("entity_id").sort_index()


texts = read("profiles")
embeddings = np.stack(texts["embedding"])
ids = np.stack(read("knowledge_ids")["knowledge_ids"])
print(len(texts), "texts of", texts["text_tokens"].sum(), "tokens")
print("embeddings", embeddings.shape, embeddings.dtype, "ids", ids.shape, ids.dtype)
