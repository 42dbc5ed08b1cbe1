"""What readers of Delta tables see, as JSON for tests/cli/feast.rs and s3.rs: delta.py OUTPUT EXAMPLES NIGHT [TRAINING_SET]"""

import contextlib
import json
import os
import runpy
import sys

import pandas as pd

output, examples, night, *training_set = sys.argv[1:]
sys.argv = ["read_delta.py", output, night]
with contextlib.redirect_stdout(sys.stderr):
    read = runpy.run_path(os.path.join(examples, "read_delta.py"))
texts, joined = read["texts"], read["joined"]

report = {
    "deltalake": {"texts": len(texts), "tokens": int(texts["text_tokens"].sum()), "runs": int(texts["run"].nunique())},
    "polars": {
        "rows": joined.height,
        "tokens": joined["text_tokens"].sum(),
        "types": {name: str(dtype) for name, dtype in joined.schema.items()},
    },
}
for path in training_set:
    training = pd.read_parquet(path).astype(object)
    # What is missing is null, and a list is a list.
    report["training"] = training.where(training.notna(), None).to_dict("records")
print(json.dumps(report, default=lambda value: getattr(value, "tolist", lambda: str(value))()))
# See report.py.
sys.stdout.flush()
os._exit(0)
