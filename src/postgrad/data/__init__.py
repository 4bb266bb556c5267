"""Problems: reading parquet, jsonl and csv, the arithmetic generator, uids, rendering to tokens, the resumable cursor.

Owns what a Problem is made from. May touch types, errors and config; knows nothing of models or methods.

    source ─► readers (rows) ─► schemas (problems) ─► uid ─► problems.load_problems ─► render.Prompts (token ids)
              arithmetic (problems made in code) ────┘                                cursor.Cursor (which ones next)
"""
