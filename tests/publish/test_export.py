"""Export: stock folders from runs, checkpoints, adapters and verl's shards, bit for bit."""

import gc
import json
import shutil
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tables import tabled
from tiny_runs import config_of, toy_run, tree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.cli.main import main
from postgrad.model.load.tiny import make_tiny
from postgrad.publish.verl_shards import read_shard
from postgrad.training.driver import train
from postgrad.training.report import Reporter


@contextmanager
def rank_of(rank: int, world: int):
    """A fake process group in which this process is one rank of several."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


@cache
def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the state of a training process: a tied head has both its names."""
    return {
        name: tensor.detach()
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()
    }


def dtensors(state, rank: int, world: int) -> dict:
    """FSDP2, and FSDP1 with a device mesh: rows sharded like torch.chunk."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    out = {}
    for name, whole in state.items():
        chunks = whole.chunk(world, dim=0)
        local = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()
        # FSDP pads, and the shard is a view of the padded memory.
        padded = torch.zeros(chunks[0].shape, dtype=whole.dtype)
        padded[: len(local)] = local
        out[name] = DTensor.from_local(
            padded[: len(local)],
            mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return out


def hybrid(state, rank: int, world: int) -> dict:
    """HSDP: two replicas, each sharded over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    out = {}
    for name, whole in state.items():
        chunks = whole.chunk(world // 2, dim=0)
        index = rank % (world // 2)
        local = chunks[index].clone() if index < len(chunks) else whole[:0].clone()
        placements = [Replicate(), Shard(0)]
        out[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return out


def fully_sharded(state, rank: int, world: int) -> dict:
    """torch's own FSDP2 over a module with the weights."""
    from torch.distributed.fsdp import fully_shard

    names = list(state)
    layers = torch.nn.ParameterList([torch.nn.Parameter(state[name].clone()) for name in names])
    fully_shard(layers, mesh=init_device_mesh("cpu", (world,)))
    return dict(zip(names, layers.state_dict().values(), strict=True))


def greedy_answer(folder: Path) -> str:
    """Return the text that the model in a folder generates after a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("3+4=", return_tensors="pt")
    return tokenizer.decode(model.generate(**prompt, max_new_tokens=6, do_sample=False)[0])


def write_verl(
    folder: Path, model: Path, world: int, shard=dtensors, change=lambda state: state
) -> Path:
    """Write a checkpoint as verl does."""
    state = change(state_of(model))
    (folder / "huggingface").mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / "huggingface" / file.name)
    for rank in range(world):
        with rank_of(rank, world):
            torch.save(
                shard(state, rank, world), folder / f"model_world_size_{world}_rank_{rank}.pt"
            )
    return folder


def run_export(*arguments: str, capsys=None) -> tuple[int, str]:
    """Return the exit code of `postgrad export` and what it printed."""
    if capsys is not None:
        capsys.readouterr()
    code = main(["export", *map(str, arguments)])
    if capsys is None:
        return code, ""
    printed = capsys.readouterr()
    return code, printed.err or printed.out


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory) -> Path:
    """A model whose first dimensions do not divide by the ranks: 18 tokens, width 24."""
    return make_tiny(tmp_path_factory.mktemp("models") / "odd", seed=3, layers=2, width=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "shard"),
    [
        (3, dtensors),
        (4, hybrid),
        pytest.param(1, dtensors, marks=pytest.mark.nightly),
        pytest.param(5, dtensors, marks=pytest.mark.nightly),
        pytest.param(3, fully_sharded, marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_verl_shards_become_the_original_model(odd_model, tmp_path, world, shard):
    folder = write_verl(tmp_path / "global_step_7" / "actor", odd_model, world, shard)
    assert run_export(folder.parent, tmp_path / "out")[0] == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(odd_model / "model.safetensors")
    assert exported.keys() == original.keys(), "a tied head is written once"
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert greedy_answer(tmp_path / "out") == greedy_answer(odd_model)


@pytest.mark.slow
def test_untied_head_dtype_shard_size_and_wrapped_names(tiny_untied, tmp_path, capsys):
    def wrapped(state):
        return {f"_fsdp_wrapped_module.{name}": tensor for name, tensor in state.items()}

    write_verl(tmp_path / "ck" / "global_step_20" / "actor", tiny_untied, 2, change=wrapped)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("20")
    size = 20_000 / 2**30
    code, printed = run_export(
        tmp_path / "ck", tmp_path / "out", "dtype=bfloat16", f"shard_gib={size}", capsys=capsys
    )
    assert code == 0 and "2 ranks" in printed and "model-00001-of-" in printed
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 20_000 + 4_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    ours = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"].keys() == ours.keys() and "lm_head.weight" in ours
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
    for name, whole in state_of(tiny_untied).items():
        assert torch.equal(ours[name], whole.bfloat16()), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.slow
def test_adapters_in_verl_shards_are_merged(odd_model, tmp_path):
    a = torch.randn(4, 24)
    b = torch.randn(24, 4)

    def adapted(state: dict) -> dict:
        names = {name: f"base_model.model.{name}" for name in state}
        layer = "model.layers.0.self_attn.q_proj"
        names[f"{layer}.weight"] = f"base_model.model.{layer}.base_layer.weight"
        pair = {
            f"base_model.model.{layer}.lora_A.default.weight": a,
            f"base_model.model.{layer}.lora_B.default.weight": b,
        }
        return {names[name]: tensor for name, tensor in state.items()} | pair

    folder = write_verl(tmp_path / "actor", odd_model, 2, change=adapted)
    assert run_export(folder, tmp_path / "out")[0] == 2, "alpha and rank are unknown"
    (folder / "lora_train_meta.json").write_text(
        '{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}'
    )
    assert run_export(folder, tmp_path / "out")[0] == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(odd_model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(merged[name], original[name] + 2.0 * (b @ a))
    assert merged.keys() == original.keys()


def rewrite(folder: Path, rank: int, change) -> None:
    """Change one shard."""
    file = folder / f"model_world_size_2_rank_{rank}.pt"
    with rank_of(rank, 2):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)


EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def in_both(change):
    """Change both shards."""
    return lambda folder: [rewrite(folder, rank, change) for rank in (0, 1)]


def in_one(change):
    return lambda folder: rewrite(folder, 1, change)


def change_config(folder: Path, settings: dict) -> None:
    file = folder / "huggingface" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings if settings else {}))


def shard(folder: Path, rank: int, world: int = 2) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


FAULTS = {
    "lacks 1 of 2 shards: model_world_size_2_rank_1.pt": lambda f: shard(f, 1).unlink(),
    "world sizes 2 and 3": lambda f: shutil.copyfile(shard(f, 1), shard(f, 2, 3)),
    "rank_0.pt cannot be read as weights": lambda f: shard(f, 0).write_bytes(b"PK"),
    "huggingface/config.json": lambda f: (f / "huggingface" / "config.json").unlink(),
    "actor/huggingface/config.json": lambda f: change_config(f, {}),
    "config.json says": lambda f: change_config(f, {"intermediate_size": 104}),
    f"'{NORM}' is in only one of them": in_one(lambda state: state.pop(NORM)),
    f"lacks 1 weights of the model, the first is {NORM}": in_both(lambda state: state.pop(NORM)),
    "more is not a weight of the model": in_both(lambda s: s.update(more=torch.ones(2))),
    f"{NORM} is not the same kind of tensor": in_one(lambda s: s.update({NORM: torch.ones(4)})),
    f"{EMBED} should be (18, 24), but its shards are": in_one(lambda s: remove_last_row(s, EMBED)),
    f"ties lm_head.weight to {EMBED}, but they differ": in_both(
        lambda state: state["lm_head.weight"]._local_tensor.mul_(2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("message", FAULTS)
def test_faulty_shards_are_one_line_and_write_nothing(odd_model, tmp_path, capsys, message):
    folder = write_verl(tmp_path / "actor", odd_model, 2)
    FAULTS[message](folder)
    before = tree(tmp_path)
    code, printed = run_export(folder, tmp_path / "out", capsys=capsys)
    assert code == 2 and message in printed and printed.count("\n") == 1, printed
    assert tree(tmp_path) == before


def remove_last_row(state: dict, name: str) -> None:
    whole = state[name]
    state[name] = DTensor.from_local(
        whole._local_tensor[:-1],
        whole.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.slow
def test_code_in_a_shard_does_not_run(odd_model, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    folder = write_verl(tmp_path / "actor", odd_model, 2)
    torch.save({EMBED: Evil()}, folder / "model_world_size_2_rank_0.pt")
    code, printed = run_export(folder, tmp_path / "out", capsys=capsys)
    assert code == 2 and "cannot be read as weights" in printed
    assert not (tmp_path / "owned").exists()
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(Exception, match="cannot be read"):
        read_shard(folder / "model_world_size_2_rank_0.pt")
    assert set(torch.serialization.get_safe_globals()) == before, (
        "globals that others allowed are restored"
    )


# ---- runs of Postgrad


@pytest.fixture(scope="module")
def adapted_run(tiny, tmp_path_factory) -> Path:
    """A run of two steps with adapters and two checkpoints."""
    pytest.importorskip("peft")
    runs = tmp_path_factory.mktemp("runs")
    (runs / "mine.py").write_text(
        "def threes(response, problem):\n    return response.count('3') / 3\n"
    )
    overrides = toy_run(response_tokens=3)
    own = ("model.lora.rank=2", "optimizer.lr=5e-2", "training.checkpoint_every=1", f"runs={runs}")
    return train(
        config_of("grpo", tiny, *overrides, *own, f"reward.verifier={runs / 'mine.py'}:threes"),
        Reporter(),
    ).folder


@pytest.mark.slow
def test_run_is_exported_by_step(adapted_run, tmp_path):
    for word, step in (("latest", 2), ("1", 1)):
        assert run_export(adapted_run, tmp_path / word, f"step={word}")[0] == 0
        ours = load_file(tmp_path / word / "model.safetensors")
        saved = load_file(
            adapted_run / "checkpoints" / f"step-{step}" / "policy" / "model.safetensors"
        )
        assert all(torch.equal(ours[name], saved[name]) for name in saved)
        assert ours.keys() == saved.keys()
    names = {file.name for file in (tmp_path / "latest").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    } <= names
    assert not any(name.startswith("adapter") for name in names)
    assert run_export(adapted_run / "checkpoints" / "latest", tmp_path / "by pointer")[0] == 0
    assert tree(tmp_path / "by pointer") == tree(tmp_path / "latest")


@pytest.mark.slow
def test_adapter_is_kept_or_merged(adapted_run, tmp_path):
    peft = pytest.importorskip("peft")
    assert run_export(adapted_run, tmp_path / "kept", "lora=keep")[0] == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        f.name for f in (tmp_path / "kept").iterdir()
    }
    assert run_export(tmp_path / "kept", tmp_path / "merged")[0] == 0
    base = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    through = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "kept"
    )
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        policy = AutoModelForCausalLM.from_pretrained(
            adapted_run / "checkpoints" / "step-2" / "policy"
        )(ids).logits
        torch.testing.assert_close(ours, through(ids).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, policy, rtol=0, atol=1e-5)


@tabled("arguments, message")
def test_wrong_arguments_are_one_line(adapted_run, tiny, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    (adapted_run / "checkpoints" / "step-mine").mkdir(exist_ok=True)  # the user's own folder
    folders = {
        "run": adapted_run,
        "out": tmp_path / "out",
        "model": tiny,
        "empty": tmp_path / "empty",
    }
    code, printed = run_export(*(word.format(**folders) for word in arguments), capsys=capsys)
    assert code == 2 and message in printed and printed.count("\n") == 1, printed
    assert not (tmp_path / "out").exists()
