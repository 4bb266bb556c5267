"""Top-p, top-k and min-p in training: the loss normalizes over the tokens that sampling kept."""

import math
from dataclasses import replace

import pytest
import torch
from method_runs import bound, run

from postgrad.methods import method as base
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native import engine as native
from postgrad.rollout.native.sampling import truncate
from postgrad.types import Batch, Trajectory

FILTERS = ["rollout.top_p=0.8", "rollout.top_k=6", "rollout.temperature=1.3"]
# Two updates, so that a stage computes the old log-probs.
TWO_UPDATES = ["training.updates_per_step=2", "method.correction=none"]


def test_the_engine_records_what_it_kept_and_its_log_prob():
    """0.4 of 0.65 and, with a row that records nothing, 0.4 of 1."""
    probs = torch.tensor([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
    logits = probs.log().expand(2, -1)
    logprobs = probs[1].log().repeat(2)
    recording = Sampling(top_p=0.6, record_kept=True)
    assert truncate(logits, logprobs, [recording, Sampling(top_p=0.6)]) == [[1, 3], []]
    assert logprobs.tolist() == pytest.approx([math.log(0.4 / 0.65), math.log(0.4)], abs=1e-6)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_engine_and_trainer_agree_on_truncated_log_probs(tiny, engine):
    world = bound("grpo", tiny, *FILTERS, *TWO_UPDATES, f"rollout.engine={engine}")
    batch = world.until("compute_old_logprobs")
    num_kept = batch.tokens["num_kept"]
    assert int(num_kept.min()) >= 1 and int(num_kept.max()) <= 6 and len(num_kept.unique()) > 1
    old = batch.tokens["old_logprobs"]
    torch.testing.assert_close(old, batch.tokens["behavior_logprobs"], rtol=0, atol=1e-5)
    for row in range(len(batch)):  # every sampled token is among the kept ones
        kept = SampledSupport.of(batch, [row], torch.device("cpu"))
        assert kept is not None
        ids = kept.ids.split(kept.counts.tolist())
        tokens = batch.response.split()[row].tolist()
        assert all(token in some for token, some in zip(tokens, ids, strict=True))
    without = Batch(batch.prompt, batch.response, dict(batch.tokens), dict(batch.rows))
    del without.rows["kept_ids"]
    full = world.method.ports.policy.logprobs(without)["logprobs"]
    assert float((old - full).min()) > -1e-5 and float((old - full).max()) > 0.05


def test_a_mask_that_is_not_replayed_shows_as_a_gap(tiny, monkeypatch):
    monkeypatch.setattr(SampledSupport, "exclude_others", lambda kept, logits: logits)
    batch = bound("grpo", tiny, *FILTERS, *TWO_UPDATES).until("compute_old_logprobs")
    gap = (batch.tokens["old_logprobs"] - batch.tokens["behavior_logprobs"]).abs()
    assert float(gap.max()) > 0.05


def test_by_default_nothing_is_recorded(tiny, monkeypatch):
    samplings: list[Sampling] = []
    make = base.make_sampling
    monkeypatch.setattr(base, "make_sampling", lambda c: samplings.append(make(c)) or samplings[-1])
    batch = bound("grpo", tiny).until("sample")
    assert samplings == [replace(samplings[0], record_kept=False)]
    assert "kept_ids" not in batch.rows and "num_kept" not in batch.tokens


def test_rows_of_others_keep_the_whole_vocabulary():
    """A demonstration beside a sampled row, in any order and selection."""
    sampled = Trajectory("a", [1], [2, 3], kept_ids=[[2, 5], [3]])
    given = Trajectory("a", [1], [4, 5])
    batch = Batch.of([given, sampled]).select([1, 0])
    assert batch.tokens["num_kept"].tolist() == [2, 1, 0, 0]
    kept = SampledSupport.of(batch, [1, 0], torch.device("cpu"))
    assert kept is not None
    assert kept.counts.tolist() == [0, 0, 2, 1] and kept.ids.tolist() == [2, 5, 3]


def test_stop_strings_cut_what_was_kept(tiny):
    world = bound("grpo", tiny, "rollout.engine=hf")
    sampling = Sampling(top_k=3, max_new_tokens=6, record_kept=True)
    request = Request(world.prompts.prompt(world.problems[0]), [1, 2, 3])
    other = native.NativeEngine(world.host.policy.loaded, world.config.rollout)
    for engine in (world.host.engine, other):
        (completions,) = engine.generate([request], sampling)
        for one in completions:
            assert one.kept_ids is not None and len(one.kept_ids) == len(one.tokens)
            cut = one.cut(2)
            assert cut.kept_ids == one.kept_ids[:2] and len(cut.tokens) == 2


@pytest.mark.slow
def test_a_run_of_luffy_with_truncated_sampling(tiny, tmp_path):
    """Demonstrations beside sampled rows, from the first stage to the rollout files."""
    metrics = run("luffy", tiny, tmp_path, "rollout.top_p=0.7", "rollout.min_p=0.01")
    assert all(math.isfinite(line["loss"]) for line in metrics)
    assert max(abs(line["kl/engine"]) for line in metrics) < 1e-5
