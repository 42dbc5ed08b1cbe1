-- Run in the output's root: duckdb < duckdb.sql

-- Parts are in place while a night is under way, so only runs with a _SUCCESS count. One row per user and night: if a
-- night was run twice, the text created later.
CREATE VIEW texts AS
SELECT * FROM read_parquet('profiles/kind=user/*/*/*.parquet', hive_partitioning = true)
WHERE run IN (SELECT regexp_extract(file, 'run=([^/]+)', 1) FROM glob('profiles/kind=user/*/*/_SUCCESS'))
QUALIFY row_number() OVER (PARTITION BY entity_id, dt ORDER BY created_timestamp DESC, run DESC) = 1;

CREATE VIEW ids AS
SELECT * FROM read_parquet('knowledge_ids/kind=user/*/*/*.parquet', hive_partitioning = true)
WHERE run IN (SELECT regexp_extract(file, 'run=([^/]+)', 1) FROM glob('knowledge_ids/kind=user/*/*/_SUCCESS'))
QUALIFY row_number() OVER (PARTITION BY entity_id, dt ORDER BY created_timestamp DESC, run DESC) = 1;

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
