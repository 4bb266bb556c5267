"""Seconds and peak memory of one GRPO step on the CPU: Postgrad and TRL 1.16.

Both use the same model, prompts, samples and reward: SmolLM2-135M-Instruct, 8 problems x 8 samples
x 64 tokens, temperature 1, one update, no KL, no activation checkpointing. Each runs in its own
process, one after the other. The first step is warm-up; the median of the others is reported.

    make bench                                           installs TRL into .venv-bench and runs this
    python benchmarks/cpu_step.py --peer-python PYTHON   the same with an environment that has TRL
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROBLEMS = 8
SAMPLES = 8
TOKENS = 64
TRL = """
import json, resource, sys, tempfile, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
folder, prompts = sys.argv[1:3]
steps, problems, samples, tokens, bf16, threads = map(int, sys.argv[3:])
torch.set_num_threads(threads)
seconds = []
lengths = []
class Timer(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.time()
    def on_step_end(self, args, state, control, **kwargs):
        seconds.append(time.time() - self.start)
def reward(completions, completion_ids, **kwargs):
    lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
    return [len(c[0]["content"]) % 7 / 7 for c in completions]
data = Dataset.from_list([{"prompt": json.loads(line)} for line in open(prompts)])
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=problems * samples,
    num_generations=samples,
    max_completion_length=tokens,
    temperature=1.0,
    bf16=bool(bf16),
    use_cpu=True,
    max_steps=steps,
    report_to="none",
    beta=0.0,
    learning_rate=1e-6,
    save_strategy="no",
    gradient_checkpointing=False,
    disable_tqdm=True,
    shuffle_dataset=False,
)
dtype = torch.bfloat16 if bf16 else torch.float32
GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
    processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    reward_funcs=reward,
    args=config,
    train_dataset=data,
    callbacks=[Timer()],
).train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("RESULT " + json.dumps({"steps": seconds, "peak": peak, "lengths": lengths}))
"""


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group, so that no trainer can skip a row."""
    return len(response) % 7 / 7


def run_postgrad(folder: str, work: Path, steps: int, dtype: str) -> dict[str, object]:
    settings = [
        f"model.path={folder}",
        f"model.dtype={dtype}",
        "data.train=arithmetic:2:boxed",
        "data.shuffle=false",
        f"reward.verifier={Path(__file__).resolve()}:length_reward",
        f"rollout.samples={SAMPLES}",
        f"rollout.max_response_tokens={TOKENS}",
        f"training.problems_per_step={PROBLEMS}",
        f"training.steps={steps}",
        "training.checkpoint_every=1000",
        f"runs={work}",
        f"name={dtype}",
    ]
    subprocess.run(
        [sys.executable, "-m", "postgrad.cli.main", "train", "grpo", *settings],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (work / dtype / "metrics.jsonl").read_text().splitlines()]
    stage_names = [name for name in lines[-1] if name.startswith("stage/")]
    stages = {name: statistics.median(line[name] for line in lines[1:]) for name in stage_names}
    return {
        "steps": [line["step_s"] for line in lines],
        "peak": max(line["memory_gib"] for line in lines) * 2**30,
        "lengths": [line["response/length"] for line in lines],
        "stages": stages,
    }


def run_trl(
    python: str, folder: str, work: Path, steps: int, bf16: bool, threads: int
) -> dict[str, object]:
    from postgrad.data.problems import load_problems

    prompts = work / "prompts.jsonl"
    problems = load_problems("arithmetic:2:boxed")[: PROBLEMS * steps]
    prompts.write_text("".join(json.dumps(list(p.messages)) + "\n" for p in problems))
    arguments = [folder, str(prompts), steps, PROBLEMS, SAMPLES, TOKENS, int(bf16), threads]
    process = subprocess.run(
        [python, "-c", TRL, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    result = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(result.removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has trl")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="smollm2", help="model.path, for both")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["bfloat16", "float32"],
        help="compute types, one after the other",
    )
    parser.add_argument("--skip-peer", action="store_true", help="time Postgrad alone")
    options = parser.parse_args()
    from postgrad.model.load.load import resolve_path

    folder = resolve_path(options.model, 0)
    threads = len(os.sched_getaffinity(0))
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for dtype in options.dtypes:
            show(results, f"postgrad {dtype}", run_postgrad(folder, work, options.steps, dtype))
            if not options.skip_peer:
                try:
                    bf16 = dtype == "bfloat16"
                    peer = run_trl(options.peer_python, folder, work, options.steps, bf16, threads)
                except subprocess.CalledProcessError as error:
                    reason = (error.stderr or "").strip()[-300:]
                    print(f"trl {dtype} exited with {error.returncode}: {reason}", flush=True)
                    continue
                show(results, f"trl {dtype}", peer)
    seconds = {name: statistics.median(result["steps"][1:]) for name, result in results.items()}
    our_names = [name for name in seconds if name.startswith("postgrad")]
    ours = min(our_names, key=lambda name: seconds[name])
    for name in seconds:
        if name.startswith("trl"):
            print(f"{ours} is {seconds[name] / seconds[ours]:.2f} times as fast as {name}")


def show(results: dict[str, dict], name: str, result: dict) -> None:
    """Store and print one trainer's figures."""
    results[name] = result
    seconds = statistics.median(result["steps"][1:])
    length = statistics.mean(result["lengths"][1:])
    stages = ", ".join(
        f"{stage.removeprefix('stage/')} {value:.2f}"
        for stage, value in result.get("stages", {}).items()
    )
    print(
        f"{name:<20}{seconds:>8.2f} s per step, peak {result['peak'] / 2**30:.2f} GiB, "
        f"{length:.1f} tokens per response  {stages}",
        flush=True,
    )


if __name__ == "__main__":
    main()
