-- Run in the output's root: duckdb < duckdb.sql

-- _in_force.json names the one run of each night that counts. Runs that are under way are not in it.
CREATE VIEW texts AS
SELECT * FROM read_parquet('profiles/kind=user/*/*/*.parquet', hive_partitioning = true)
SEMI JOIN read_json('profiles/kind=user/_in_force.json') USING (dt, run);

CREATE VIEW ids AS
SELECT * FROM read_parquet('knowledge_ids/kind=user/*/*/*.parquet', hive_partitioning = true)
SEMI JOIN read_json('knowledge_ids/kind=user/_in_force.json') USING (dt, run);

-- Texts, tokens and accepted drafted tokens per night.
SELECT dt, count(*) AS texts, sum(text_tokens) AS tokens, sum(list_sum(step_accepted)) AS accepted
FROM texts GROUP BY dt ORDER BY dt;

-- The users whose texts are nearest to the first user's, on the newest night.
SELECT other.entity_id, list_cosine_similarity(one.embedding, other.embedding) AS similarity
FROM texts AS one JOIN texts AS other USING (dt)
WHERE dt = (SELECT max(dt) FROM texts) AND one.entity_id = (SELECT min(entity_id) FROM texts)
ORDER BY similarity DESC, other.entity_id;

-- The number of users with each id, per night.
SELECT dt, knowledge_ids[1] AS id, count(*) AS users
FROM ids GROUP BY dt, id ORDER BY dt, id;
