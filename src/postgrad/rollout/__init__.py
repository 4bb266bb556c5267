"""Engines: they turn prompts into sampled responses with log-probs.

    engine.py                   the port that every engine implements; requests and completions
    kinds.py                    the table of engines that rollout.engine names
    native/                     samples from the trainer's own weights, on CPU and GPU
    hf.py                       transformers' generate; slow, the reference for the others
    vllm.py                     vLLM in this process
    http.py, http_client.py     OpenAI-compatible servers; the same with new weights after each step
    stops.py                    stop strings
    turns.py, episodes.py       responses of several turns, with tools or an environment
    streams.py                  generations that requests join and leave
    generator.py, panel.py      models other than the policy that generate text
    respond.py                  scored responses to problems, for evaluation and validation

May import environments, model, data, verifiers, problem, config, user_code and errors.
"""
