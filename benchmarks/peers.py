"""Other systems on the rows of speed.py, each in a process of its own. `speed.py run` calls this.

    python benchmarks/peers.py vllm rollout-4b --folder FOLDER
    python benchmarks/peers.py trl step-4b --folder FOLDER

Every system gets the settings that its documentation recommends for the work:

- vLLM: its default processes, a captured graph for every number of rows up to all of them (its
  default ends at 512), no detokenizing. It is timed with the sampled tokens' log-probs, and
  without. Sampling has neither top-k nor top-p, so FlashInfer's sampler is not used.
- SGLang: its offline engine, token ids in and out, captured graphs up to all rows (its default ends
  at 256 to 512), requests written out sample by sample, as it advises for `n` samples.
- TRL: vLLM in its process, which sleeps during the update (its default is to stay, which leaves too
  little memory at 4B), bfloat16 weights and Adam state (8 bytes per weight; Postgrad's float32
  state takes 18), gradient checkpointing.
- Unsloth: LoRA of rank 16, vLLM in its process, its own checkpointing.
- verl: its default trainer (`sync`: trainer and vLLM on the same GPU, one after the other, weights
  float32 as by default), FSDP 2, packed rows, dynamic batches and checkpointing, as its tuning
  guide says, and one update per step, whose ratio is to the engine's log-probs (its "bypass" mode,
  the fast one: as in Postgrad, no pass scores the rows before the update). Logits are kept whole:
  its fused head saves memory, which is there, and computes them twice. At 8B, weights and Adam
  state wait on the host. Its memory is the trainer's alone. VERL_SETTINGS in the environment adds
  settings.

Prompts, lengths and shapes are those of speed.py; weights are random.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from speed import (
    ALL_ROWS,
    PICTURE_TOKENS,
    Row,
    length_reward,
    make_model,
    make_prompts,
    picture_tokens,
    response_lengths,
    vocabulary_size,
    write_problems,
)

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
ROWS_PER_PASS = 8  # of TRL and Unsloth
SHARE = {"8b": 0.4}  # of the GPU's memory for vLLM beside a trainer; otherwise 0.6
VERL_SHARE = {"4b": 0.5, "8b": 0.5}  # its float32 weights and state stay, or are offloaded


def run_vllm(row: Row, folder: Path) -> dict[str, Any]:
    """Time three rollouts of vLLM after a warm-up, then two without log-probs."""
    import vllm  # type: ignore[import-not-found]

    start = time.perf_counter()
    on_cpu = row.shape == "tiny"
    is_real = row.shape == "smollm2"
    options: dict[str, Any] = {} if is_real else {"load_format": "dummy"}
    if not on_cpu:
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(row)}
        options["gpu_memory_utilization"] = 0.85
    llm = vllm.LLM(
        str(make_model(folder, row.shape, with_weights=is_real)),
        dtype="float32" if on_cpu else "bfloat16",
        enforce_eager=on_cpu,
        max_model_len=row.prompt + row.tokens,
        max_num_seqs=row.rows,
        **options,
    )
    start_s = time.perf_counter() - start
    with_logprobs = [generate_with_vllm(llm, row, logprobs=0) for _ in range(4)]
    return {
        "label": f"vLLM {vllm.__version__}",
        "seconds": with_logprobs[1:],
        "seconds_without_logprobs": [generate_with_vllm(llm, row, None) for _ in range(2)],
        "first_s": with_logprobs[0],
        "start_s": start_s,
    }


def run_sglang(row: Row, folder: Path) -> dict[str, Any]:
    """Time three rollouts of SGLang's engine after a warm-up, then two without log-probs."""
    import sglang  # type: ignore[import-not-found]

    start = time.perf_counter()
    is_real = row.shape == "smollm2"
    engine = sglang.Engine(
        model_path=str(make_model(folder, row.shape, with_weights=is_real)),
        load_format="auto" if is_real else "dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        grammar_backend="none",
        context_length=row.prompt + row.tokens + 8,  # it keeps a few tokens of it for itself
        max_running_requests=row.rows,
        cuda_graph_max_bs_decode=row.rows,
        mem_fraction_static=0.88,
        log_level="warning",
    )
    start_s = time.perf_counter() - start
    with_logprobs = [generate_with_sglang(engine, row, logprobs=True) for _ in range(4)]
    return {
        "label": f"SGLang {sglang.__version__}",
        "seconds": with_logprobs[1:],
        "seconds_without_logprobs": [generate_with_sglang(engine, row, False) for _ in range(2)],
        "first_s": with_logprobs[0],
        "start_s": start_s,
    }


