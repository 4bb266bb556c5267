"""AdamW with its state in host memory, and the other kinds, against torch's AdamW bit for bit."""

import mmap

import pytest
import torch
from refused import refused
from tiny_runs import config_of, random_batch
from torch import Tensor, nn

from postgrad.cluster.host import build_host
from postgrad.config.schema import OptimizerConfig
from postgrad.errors import RunError
from postgrad.model.optimizers import offload
from postgrad.model.optimizers.offload import OffloadedAdamW
from postgrad.model.optimizers.optimizer import Optimizer

KINDS = ["adamw", "adamw_offloaded", "adamw_fused", "adamw_8bit"]
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def net(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5, bias=False), nn.Linear(5, 3)
    ).to(device, dtype)


def data(seed: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 4 - 2)


def backward(model: nn.Module, seed: int) -> None:
    p = next(model.parameters())
    model(data(seed).to(p.device, p.dtype)).square().sum().backward()


def config(kind: str, **changes) -> OptimizerConfig:
    return OptimizerConfig(
        kind=kind, lr=1e-2, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.1, **changes
    )


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_twenty_steps_are_bit_equal_to_torch(device, monkeypatch):
    """Float32 weights, torch.optim.AdamW on the same device, slices that cut across weights."""
    skip_without(device)
    monkeypatch.setattr(offload, "SLICE_ELEMENTS", 16)
    ours, theirs = net(device=device), net(device=device)
    one = OffloadedAdamW(ours.parameters(), **OPTIONS)
    two = torch.optim.AdamW(theirs.parameters(), **OPTIONS, foreach=False)
    for step in range(1, 21):
        for model, adam in ((ours, one), (theirs, two)):
            backward(model, step)
            adam.param_groups[0]["lr"] = 1e-2 / step
            adam.step()
            adam.zero_grad()
        assert same(ours, theirs), step
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert set(one.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in one.state[p].items():
            assert value.device.type == "cpu" and torch.equal(value, two.state[q][key].cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_offloading_changes_no_bit_of_a_run(dtype, device, max_grad_norm, monkeypatch):
    """Two backward passes per step, clipping, masters and two learning rates, as kind=adamw."""
    skip_without(device)
    monkeypatch.setattr(offload, "SLICE_ELEMENTS", 50)
    scale = {"0.weight": 0.5, "3.bias": 2.0}
    models = {kind: net(dtype, device) for kind in ("adamw", "adamw_offloaded")}
    optimizers = {
        kind: Optimizer(model, config(kind, max_grad_norm=max_grad_norm), scale)
        for kind, model in models.items()
    }
    if device == "cuda":  # torch's default there orders the operations differently
        for group in optimizers["adamw"].adam.param_groups:
            group["foreach"] = False
    for step in range(1, 21):
        norms = set()
        for kind, model in models.items():
            backward(model, step)
            backward(model, step + 100)
            norms.add(optimizers[kind].step(1e-2 / step))
            assert all(p.grad is None for p in model.parameters())
        assert len(norms) == 1 and same(models["adamw"], models["adamw_offloaded"]), step
    if dtype == torch.bfloat16:
        plain, host = optimizers["adamw"], optimizers["adamw_offloaded"]
        for name, p in host.params.items():
            master = host.adam.state[p]["master"]
            assert master.dtype == torch.float32 and master.device.type == "cpu"
            assert torch.equal(master, plain.masters[name].cpu()) and torch.equal(
                p.cpu(), master.bfloat16()
            )


@pytest.mark.slow
def test_a_tied_model_gives_the_same_bits_with_offloaded_state(tiny):
    """Tied weights get two gradients per backward pass; both kinds add them in the same order."""
    overrides = ("model.dtype=bfloat16", "optimizer.lr=1e-2", "training.updates_per_step=2")
    plain = build_host(config_of("grpo", tiny, *overrides)).policy
    host = build_host(config_of("grpo", tiny, *overrides, "optimizer.kind=adamw_offloaded")).policy
    for step in (1, 2, 3):
        assert (
            plain.update(random_batch(step), step)["grad_norm"]
            == host.update(random_batch(step), step)["grad_norm"]
        )
    assert same(plain.model, host.model)


def test_bfloat16_steps_below_the_spacing_add_up_in_the_master():
    """Weight 0.02, lr 5e-6, 200 unit gradients: bfloat16 alone never changes, float32 does.

    The numbers are those of the CS336 assignment, section 5.
    """
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(0.02)
    start = model.weight.item()
    adam = OffloadedAdamW(model.parameters(), lr=5e-6, weight_decay=0.0)
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        adam.step()
    assert adam.state[model.weight]["master"].item() == pytest.approx(start - 200 * 5e-6, abs=5e-7)
    assert model.weight.item() == torch.tensor(start - 200 * 5e-6).bfloat16().item() < start


def test_epsilon_is_added_after_the_bias_correction_as_in_torch():
    """One step by hand with eps = 1: m^ = v^ = 1, so the weight changes by lr · 1 / (1 + eps)."""
    p = nn.Parameter(torch.tensor([2.0]))
    p.grad = torch.tensor([1.0])
    OffloadedAdamW([p], lr=0.1, eps=1.0, weight_decay=0.5).step()
    assert p.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1 / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_gradient_are_left_alone(kind, dtype):
    model = net(dtype)
    model[0].weight.requires_grad_(False)  # from the start
    optimizer = Optimizer(model, config(kind))
    backward(model, 1)
    optimizer.step(1e-2)
    model[2].weight.requires_grad_(False)  # from now on
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {
        key: torch.as_tensor(v).clone()
        for key, v in optimizer.adam.state[optimizer.masters["2.weight"]].items()
    }
    for step in (2, 3):
        backward(model, step)
        optimizer.step(1e-2)
    assert "0.weight" not in optimizer.masters
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in ("0.weight", "2.weight")), name
    after = optimizer.adam.state[optimizer.masters["2.weight"]]
    assert all(torch.equal(value, torch.as_tensor(after[key])) for key, value in moments.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [*((kind, kind) for kind in KINDS), KINDS[:2], KINDS[1::-1]],  # the first two share files
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_continues_bit_for_bit(saved_by, loaded_by, dtype, device, tmp_path):
    skip_without(device)
    one = big_net(dtype, device)
    first = Optimizer(one, config(saved_by), {"0.bias": 0.1})
    for step in (1, 2, 3):
        backward(one, step)
        first.step(1e-2)
    first.save(tmp_path / "o.safetensors")
    two = big_net(dtype, device)
    two.load_state_dict(one.state_dict())
    second = Optimizer(two, config(loaded_by), {"0.bias": 0.1})
    if dtype == torch.bfloat16:  # the masters are in the file: the weights follow them
        two.load_state_dict({name: torch.zeros_like(p) for name, p in two.named_parameters()})
    second.load(tmp_path / "o.safetensors")
    assert same(one, two)
    for step in (4, 5, 6):
        for model, optimizer in ((one, first), (two, second)):
            backward(model, step)
            optimizer.step(1e-2)
        assert same(one, two)


def big_net(dtype: torch.dtype, device: str) -> nn.Module:
    """Weights of more than 4,096 entries: below, the 8-bit optimizer keeps float32 state."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 700), nn.Tanh(), nn.Linear(700, 9)).to(device, dtype)


@pytest.mark.parametrize("kind", ["adamw", "adamw_offloaded"])
def test_load_discards_newer_state_and_uses_the_models_weights(kind, tmp_path):
    """The master of a parameter without saved state is the model's current weight."""
    Optimizer(net(), config("adamw")).save(tmp_path / "empty.safetensors")
    model = net(torch.bfloat16)
    optimizer = Optimizer(model, config(kind))
    backward(model, 1)
    optimizer.step(1e-2)
    model.load_state_dict({name: torch.full_like(p, 0.25) for name, p in model.named_parameters()})
    optimizer.load(tmp_path / "empty.safetensors")
    assert len(optimizer.adam.state) == 0 and all(
        bool((p == 0.25).all()) for p in model.parameters()
    )


def test_state_of_another_kind_is_refused(tmp_path):
    from safetensors.torch import save_file

    model = net()
    save_file({"momentum_buffer/0.bias": torch.zeros(11)}, tmp_path / "o.safetensors")
    with pytest.raises(RunError, match=r"optimizer\.kind=adamw_offloaded"):
        Optimizer(model, config("adamw_offloaded")).load(tmp_path / "o.safetensors")


def test_state_dict_keeps_float32_on_the_host():
    """torch's own load_state_dict would cast the moments to bfloat16."""
    one, two = net(torch.bfloat16), net(torch.bfloat16)
    first = OffloadedAdamW(one.parameters(), **OPTIONS)
    second = OffloadedAdamW(two.parameters(), **OPTIONS)
    backward(one, 1)
    first.step()
    two.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    first.load_state_dict(first.state_dict())  # from itself: nothing may be lost
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert int(second.state[q]["step"]) == 1
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert second.state[q][key].dtype == torch.float32 and torch.equal(
                first.state[p][key], second.state[q][key]
            )
            assert second.state[q][key].data_ptr() != first.state[p][key].data_ptr()
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    first.step()
    second.step()
    assert same(one, two)


def test_state_in_a_host_buffer_survives_loading_from_itself():
    """State views that share the buffer's memory are copied onto themselves, not cleared first."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    adam = OffloadedAdamW([p])
    buffer = offload._HostBuffer([p])
    for value, tensor in enumerate(buffer.tensors(p).values(), start=2):
        tensor.fill_(value)
    saved = {"step": torch.tensor(4.0), **buffer.tensors(p)}
    adam._host_buffers.append(buffer)
    adam.restore(p, saved)
    assert {key: value.mean().item() for key, value in adam.state[p].items()} == {
        "step": 4.0,
        "master": 2.0,
        "exp_avg": 3.0,
        "exp_avg_sq": 4.0,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slice_size", [1, 7, 16, 1000])
def test_slices_cover_every_element_once(dtype, slice_size, monkeypatch):
    """As on a CUDA device but with plain copies: any slice size, one parameter frozen."""
    monkeypatch.setattr(offload, "SLICE_ELEMENTS", slice_size)
    ours, theirs = net(dtype), net(dtype)
    frozen = ours[2].weight
    params = list(ours.parameters())
    buffer = offload._HostBuffer(params)
    adam = OffloadedAdamW(theirs.parameters(), **OPTIONS)
    group = adam.param_groups[0]
    states = {p: {"step": torch.tensor(0.0)} for p in params}
    for p in params if dtype == torch.bfloat16 else []:
        buffer.tensors(p)["master"].copy_(p.detach())
    for step in (1, 2, 3):
        backward(ours, step)
        backward(theirs, step)
        frozen.grad = theirs[2].weight.grad = None
        adam.step()
        active = {p: group for p in params if p.grad is not None}
        with torch.no_grad():
            for p in active:
                states[p]["step"] += 1
            for part in buffer.slices:
                rows = buffer.host[:, part.start : part.stop].clone()
                buffer._update(part, rows, active, states)
                buffer.host[:, part.start : part.stop] = rows
        ours.zero_grad()
        theirs.zero_grad()
        assert same(ours, theirs), step
    for p, q in zip(params, theirs.parameters(), strict=True):
        assert all(
            torch.equal(buffer.tensors(p)[key], value)
            for key, value in adam.state[q].items()
            if key != "step"
        )
    assert sum(part.stop - part.start for part in buffer.slices) == sum(p.numel() for p in params)
    assert not buffer.tensors(frozen)["exp_avg"].any()
    assert buffer.host.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.gpu
def test_host_state_is_page_locked_and_not_larger_than_needed():
    skip_without("cuda")
    before = torch.cuda.memory_allocated()
    p = nn.Parameter(torch.randn(5_000_001, device="cuda", dtype=torch.bfloat16))
    adam = OffloadedAdamW([p])
    p.grad = torch.randn_like(p)
    adam.step()
    assert all(adam.state[p][key].is_pinned() for key in ("master", "exp_avg", "exp_avg_sq"))
    assert adam.state[p]["master"].untyped_storage().nbytes() == 3 * 4 * 5_000_001
    p.grad = None
    # The weight alone takes 2 bytes per element.
    assert torch.cuda.memory_allocated() - before < 3 * p.numel()


def test_parameters_that_cannot_be_streamed_are_refused():
    not_contiguous = nn.Parameter(torch.ones(3, 4).T)
    not_on_cpu_or_gpu = nn.Parameter(torch.ones(3, device="meta"))
    for bad in (not_contiguous, not_on_cpu_or_gpu):
        with refused("unsupported", "optimizer.kind"):
            OffloadedAdamW([bad])


def test_a_device_without_the_fused_kernel_is_refused(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("`fused=True` requires all the params to be on supported devices")

    monkeypatch.setattr(torch.optim, "AdamW", refuse)
    with refused("unsupported", "optimizer.kind"):
        Optimizer(net(), config("adamw_fused"))
