"""The native engine samples from the trainer's own parameters: no weight sync, no second copy.

engine.py      the engine: batches, streams and servers are callers of one scheduler
sequence.py    what is scheduled: requests with sampling parameters, and their rows
scheduler.py   which rows decode, which wait, and which give way
stream.py      the scheduler for conversations, whose keys and values are saved between turns
sampling.py    tokens from logits and random numbers
gate.py        the numeric gate: engine and trainer give the same log-probs

Over slots, with the stock model (any device):
store_slots.py     keys and values, one slot per row, and the passes that use them

Over pages, on CUDA:
store_pages.py     the pages and the state of the rows that decode
pages.py           which texts have which pages; sizes of the paged cache
prefill.py         passes, or captured steps, that write prompts to pages
decoder.py         one decode step as Triton kernels, captured as CUDA graphs
layers.py          the blocks of a model as that step reads them
device_sampling.py token choice of that step
kernels.py         the Triton kernels of both
tables.py          the tables that the kernels read and write
"""
