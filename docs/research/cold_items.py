#!/usr/bin/env python3
"""What linear models can tell about new items from attributes, words and vectors of texts (cold-items.md).

    pip install numpy polars
    docs/research/cold_items.py data gear knowledge/gear_ml1m_item.jsonl 3    # prepared tables, encoded texts, texts, seeds

A rating of 4 or 5 is positive. An item's score is a ridge regression of the mean residual of its training ratings
(label less the user's mean, weighted by n / (n + 20)); the user's mean is added. AUC over all ratings of the new items.
"""

import glob
import json
import math
import re
import sys
from collections import Counter

import numpy as np
import polars as pl

data, encoded, texts, seeds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
ratings = pl.read_parquet(f"{data}/interactions.parquet")
users, items = ratings["user"].to_numpy(), ratings["item"].to_numpy()
labels = (ratings["rating"].to_numpy() >= 4).astype(float)
size = int(items.max()) + 1


def unit_rows(rows):
    return rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9)


def tf_idf(documents):
    """Rows of all items from their terms; terms in fewer than three items are left out."""
    counts = {item: Counter(terms) for item, terms in documents.items() if 0 <= item < size}
    frequency = Counter(term for count in counts.values() for term in count)
    numbers = {term: n for n, term in enumerate(t for t, n in frequency.items() if n >= 3)}
    rows = np.zeros((size, len(numbers)), np.float32)
    for item, count in counts.items():
        for term, n in count.items():
            if term in numbers:
                rows[item, numbers[term]] = (1 + math.log(n)) * math.log(len(counts) / frequency[term])
    return unit_rows(rows)


def attributes(row):
    values = {name: row[name] for name in ("genres", "director", "actors", "year") if row[name] is not None}
    decade = [f"decade {str(values['year'])[:3]}"] if "year" in values else []
    return decade + [f"{k} {v}" for k, vs in values.items() for v in (vs if isinstance(vs, list) else [vs])]


def words(text):
    single = re.findall(r"[a-z0-9']+", text.lower())
    return single + [" ".join(pair) for pair in zip(single, single[1:])]


def vectors():
    parts = pl.concat(pl.read_parquet(f) for f in glob.glob(f"{encoded}/embeddings/**/*.parquet", recursive=True))
    ids, rows = parts["entity_id"].cast(pl.Int64).to_numpy(), np.array(parts["embedding"].to_list(), np.float32)
    rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    table = np.zeros((size, rows.shape[1]), np.float32)
    table[ids[ids < size]] = rows[ids < size]
    return unit_rows(table)


def auc(scores, truth):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = truth.sum()
    return (ranks[truth == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(truth) - positive))


def measure(kernel, seed):
    """AUC by penalty; without a kernel, that of the users' means alone."""
    all_items = np.unique(items)
    new = np.zeros(size, bool)
    new[np.random.default_rng(seed).choice(all_items, len(all_items) // 5, replace=False)] = True
    test = new[items]
    seen = ~test
    sums, counts = (np.bincount(users[seen], w, int(users.max()) + 1) for w in (labels[seen], None))
    means = (sums + 5 * labels[seen].mean()) / (counts + 5)
    if kernel is None:
        return [auc(means[users[test]], labels[test])]
    sums = np.bincount(items[seen], (labels - means[users])[seen], size)
    counts = np.bincount(items[seen], minlength=size)
    trained = np.flatnonzero(counts)
    weights, targets = counts[trained] / (counts[trained] + 20), sums[trained] / counts[trained]
    mean = np.average(targets, weights=weights)
    found = []
    for penalty in (0.1, 0.3, 1, 3, 10):
        system = kernel[np.ix_(trained, trained)] + penalty * np.diag(1 / weights)
        scores = kernel[:, trained] @ np.linalg.solve(system, targets - mean)
        found.append(auc(means[users[test]] + scores[items[test]], labels[test]))
    return found


table = pl.read_parquet(f"{data}/items.parquet")
lines = (json.loads(line) for line in open(texts, encoding="utf-8"))
features = {
    "user's mean alone": None,
    "attributes": tf_idf({row["id"]: attributes(row) for row in table.iter_rows(named=True)}),
    "texts, vectors": vectors(),
    "texts, words": tf_idf({int(line["id"]): words(line["text"]) for line in lines}),
}
features["texts, words and attributes"] = np.hstack([features["texts, words"], features["attributes"]])
for name, rows in features.items():
    kernel = None if rows is None else rows @ rows.T
    best = [max(measure(kernel, seed)) for seed in range(1, seeds + 1)]
    print(f"{name:30} {np.mean(best):.4f} ± {np.std(best, ddof=1) if seeds > 1 else 0:.4f}  {np.round(best, 4)}", flush=True)
