"""What the documented ways of reading lists see, as JSON for tests/cli/feast.rs.

Usage: lists.py OUTPUT EXAMPLES NIGHT REPOSITORY

REPOSITORY is the examples' Feast repository after `feast apply`.
"""

import contextlib
import json
import os
import runpy
import sys

import duckdb
import pandas as pd
from deltalake import DeltaTable
from feast import FeatureStore

output, examples, night, repository = sys.argv[1:]


def run(script, *arguments):
    """The variables of an example once it has run; what it prints goes to the log."""
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(sys.stderr):
        return runpy.run_path(os.path.join(examples, script))


def rows(ranks):
    """One row per user and rank, in order, as plain values."""
    columns = [ranks[name].to_list() for name in ("entity_id", "rank", "item_id", "score")]
    return sorted([str(user), int(rank), int(item), float(score)] for user, rank, item, score in zip(*columns))


pandas = run("read_pandas.py", output, night)["ranks"].reset_index()
polars = run("read_polars.py", output)["ranks"]
polars = polars.filter(polars["dt"].cast(str) == night)

moment = pd.Timestamp(night, tz="UTC") + pd.Timedelta(hours=12)
asked = pd.DataFrame({"entity_id": sorted(set(pandas["entity_id"])), "event_timestamp": moment})
features = ["user_candidates:items", "user_candidates:scores"]
feast = FeatureStore(repository).get_historical_features(entity_df=asked, features=features).to_df()
feast = [
    [user, rank, int(item), float(score)]
    for user, items, scores in zip(feast["entity_id"], feast["items"], feast["scores"])
    for rank, (item, score) in enumerate(zip(items, scores), 1)
]
delta = DeltaTable(f"{output}/recommendations/kind=user")
counted = delta.get_add_actions(flatten=True)
records = sum(int(n) for n in pd.Series(counted.column("num_records").to_pylist()))

os.chdir(output)
connection = duckdb.connect()
with open(os.path.join(examples, "duckdb.sql"), encoding="utf-8") as file:
    results = [connection.execute(s).fetchall() for s in duckdb.extract_statements(file.read())]
by_night, popular = results[-2:]

report = {
    "pandas": rows(pandas),
    "polars": rows(polars),
    "feast": sorted(feast),
    "duckdb": rows(connection.execute("SELECT * FROM ranks").df()),
    "by_night": [[str(date), *counts] for date, *counts in by_night],
    "popular": popular,
    "records": records,
    "rows": len(delta.to_pandas()),
}
print(json.dumps(report, default=lambda value: getattr(value, "tolist", lambda: str(value))()))
# See report.py.
sys.stdout.flush()
os._exit(0)
