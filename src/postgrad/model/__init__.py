"""A trainable model: loading and saving, the chunked head, views, packing, the optimizer and the update.

Owns the only set of weights. May touch types, errors, config and algorithms; is told the loss by a method, knows none by name.
"""