def generate_with_sglang(engine: Any, row: Row, logprobs: bool) -> float:
    """Return the seconds of one rollout of the row."""
    lengths = response_lengths(row)
    prompts = [p for p in make_prompts(row, row.problems) for _ in range(row.samples)]
    sampling = [{"temperature": 1.0, "ignore_eos": True, "max_new_tokens": n} for n in lengths]
    engine.flush_cache()  # the weights of a next step would make it useless, too
    begin = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=logprobs)
    seconds = time.perf_counter() - begin
    count = sum(len(output["output_ids"]) for output in outputs)
    assert count == sum(lengths), f"{count} tokens, expected {sum(lengths)}"
    if logprobs:
        found = sum(len(output["meta_info"]["output_token_logprobs"]) for output in outputs)
        assert found == count, f"{found} log-probs of {count} tokens"
    return seconds


def graph_sizes(row: Row) -> list[int]:
    """Return powers of two and every 64 rows: steps whose rows have partly ended have a graph."""
    sizes = {1 << power for power in range(row.rows.bit_length())}
    return sorted(sizes | {*range(64, row.rows + 1, 64), row.rows})


def generate_with_vllm(llm: Any, row: Row, logprobs: int | None) -> float:
    """Return the seconds of one rollout of the row."""
    import vllm  # type: ignore[import-not-found]

    lengths = response_lengths(row)
    shared = {"temperature": 1.0, "ignore_eos": True, "logprobs": logprobs, "detokenize": False}
    prompts = make_prompts(row, row.problems)
    if row.lengths == "full":
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = [
            vllm.SamplingParams(n=row.samples, max_tokens=row.tokens, **shared) for _ in requests
        ]
    else:
        requests = [{"prompt_token_ids": p} for p in prompts for _ in range(row.samples)]
        sampling = [vllm.SamplingParams(max_tokens=length, **shared) for length in lengths]
    llm.reset_prefix_cache()  # the weights of a next step would make it useless, too
    begin = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    count = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert count == sum(lengths), f"{count} tokens, expected {sum(lengths)}"
    return seconds


class StepTimer:
    """The seconds and the peak memory of each step of a transformers trainer."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.begin = 0.0
        self.start_s = 0.0
        self.seconds: list[float] = []

    def callback(self) -> Any:
        """Return the trainer's callback."""
        from transformers import TrainerCallback

        timer = self

        class Timer(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                timer.begin = now()
                timer.start_s = timer.start_s or timer.begin - timer.created

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                timer.seconds.append(now() - timer.begin)

        return Timer()

    def figures(self, label: str) -> dict[str, Any]:
        """Return the result: the first step is the warm-up."""
        import torch

        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {
            "label": label,
            "seconds": self.seconds[1:],
            "first_s": self.seconds[0],
            "start_s": self.start_s,
            "memory_gib": memory,
        }


def now() -> float:
    """Return the clock after the GPU has finished its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer_settings(row: Row, engine_settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of TRL's GRPOConfig for a row."""
    import torch

    on_gpu = torch.cuda.is_available()
    per_pass = min(ROWS_PER_PASS, row.rows)
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": row.rows // per_pass,
        "num_generations": row.samples,
        "max_completion_length": row.tokens,
        "temperature": 1.0,
        "top_k": 0,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "max_steps": row.steps + 1,
        "report_to": "none",
        "beta": 0.0,
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "gradient_checkpointing": True,
        **(engine_settings if on_gpu else {}),
    }


def make_dataset(row: Row, folder: Path) -> Any:
    """Return prompts as text of the word-level tokenizer, one word per token, and pictures."""
    from datasets import Dataset, Image

    if not row.picture:
        prompts = make_prompts(row, (row.steps + 2) * row.problems)
        return Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompts])
    lines = [json.loads(line) for line in write_problems(row, folder).read_text().splitlines()]
    asked = [line["prompt"].removeprefix("<image>") for line in lines]
    columns = {
        "prompt": [[{"role": "user", "content": text}] for text in asked],
        "image": [line["images"][0] for line in lines],
    }
    return Dataset.from_dict(columns).cast_column("image", Image())


