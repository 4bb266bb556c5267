"""Engines: they turn prompts into sampled responses with log-probs.

    engine.py                   the port that every engine implements; requests, stop strings
    kinds.py                    the table of engines that rollout.engine names
    native/                     samples from the trainer's own weights, on CPU and GPU
    hf.py                       transformers' generate; slow, the reference for the others
    vllm.py                     vLLM in this process
    http.py, http_sync.py       OpenAI-compatible servers, and new weights for them; sglang.py
    turns.py                    the loop over the turns of responses; who may answer
    conversations.py            responses to which environments and tools answer
    transcript.py, episodes.py  a response of several turns; its columns of a batch
    streams.py                  generations that requests join and leave
    generator.py, classmates.py      models other than the policy that generate text
    respond.py                  scored responses to problems, for evaluation and validation

May import environments, model, data, verifiers, problem, config, user_code and errors.
"""
