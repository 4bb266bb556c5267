"""Problems: reading parquet, jsonl and csv, preparing data sets, the arithmetic generator, uids, rendering, the resumable cursor.

Owns what a Problem is made from. May touch types, errors and config; knows nothing of models, verifiers or methods.

    source ─► readers (rows) ─► schemas (problems) ─► uid ─► problems.load_problems ─► render.Prompts (token ids)
              arithmetic (problems made in code) ────┘                                cursor.Cursor (which ones next)

    data prepare: hub or files ─► readers ─► catalog (a set's converter) ─► styles (the prompt) ─► prepare (one parquet file)
"""
