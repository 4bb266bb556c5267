"""Problems: reading data files, preparing data sets, rendering prompts, choosing the next rows.

Owns everything that turns a data file into `Problem`s and a `Problem` into token ids. May import
types, errors, config and algorithms. Knows nothing about models, verifiers or methods.

    source ─► readers (rows) ─► rows/ (problems) ──► uid ──► problems.load_problems
              arithmetic (problems made in code) ───┘            │
                                                                 ├─► encode.Encoder (token ids)
                                                                 └─► problem_queue (which come next)

    postgrad data prepare:
    hub or files ─► readers ─► prepare/catalog (converter) ─► styles (prompt) ─► one parquet file
"""
