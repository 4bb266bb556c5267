"""The native engine samples from the trainer's own parameters: no weight sync, no second copy.

engine.py      the engine: which store it samples with, and with how much memory
sequence.py    what is scheduled: requests with sampling parameters, and their rows
scheduler.py   which rows decode, which wait, and which give way
stream.py      the scheduler for conversations, whose keys and values are saved between turns
live.py        the scheduler for a server: requests join and leave while others decode
sampling.py    tokens from logits and random numbers

Over slots, with the stock model (any device):
store_slots.py     keys and values, one slot per row, and the passes that use them

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
