"""`postgrad data prepare`: the known data sets and their conversion to one parquet schema.

run.py does the work, catalog.py lists the data sets, one file per family holds the converters.
"""
