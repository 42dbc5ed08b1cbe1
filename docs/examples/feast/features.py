"""Laser's output for users as a Feast repository. LASER_OUTPUT is the output's root ([output] path).

Feast reads the Delta tables ([output] table = "delta"): a glob over parts would see half of a night that is under way.
"""

import os
from datetime import timedelta

from feast import Entity, FeatureView, Field, FileSource, ValueType
from feast.data_format import DeltaFormat
from feast.types import Array, Float32, Int64, String

output = os.environ["LASER_OUTPUT"]
if "://" not in output:
    output = os.path.abspath(output)

# The type of the ids in the input: INT64 or STRING.
user = Entity(name="user", join_keys=["entity_id"], value_type=ValueType.INT64)


def nights(data_set):
    """All nights of a data set."""
    return FileSource(
        name=f"user_{data_set}",
        path=f"{output}/{data_set}/kind=user",
        file_format=DeltaFormat(),
        timestamp_field="event_timestamp",
        created_timestamp_column="created_timestamp",
    )


profiles = FeatureView(
    name="user_profiles",
    entities=[user],
    ttl=timedelta(days=7),  # a text counts for this long
    source=nights("profiles"),
    online=False,
    schema=[
        Field(name="entity_id", dtype=Int64),
        Field(name="text", dtype=String),
        Field(name="text_tokens", dtype=Int64),
        Field(name="embedding", dtype=Array(Float32)),
    ],
)

ids = FeatureView(
    name="user_ids",
    entities=[user],
    ttl=timedelta(days=7),
    source=nights("knowledge_ids"),
    online=False,
    schema=[
        Field(name="entity_id", dtype=Int64),
        Field(name="knowledge_ids", dtype=Array(Int64)),
    ],
)
