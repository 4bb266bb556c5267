"""The passes of sharded models on a GPU, without one: Triton's interpreter runs the kernels.

tests/gpu/test_shared_gpu_ranks.py checks the same on four ranks that share a GPU.
"""

import json
from pathlib import Path

import pytest
from interpreted import run_interpreted
from parallel import EXPERT, LORA, SEQUENCE, TENSOR, folder_maker, needs_experts

# Computes in one process with a CPU's passes, then on two ranks with a GPU's. Prints how each case
# differs.
PROGRAM = """
import json, sys, traceback
sys.path.insert(0, sys.argv[1])
from parallel import (
    SHORT_BATCH as batch, compute_critic, compute_with_step, difference, local_critic, local_policy,
    rank_critic, sharded_policy,
)
from ranks import run_on_ranks
from postgrad.errors import ConfigError
from postgrad.model.load import gate
from postgrad.model.load import load
from postgrad.model.parallel import sharding
from postgrad.model.passes import head
from postgrad.model.passes import layout

def run(name, folder, settings, is_rank):
    if name.startswith("critic"):
        make = rank_critic if is_rank else local_critic
        return compute_critic(make(folder, settings), batch)
    if not is_rank:
        return compute_with_step(local_policy(folder, settings), batch)
    policy = sharded_policy(folder, settings)
    assert {"_norm_forward", "_attention_forward"} <= kernels_of(policy), kernels_of(policy)
    return compute_with_step(policy, batch)

def kernels_of(policy):
    forwards = [vars(module).get("forward") for module in policy.model.modules()]
    return {getattr(forward, "__func__", run).__name__ for forward in forwards if forward}

def check_wrong_kernels(folder, expected):
    from postgrad.model.kernels import install, packed_attention
    right = install.rms_norm
    install.rms_norm = lambda *arguments: 1.1 * right(*arguments)
    policy = sharded_policy(folder, [])
    install.rms_norm = right
    assert not kernels_of(policy), kernels_of(policy)
    logprobs = {"logprobs": policy.logprobs(batch)["logprobs"], "gradient": expected["norm"]}
    assert not difference(logprobs, {**expected, "gradient": expected["norm"]})
    wrong = lambda q, *arguments: 1.1 * q
    install.packed_attention = packed_attention.packed_attention = wrong
    try:
        sharded_policy(folder, [])
    except ConfigError as error:
        assert "stock model" in str(error)
    else:
        raise AssertionError("wrong attention was accepted")
    return ""

def attempt(work, *arguments):
    try:
        return work(*arguments)
    except Exception:
        return traceback.format_exc()

def compare(name, folder, settings):
    return difference(expected[name], run(name, folder, settings, True))

def on_rank():
    for module in (head, layout, load, sharding):
        module.supports_triton = lambda device: True
    gate.PROMPTS, gate.RESPONSES = (3,), ((2, 1),)  # the interpreter is slow
    found = {name: attempt(compare, name, *case) for name, case in cases.items()}
    found["wrong"] = attempt(check_wrong_kernels, cases["fsdp"][0], expected["fsdp"])
    return found

cases = json.loads(sys.argv[2])
expected = {name: run(name, *case, False) for name, case in cases.items()}
first, second = run_on_ranks(2, on_rank, collective_s=60)
print("same", json.dumps({name: first[name] or second[name] for name in first}))
"""
ONE = {"num_hidden_layers": 1}
# Family, changes of its shape, and settings, on two ranks.
CASES = {
    "fsdp": ("qwen3", ONE, []),
    "fsdp, adapters": ("llama", ONE, [LORA]),
    "tensor": ("qwen3", ONE, [TENSOR]),
    "tensor, adapters": ("llama", ONE, [TENSOR, LORA]),
    "sequence, recomputed": ("qwen3", ONE, [SEQUENCE, "model.activation_checkpointing=true"]),
    "sequence, windows": ("gemma3_text", ONE | {"sliding_window": 3}, [SEQUENCE]),
    "critic, tensor": ("qwen3", ONE, [TENSOR]),
    "experts": ("qwen3_moe", ONE, [EXPERT]),
}


def params() -> list:
    return [
        pytest.param(name, marks=needs_experts) if EXPERT in settings else name
        for name, (_, _, settings) in CASES.items()
    ]


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, str]:
    folder = folder_maker(tmp_path_factory.mktemp("families"))
    cases = {
        name: (str(folder(family, changes)), settings)
        for name, (family, changes, settings) in CASES.items()
    }
    tests = Path(__file__).parents[1]
    printed = run_interpreted(PROGRAM, tests, json.dumps(cases))
    return json.loads(printed.removeprefix("same"))


@pytest.mark.slow
@pytest.mark.parametrize("name", params())
def test_the_kernels_of_ranks_give_the_numbers_of_one_process(name, differences):
    assert not differences[name], differences[name]


@pytest.mark.slow
def test_wrong_kernels_of_ranks_are_not_used(differences):
    """Wrong norms are replaced by the stock modules, wrong attention is refused."""
    assert not differences["wrong"], differences["wrong"]
