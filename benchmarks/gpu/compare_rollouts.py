"""Rollouts of Postgrad, transformers and vLLM. compare.py calls each in its own process."""

import time

from compare_common import (
    BANDWIDTH,
    PROMPTS,
    SAMPLES,
    TOKENS,
    peak_gib,
    random_prompts,
    report,
    response_lengths,
)


def rollout_postgrad(folder: str, which: str, long_tail: bool) -> None:
    import torch

    from postgrad.config.schema import ModelConfig, RolloutConfig
    from postgrad.model.load.load import load
    from postgrad.rollout.engine import Request, Sampling
    from postgrad.rollout.native.engine import NativeEngine

    load_start = time.time()
    engine = NativeEngine(
        load(ModelConfig(path=folder, dtype="bfloat16"), torch.device("cuda")),
        RolloutConfig(max_rows=1024),
    )
    assert engine.decoder is not None
    # No token stops a row, so all rows have their full length.
    engine.decoder.stop_ids = torch.tensor([1 << 30], dtype=torch.int32, device="cuda")
    lengths = response_lengths(long_tail)
    prompts = [prompt for prompt in random_prompts() for _ in range(SAMPLES)]
    if long_tail:
        requests = [Request(prompt, [i], lengths[i]) for i, prompt in enumerate(prompts)]
    else:
        requests = [
            Request(p, list(range(i * SAMPLES, (i + 1) * SAMPLES)))
            for i, p in enumerate(random_prompts())
        ]
    seconds = []
    for number in range(3):
        torch.cuda.synchronize()
        start = time.time()
        engine.generate(requests, Sampling(1.0, max(lengths)))
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
        if number == 0:
            report("start", seconds=time.time() - load_start)
    speed = sum(lengths) / min(seconds)
    config = engine.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cache_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = 2 * sum(p.numel() for p in engine.model.parameters())
    # Each step must read the cache of every row up to its position, and all weights once.
    bytes_needed = weights * max(lengths)
    for prompt, length in zip(prompts, lengths, strict=True):
        bytes_needed += cache_bytes * (len(prompt) + length / 2) * length
    report(
        "postgrad",
        work=f"rollout {which}{' long tail' if long_tail else ''}",
        tokens_per_second=speed,
        share_of_bandwidth=bytes_needed / min(seconds) / BANDWIDTH,
        peak_gib=peak_gib(),
    )


def rollout_hf(folder: str, which: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    prompts = random_prompts()
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, PROMPTS * SAMPLES, width, dtype=torch.long, device="cuda")
    for row in range(len(ids)):
        prompt = prompts[row // SAMPLES]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.time()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    report(
        "transformers", work=f"rollout {which}", tokens_per_second=len(ids) * TOKENS / min(seconds)
    )


def rollout_vllm(folder: str, which: str) -> None:
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        folder, dtype="bfloat16", gpu_memory_utilization=0.6, max_model_len=2560, max_num_seqs=1024
    )
    prompts = [{"prompt_token_ids": p} for p in random_prompts() for _ in range(SAMPLES)]
    for long_tail in (False, True):
        lengths = response_lengths(long_tail)
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in lengths
        ]
        seconds = []
        for _ in range(2):
            start = time.time()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.time() - start)
        report(
            "vllm",
            work=f"rollout {which}{' long tail' if long_tail else ''}",
            tokens_per_second=sum(lengths) / min(seconds),
        )
