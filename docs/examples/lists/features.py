"""A night's lists as a Feast repository. LASER_OUTPUT is the output's root ([output] path, table = "delta").

A candidate service asks for `user_candidates` of a user, or of all users of a moment.
"""

import os
from datetime import timedelta

from feast import Entity, FeatureView, Field, FileSource, ValueType
from feast.data_format import DeltaFormat
from feast.types import Array, Float64, Int64, String

output = os.environ["LASER_OUTPUT"]
if "://" not in output:
    output = os.path.abspath(output)

# The types of the ids: those of the users as in the input, those of the items as in the catalogue.
user = Entity(name="user", join_keys=["entity_id"], value_type=ValueType.STRING)

candidates = FeatureView(
    name="user_candidates",
    entities=[user],
    ttl=timedelta(days=2),  # a list counts for this long
    source=FileSource(
        name="user_recommendations",
        path=f"{output}/recommendations/kind=user",
        file_format=DeltaFormat(),
        timestamp_field="event_timestamp",
        created_timestamp_column="created_timestamp",
    ),
    online=False,
    schema=[
        Field(name="entity_id", dtype=String),
        Field(name="items", dtype=Array(Int64)),
        Field(name="scores", dtype=Array(Float64)),
    ],
)
