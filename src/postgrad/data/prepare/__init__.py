"""`postgrad data prepare`: converts known data sets to one parquet schema.

run.py does the work and output.py writes the file. catalog.py lists the data sets, one file per
family (math, choice, chat, code) holds the converters, hub.py downloads. May import the rest of
postgrad.data, and errors.
"""
