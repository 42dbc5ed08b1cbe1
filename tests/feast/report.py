"""What the documented ways of reading parts see, as JSON for tests/cli/feast.rs: report.py OUTPUT EXAMPLES NIGHT"""

import contextlib
import json
import os
import runpy
import sys

import duckdb

output, examples, night = sys.argv[1:]


def run(script, *arguments):
    """The variables of an example once it has run; what it prints goes to the log."""
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(sys.stderr):
        return runpy.run_path(os.path.join(examples, script))


pandas = run("read_pandas.py", output, night)
joined = run("read_polars.py", output)["joined"]

os.chdir(output)
connection = duckdb.connect()
with open(os.path.join(examples, "duckdb.sql"), encoding="utf-8") as file:
    results = [connection.execute(s).fetchall() for s in duckdb.extract_statements(file.read())]
by_night, similar, users_by_id = results[-3:]

report = {
    "pandas": {
        "texts": len(pandas["texts"]),
        "tokens": int(pandas["texts"]["text_tokens"].sum()),
        "embeddings": [*pandas["embeddings"].shape, str(pandas["embeddings"].dtype)],
        "ids": [*pandas["ids"].shape, str(pandas["ids"].dtype)],
        "event_timestamp": str(pandas["texts"]["event_timestamp"].dtype),
    },
    "polars": {
        "rows": joined.height,
        "tokens": joined["text_tokens"].sum(),
        "types": {name: str(dtype) for name, dtype in joined.schema.items()},
    },
    "duckdb": {"by_night": by_night, "similar": similar, "users_by_id": users_by_id},
}
print(json.dumps(report, default=lambda value: getattr(value, "tolist", lambda: str(value))()))
# Three libraries with thread pools of their own are in this process; now and then one of them ends it with
# "terminate called" while Python shuts down. All has been said.
sys.stdout.flush()
os._exit(0)
