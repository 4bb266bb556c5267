"""`postgrad serve`: models behind OpenAI's HTTP interface, on our own engine or handed over to vLLM's server.

asks.py reads requests; worker.py decodes for all of them together in a thread of its own; replies.py writes answers; app.py is the
door; mapping.py names running servers in a file; handover.py starts vLLM. May touch rollout, model, data, config and web.
"""
