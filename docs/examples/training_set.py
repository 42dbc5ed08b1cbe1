"""Joins to each interaction what was known about its user at that time, and nothing later.

Usage: python training_set.py REPOSITORY INTERACTIONS.csv TRAINING_SET.parquet, after `feast apply` in the repository. The
interactions have the columns entity_id and event_timestamp, and any others.
"""

import sys

import pandas as pd
from feast import FeatureStore

repository, interactions, training_set = sys.argv[1:]
joined = FeatureStore(repository).get_historical_features(
    entity_df=pd.read_csv(interactions, parse_dates=["event_timestamp"]),
    features=[
        "user_profiles:text",
        "user_profiles:text_tokens",
        "user_profiles:embedding",
        "user_ids:knowledge_ids",
    ],
)
joined.to_df().to_parquet(training_set)