def length_rewards(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the rewards of speed.py; a completion is text, or a message that has it."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [length_reward(text, None) for text in texts]


def run_trl(row: Row, folder: Path) -> dict[str, Any]:
    """Time GRPO steps of TRL, full fine-tuning."""
    import torch
    import trl  # type: ignore[import-not-found]
    from speed import make_config, make_vision_config
    from transformers import (
        AutoProcessor,
        AutoTokenizer,
        Qwen3ForCausalLM,
        Qwen3VLForConditionalGeneration,
    )

    model_folder = make_model(folder, row.shape, with_weights=False)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        use_dummy_weights()
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with torch.device("cuda" if on_gpu else "cpu"):
        if row.picture:
            model = Qwen3VLForConditionalGeneration(make_vision_config(row.shape))
        else:
            model = Qwen3ForCausalLM(make_config(row.shape))
    torch.set_default_dtype(torch.float32)
    model.name_or_path = str(model_folder)
    model.config._name_or_path = str(model_folder)
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": SHARE.get(row.shape, 0.6),
        # It hands a picture's tokens to vLLM, which adds them once more.
        "vllm_max_model_length": row.prompt + 2 * picture_tokens(row) + row.tokens,
        "vllm_enable_sleep_mode": True,
    }
    if row.picture:  # a sampled image token is one without a picture, at which the model stops
        ids = range(vocabulary_size(row.shape) - len(PICTURE_TOKENS), vocabulary_size(row.shape))
        engine["generation_kwargs"] = {"logit_bias": dict.fromkeys(ids, -100.0)}
    processor = AutoProcessor if row.picture else AutoTokenizer
    timer = StepTimer()
    trl.GRPOTrainer(
        model=model,
        processing_class=processor.from_pretrained(model_folder, padding_side="left"),
        reward_funcs=length_rewards,
        args=trl.GRPOConfig(**trainer_settings(row, engine)),
        train_dataset=make_dataset(row, folder),
        callbacks=[timer.callback()],
    ).train()
    return timer.figures(f"TRL {trl.__version__}" + (" with vLLM" if on_gpu else ""))


def use_dummy_weights() -> None:
    """Let vLLM start without reading weights: TRL copies the trainer's before it samples."""
    import vllm  # type: ignore[import-not-found]

    make = vllm.LLM.__init__

    def with_dummy_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, load_format="dummy", **kwargs)

    vllm.LLM.__init__ = with_dummy_weights


def run_unsloth(row: Row, folder: Path) -> dict[str, Any]:
    """Time GRPO steps of Unsloth, LoRA of rank 16."""
    import unsloth  # type: ignore[import-not-found]
    import trl  # type: ignore[import-not-found]  # isort: skip  (Unsloth changes it)

    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        str(make_model(folder, row.shape)),
        max_seq_length=row.prompt + row.tokens,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=16,
        gpu_memory_utilization=SHARE.get(row.shape, 0.6),
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, target_modules=targets, use_gradient_checkpointing="unsloth"
    )
    timer = StepTimer()
    trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=length_rewards,
        args=trl.GRPOConfig(**trainer_settings(row, {"use_vllm": True})),
        train_dataset=make_dataset(row, folder),
        callbacks=[timer.callback()],
    ).train()
    return timer.figures(f"Unsloth {unsloth.__version__} with vLLM")


def run_verl(row: Row, folder: Path) -> dict[str, Any]:
    """Time GRPO steps of verl, full fine-tuning, from the lines that it writes about its steps."""
    target = Path(tempfile.mkdtemp(dir=folder, prefix="verl-"))
    metrics, log = target / "metrics.jsonl", target / "log"
    settings = verl_settings(row, folder, target)
    start = time.monotonic()
    with log.open("w") as out:
        child = start_verl(settings, target, out)
        try:
            while child.poll() is None and len(read_verl_steps(metrics)) <= row.steps:
                time.sleep(0.1)
            elapsed_s = time.monotonic() - start
        finally:
            child.kill()  # Ray's processes end with it
            child.wait()
    steps = read_verl_steps(metrics)
    if len(steps) <= row.steps:
        raise SystemExit(log.read_text()[-1500:])
    seconds = [step["timing_s/step"] for step in steps]
    stages = ("gen", "update_actor", "update_weights")
    return {
        "label": f"verl {importlib.metadata.version('verl')} with vLLM",
        "seconds": seconds[1:],
        "first_s": seconds[0],
        "start_s": elapsed_s - sum(seconds),
        "memory_gib": max(step["actor/perf/max_memory_allocated_gb"] for step in steps),
        "stages": {f"stage/{name}_s": steps[-1][f"timing_s/{name}"] for name in stages},
        "response_tokens": steps[-1]["response_length/mean"],
    }


