"""Rows and tokens that readers find in the tables of texts of users on S3, as JSON: delta_s3.py OUTPUT FEAST NIGHT

FEAST is the repository of the examples; Feast joins the texts of the night.
"""

import json
import os
import sys
import tempfile

import ibis
import pandas as pd
import polars as pl
from deltalake import DeltaTable
from feast import FeatureStore, RepoConfig

output, repository, night = sys.argv[1:]
table = f"{output}/profiles/kind=user"

# deltalake and Polars take the environment's credentials, DuckDB a secret.
host = os.environ["AWS_ENDPOINT"].removeprefix("http://")
ibis.get_backend().raw_sql(
    "CREATE SECRET (TYPE s3, KEY_ID 'test', SECRET 'test', REGION 'us-east-1', "
    f"ENDPOINT '{host}', USE_SSL false, URL_STYLE 'path')"
)


def rows_and_tokens(frame):
    return [len(frame), int(frame["text_tokens"].sum())]


delta = DeltaTable(table)
texts = delta.to_pandas()
report = {
    "version": delta.version(),
    "deltalake": rows_and_tokens(texts),
    "polars": rows_and_tokens(pl.scan_delta(table).collect()),
    "duckdb": rows_and_tokens(ibis.read_delta(table).execute()),
}

os.environ["LASER_OUTPUT"] = output
sys.path.insert(0, repository)
import features  # noqa: E402

with tempfile.TemporaryDirectory() as registry:
    store = FeatureStore(
        config=RepoConfig(
            project="laser",
            provider="local",
            registry=f"{registry}/registry.db",
            offline_store={"type": "duckdb"},
            online_store={"type": "sqlite", "path": f"{registry}/online.db"},
            entity_key_serialization_version=3,
        )
    )
    store.apply([features.user, features.profiles])
    users = texts["entity_id"].unique()
    noon = pd.Timestamp(f"{night}T12:00:00Z")
    joined = store.get_historical_features(
        entity_df=pd.DataFrame({"entity_id": users, "event_timestamp": noon}),
        features=["user_profiles:text_tokens"],
    ).to_df()
report["feast"] = rows_and_tokens(joined)

print(json.dumps(report))
# See report.py.
sys.stdout.flush()
os._exit(0)
