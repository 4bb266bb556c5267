"""The native engine samples from the trainer's own parameters: no weight sync, no second copy.

engine.py      the engine: which of the two decode loops samples, and with how much memory
jobs.py        what both loops schedule: requests with sampling parameters, and their rows
sampling.py    tokens from logits and random numbers

Over slots, with the stock model (any device):
decode_loop.py     the decode loop
cache.py           keys and values, one slot per row
live.py            the same loop for a server: requests join and leave while others decode
stream.py          the same loop for conversations, whose keys and values are kept between turns

Over pages, on CUDA:
decoder.py         one decode step as Triton kernels, captured as CUDA graphs
device_sampling.py token choice of that step
kernels.py         the Triton kernels of both
tables.py          the tables that the kernels read and write
paged.py           the decode loop over decoder.py
paged_rows.py      its rows and the prompts that they share
paged_slots.py     what the rows write to the decoder and read from it
pages.py           sizes of the paged cache
paged_prefill.py   passes, or captured steps, that write prompts to pages
paged_live.py      the same loop for a server
paged_stream.py    the same loop for conversations, whose pages are kept between turns
"""