def start_verl(settings: Sequence[str], target: Path, out: IO[str]) -> "subprocess.Popen[bytes]":
    """Start verl's `main_ppo`, whose lines of metrics go to metrics.jsonl of `target`."""
    path = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VERL_FILE_LOGGER_PATH": str(target / "metrics.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    return subprocess.Popen(command, stdout=out, stderr=out, cwd=target, env=environment)


def verl_settings(row: Row, folder: Path, target: Path) -> list[str]:
    """Return the settings of verl's `main_ppo` for a row; prompts are written to `target`."""
    import pandas

    prompts = [[{"role": "user", "content": line["prompt"]}] for line in make_dataset(row, folder)]
    data = target / "prompts.parquet"
    columns = {"data_source": "words", "reward_model": [{"ground_truth": "0"} for _ in prompts]}
    pandas.DataFrame({"prompt": prompts, **columns}).to_parquet(data)
    folder = make_model(folder, row.shape)
    settings = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.model.tokenizer_path={write_verl_tokenizer(folder, target)}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={VERL_SHARE.get(row.shape, 0.6)}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=verl_reward",
        *verl_sizes(row.problems, row.samples, row.prompt, row.tokens, graph_sizes(row)),
        f"trainer.total_training_steps={row.steps + 1}",
        "trainer.total_epochs=1",
        f"hydra.run.dir={target}",
    ]
    if row.shape == "8b":
        config = "actor_rollout_ref.actor.fsdp_config"
        settings += [f"{config}.{what}_offload=true" for what in ("param", "optimizer")]
    return settings + os.environ.get("VERL_SETTINGS", "").split()


def verl_sizes(
    problems: int, samples: int, prompt: int, tokens: int, graphs: Sequence[int]
) -> list[str]:
    """Return what verl's runs on one GPU have in common, for steps of this size."""
    model = "actor_rollout_ref.model"
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    settings = [
        f"data.train_batch_size={problems}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={tokens}",
        "data.dataloader_num_workers=0",
        f"{model}.use_remove_padding=true",
        f"{model}.enable_gradient_checkpointing=true",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size={problems}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={max(32_768, 2 * (prompt + tokens))}",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={samples}",
        f"{rollout}.max_model_len={prompt + tokens}",
        f"{rollout}.max_num_seqs={problems * samples}",
        f"{rollout}.cudagraph_capture_sizes={json.dumps(list(graphs))}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        "trainer.n_gpus_per_node=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init.object_store_memory=4000000000",  # batches do not pass through it
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "hydra.output_subdir=null",
    ]
    if importlib.util.find_spec("flash_attn") is None:
        settings.append(f"+{model}.override_config.attn_implementation=sdpa")
    return settings


def write_verl_tokenizer(folder: Path, target: Path) -> Path:
    """Write the model's tokenizer with what verl expects of a Qwen3: a template, two tokens."""
    from transformers import AutoTokenizer

    target = target / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["\n", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(target)
    return target


def read_verl_steps(file: Path) -> list[dict[str, Any]]:
    """Return the metrics of the complete lines."""
    if not file.is_file():
        return []
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    return [json.loads(line)["data"] for line in lines]


def verl_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return the reward of speed.py; verl calls this."""
    return length_reward(solution_str, None)


SYSTEMS: dict[str, Callable[[Row, Path], dict[str, Any]]] = {
    "vllm": run_vllm,
    "sglang": run_sglang,
    "trl": run_trl,
    "unsloth": run_unsloth,
    "verl": run_verl,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=sorted(SYSTEMS))
    parser.add_argument("row", choices=sorted(ALL_ROWS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--limit-s", type=float, default=400.0, help="not used: speed.py ends it")
    args = parser.parse_args()
    result = SYSTEMS[args.system](ALL_ROWS[args.row], args.folder)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
