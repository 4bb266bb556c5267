"""Forward and backward passes: layout of rows, packing, attention, the chunked head, captured graphs and kernels."""
