-- Run in the output's root: duckdb < duckdb.sql

-- _in_force.json names the one run of each night that counts. Runs that are under way are not in it.
CREATE VIEW lists AS
SELECT * FROM read_parquet('recommendations/kind=user/*/*/*.parquet', hive_partitioning = true)
SEMI JOIN read_json('recommendations/kind=user/_in_force.json') USING (dt, run);

-- One row per user and rank of the newest night: what [lists] rows = "item" writes.
CREATE VIEW ranks AS
SELECT entity_id, unnest(range(1, len(items) + 1)) AS rank, unnest(items) AS item_id, unnest(scores) AS score
FROM lists WHERE dt = (SELECT max(dt) FROM lists);

-- Users, items and saved steps per night.
SELECT dt, count(*) AS users, sum(len(items)) AS items, sum(accepted_tokens) AS saved
FROM lists GROUP BY dt ORDER BY dt;

-- In how many lists each item is, and at which place in the middle.
SELECT item_id, count(*) AS lists, median(rank) AS rank FROM ranks GROUP BY item_id ORDER BY lists DESC, item_id;
