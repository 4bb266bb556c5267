"""Classmate-CoT: what classmates see, and which tokens their reward applies to."""

import dataclasses
import json
import math

import pytest
import torch
from classmate_models import END, FOUR, Setting
from method_runs import SMALL, build_tokenizer, flat_weights
from refused import refused
from tiny_runs import config_of

from postgrad.algorithms.groups import STD_EPS
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.data.thoughts import ThoughtSplitter
from postgrad.methods.classmate import ESTIMATORS
from postgrad.methods.method import Step
from postgrad.pictures import Picture
from postgrad.types import POLICY, TOOL, Batch, Score, Trajectory
from postgrad.user_code import PythonObject
from postgrad.verifiers.expression import Term
from postgrad.verifiers.scorer import Scorer

MARKED = (
    *(
        "method.cot_start='('",
        "method.cot_end=')'",
        "method.reward_type=vanilla",
        "method.condition=always",
    ),
    "method.keep_unit=tokens",
)


def made(tiny, responses, *overrides, recipe="classmate", **options) -> Setting:
    return Setting(config_of(recipe, tiny, *SMALL, *MARKED, *overrides), responses, **options)


def test_thoughts_reach_classmates_and_only_outputs_reach_the_verifier(tiny):
    s = made(tiny, FOUR)
    batch = s.until_estimate()
    question = [p.messages[0]["content"] for p in s.problems[:2]]
    assert s.asked() == [f"{question[0]}(12)", f"{question[0]}(56)", f"{question[1]}(1)"]
    assert batch.rows["output"] == ["34", "7", None, "2"] and batch.rows["cot"] == [
        "12",
        "56",
        "89",
        "1",
    ]
    assert s.scorer.asked == ["34", "7", "2", "7", "7", "7"], (
        "outputs, then what the classmates said"
    )
    assert batch.rows["reward"].tolist() == [2, 1, 0, 1] and batch.rows[
        "reward/classmate"
    ].tolist() == [1, 1, 0, 1]
    assert batch.rows["classmate_texts"] == [["7"], ["7"], [None], ["7"]]
    masks = [
        row.int().tolist()
        for row in batch.tokens["cot_mask"].split(batch.response.lengths.tolist())
    ]
    assert masks == [[0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert s.step.metrics["cot/closed"] == 0.75 and s.step.metrics["classmate/asked"] == 0.75


def test_what_a_tool_wrote_is_in_no_thought_and_no_output(tiny):
    """(1 [tool: 9)9] 2)3 [tool: 8] 4: the thought is 12 and the output 34, on their own tokens."""
    s = made(tiny, FOUR)
    encode = s.prompts.encode_response
    parts = [("(1", True), ("9)9", False), ("2)3", True), ("8", False), ("4", True)]
    tokens = [i for text, _ in parts for i in encode(text, with_end=False)] + [END]
    own = [flag for text, flag in parts for _ in encode(text, with_end=False)] + [True]
    first = s.problems[0]
    row = Trajectory(
        first.uid,
        s.prompts.prompt(first),
        tokens,
        token_source=[POLICY if flag else TOOL for flag in own],
        loss_mask=own,
    )
    plain = Trajectory(first.uid, s.prompts.prompt(first), encode("(5)6"), index=1)
    s.batch = Batch.of([row, plain])
    batch = s.until_estimate()
    assert batch.rows["cot"] == ["12", "5"] and batch.rows["output"] == ["34", "6"]
    assert [prompt[-4:] for prompt in s.asked()] == ["(12)", s.asked()[1][-4:]]
    assert s.scorer.asked[:2] == ["34", "6"]
    found = {}
    for name in ("cot_mask", "thought_mask", "output_mask", "loss_mask"):
        mask = batch.tokens[name][: len(tokens)]
        found[name] = "".join("x" if flag else "." for flag in mask.tolist())
    assert found["cot_mask"] == found["thought_mask"] == ".x...x......"[: len(tokens)]
    assert found["output_mask"] == ".......x.xx."[: len(tokens)].replace(".", ".")
    assert found["loss_mask"] == "xx...xxx.xx"[: len(tokens)]
    assert not batch.tokens["advantages"][: len(tokens)][~torch.tensor(own)].any()


def test_an_unclosed_thought_may_be_shown_when_asked_for(tiny):
    s = made(tiny, FOUR, "method.unclosed_thought=allow")
    batch = s.until_estimate()
    assert (
        len(s.asked()) == 4
        and s.asked()[2].endswith("(89)")
        and batch.rows["reward"].tolist()[2] == 0
    )
    assert int(batch.tokens["cot_mask"].sum()) == 2 + 2 + 2 + 1


def test_several_classmates_have_their_own_markers_samples_shares_and_seeds(tiny):
    overrides = (
        "method.classmates=['','']",
        "method.classmate_samples=2",
        "method.classmate_shares=[3,1]",
    )
    markers = ("method.classmate_cot_start=['(','*']", "method.classmate_cot_end=[')','-']")
    seeds = []
    s = made(
        tiny,
        FOUR,
        *overrides,
        *markers,
        reply=lambda prompt, seed: (
            seeds.append(seed) or [7] * (1 if prompt[-1] == 11 else 5) + [END]
        ),
    )
    batch = s.until_estimate()
    assert s.asked(0)[0].endswith("(12)") and s.asked(1)[0].endswith("*12-")
    assert len(set(seeds)) == len(seeds) == 12, (
        "every row, classmate and sample has a seed of its own"
    )
    assert [len(texts) for texts in batch.rows["classmate_texts"]] == [4] * 4
    assert batch.rows["reward/classmate"][0] == pytest.approx(0.75 * 5 + 0.25 * 1)


def test_the_prompt_is_written_with_the_classmate_s_own_tokenizer(tiny):
    class Shifted(Encoder):
        def tokenize(self, text, special):
            return [i + 100 for i in super().tokenize(text, special)]

        def decode(self, ids):
            return super().decode([i - 100 for i in ids])

        decode_raw = decode

    s = made(tiny, FOUR, reply=lambda prompt, seed: [107, 117])
    s.method.classmates.generators[0].encoder = Shifted(build_tokenizer(s.config), "plain", 64)
    batch = s.until_estimate()
    assert all(token >= 100 for request in s.engines[0].requests for token in request.prompt)
    assert batch.rows["classmate_texts"][0] == ["7"]


def test_a_prompt_that_opens_the_thought_is_not_opened_twice(tiny):
    config = config_of("classmate", tiny)
    prompts = Encoder(build_tokenizer(config), "plain", 64)
    problem = dataclasses.replace(
        load_problems("arithmetic:1")[0], messages=({"role": "user", "content": "1+1=("},)
    )
    assert prompts.decode(prompts.encode_prefilled(problem, "(", "2", ")")) == "1+1=(2)"
    thought = ThoughtSplitter(prompts, "(", ")").split(
        prompts.prompt(problem), prompts.encode_response("3(4)5"), True
    )
    assert thought.text == "3(4" and thought.output == "5", "the response begins inside the thought"


@pytest.mark.slow
def test_words_and_shares_shorten_what_is_shown(tiny):
    s = made(tiny, ["(1234)5"] * 4, "method.keep=0.5")
    batch = s.until_estimate()
    assert s.asked()[0].endswith("(12)") and int(batch.tokens["cot_mask"].sum()) == 4 * 2
    s = made(tiny, ["(1234567890)5"] * 4, "method.reward_type=random_truncate")
    batch = s.until_estimate()
    lengths = batch.sum_tokens(batch.tokens["cot_mask"].long()).tolist()
    assert all(1 <= n <= 9 for n in lengths) and len(set(lengths)) > 1
    again = made(tiny, ["(1234567890)5"] * 4, "method.reward_type=random_truncate")
    assert again.until_estimate().tokens["cot_mask"].equal(batch.tokens["cot_mask"]), (
        "drawn from the seed"
    )
    s.step = Step(0, s.step.data)
    assert int(s.until_estimate().tokens["cot_mask"].sum()) == 4 * 10, "a validation shows all"
    text = ThoughtSplitter(s.prompts, "", "")
    kept = text.truncate(text.split([1], s.prompts.encode_response("123"), True), "0.5", "words")
    assert kept.text == "123" and (kept.start, kept.end) == (0, 3)


def test_without_the_thought_is_asked_once_a_problem_and_subtracted(tiny):
    def reply(prompt, seed):
        return (
            [7, 7, 7, END] if prompt[-2:] == [13, 14] else [7] * 5 + [END]
        )  # () is the empty thought

    s = made(tiny, FOUR, "method.reward_type=remove_wo_cot", reply=reply)
    batch = s.until_estimate()
    assert batch.rows["reward/classmate"].tolist() == [2, 2, 0, 2]
    assert sum(text.endswith("()") for text in s.asked()) == 2, "one a problem"
    s.until_estimate()
    assert sum(text.endswith("()") for text in s.asked()) == 2, "kept"
    fresh = made(tiny, FOUR, "method.reward_type=remove_wo_cot", reply=reply)
    fresh.method.load(json.loads(json.dumps(s.method.state())))
    fresh.until_estimate()
    assert not any(text.endswith("()") for text in fresh.asked()), "in the checkpoint"


def test_helping_others_pairs_problems_and_is_judged_by_theirs(tiny):
    s = made(tiny, FOUR, "method.reward_type=help_other_questions")
    judged = []
    score = s.scorer.score
    s.scorer.score = lambda problems, texts, *_: (
        judged.append([p.uid for p in problems]) or score(problems, texts)
    )
    s.until_estimate()
    one, two = s.problems[:2]
    turns = [p.messages[0]["content"] for p in (one, two)]
    assert s.asked()[0] == f"{turns[0]}\n\n12\n\n{turns[1]}".replace("\n", "") or s.asked()[
        0
    ].startswith(turns[0])
    assert s.asked()[0].endswith(turns[1]) and s.asked()[2].endswith(turns[0])
    assert judged[1] == [two.uid, two.uid, one.uid], "another problem's truth, never the row's own"
    assert "validation/classmate" in s.method.validate([one]), (
        "a problem that is alone helps itself"
    )
    assert judged[-1] == [one.uid] * len(judged[-1])


def test_similar_questions_come_from_the_data(tiny):
    s = made(tiny, FOUR, "method.reward_type=help_other_similar_questions")
    for check in (s.method.check_problems, s.method.check_validation_problems):
        with refused("missing", "paired_similar_q"):
            check(s.problems)
    pairs = [
        dataclasses.replace(p, extra={"paired_similar_q": "9+9=", "paired_similar_q_gt": "81"})
        for p in s.problems
    ]
    s.method.check_problems(pairs)
    s.step = Step(1, ProblemQueue(pairs, shuffle=False))
    s.until_estimate()
    assert all(text.endswith("9+9=") for text in s.asked())


def test_a_served_classmate_of_text_is_refused_for_pictures(tiny):
    s = made(tiny, FOUR, f"method.classmates=['http://host:1/v1?tokenizer={tiny}#mate']")
    s.method.check_problems(s.problems)
    pictured = [dataclasses.replace(s.problems[0], images=(Picture(b""),))]
    for check in (s.method.check_problems, s.method.check_validation_problems):
        with refused("unsupported", tiny, shows="cannot read pictures"):
            check(pictured)


def test_a_continuation_that_cannot_be_judged_leaves_its_row_out(tiny):
    s = made(
        tiny,
        FOUR,
        reply=lambda prompt, seed: [8 if prompt[-2] == 6 else 7, END],
        value=lambda text: None if text == "8" else 1.0,
    )
    batch = s.until_estimate()
    assert batch.rows["cot"] == ["12", "89", "1"] and len(s.step.failed) == 1
    assert s.step.failed[0].rows["failure"] == ["classmate, test: refused"]
    assert s.step.metrics["classmate/failures"] == s.step.metrics["reward/failures"] == 1


def test_minimizing_turns_both_rewards_and_not_answering_does_not_pay(tiny):
    overrides = ("reward.objective=minimize", "method.no_output_score=11")
    s = made(
        tiny, FOUR, *overrides, value=lambda text: -float(len(text))
    )  # the run's own judge turns the sign
    batch = s.until_estimate()
    assert batch.rows["reward"].tolist() == [-2, -1, -11, -1] and batch.rows[
        "reward/classmate"
    ].tolist() == [-1, -1, -11, -1]
    assert batch.tokens["advantages"][: len(batch.response.split()[0])].max() < 0, (
        "the longer output is the worse one"
    )
    with refused("missing", "reward.objective"):
        made(tiny, FOUR, "reward.objective=minimize")


def test_the_gate_counts_by_the_main_reward(tiny):
    for condition, reward in (
        ("no_classmate_when_main_incorrect", 0.0),
        ("neg_classmate_when_main_incorrect", -1.0),
    ):
        s = made(
            tiny,
            FOUR,
            f"method.condition={condition}",
            value=lambda text: 0.0 if text == "34" else 1.0,
        )
        batch = s.until_estimate()
        assert batch.rows["classmate_reward"].tolist() == [reward, 1, 0, 1] and batch.rows[
            "reward/classmate"
        ].tolist() == [
            1,
            1,
            0,
            1,
        ]
        assert s.step.metrics["classmate/gated"] == 0.25


# ---- gradients


def gradients_of(s: Setting, batch: Batch) -> dict[tuple[int, int], list[float]]:
    """d loss / d log-prob of every token by the method's prepare and loss, by group and index."""
    part = s.method.objective.prepare(
        Batch(batch.prompt, batch.response, dict(batch.tokens), dict(batch.rows))
    )
    logprobs = torch.full((part.num_tokens,), -1.0, requires_grad=True)
    from postgrad.model.metrics import MetricAccumulator
    from postgrad.model.port import TokenOutputs

    s.method.objective.loss(
        part,
        TokenOutputs(logprobs, torch.zeros_like(logprobs), torch.zeros_like(logprobs)),
        MetricAccumulator(),
    ).backward()
    assert logprobs.grad is not None
    places = zip(part.rows["group"].tolist(), part.rows["index"].tolist(), strict=True)
    return {
        place: row.tolist()
        for place, row in zip(
            places, logprobs.grad.split(part.response.lengths.tolist()), strict=True
        )
    }


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_classmate_reward_changes_the_tokens_of_the_thought_only(tiny, advantage):
    """Specification 8.7: a = 0 and b = ±1 on two of four tokens of four rows: -1/16 there, else 0.

    gdpo uses z instead of b: over four rows b has standard deviation sqrt(4/3): z = ±sqrt(3/4).
    """
    s = made(
        tiny,
        ["(12)"] * 4,
        f"method.advantage={advantage}",
        "method.aggregation=token-mean",
        value=lambda text: 1.0,
    )
    batch = s.method.enrich(s.batch, s.step)
    keep = batch.tokens["loss_mask"].clone()
    batch = s.method.score(batch, s.step)
    batch.rows["classmate_reward"] = torch.tensor([2.0, 0.0, 2.0, 0.0])
    batch.tokens["loss_mask"] = keep & (batch.response.values != END)
    batch = s.method.estimate(batch, s.step)
    rows = gradients_of(s, batch)
    size = (1 / (math.sqrt(4 / 3) + STD_EPS) if advantage == "classmate_gdpo" else 1.0) / 16
    assert rows[0, 0] == pytest.approx([0, -size, -size, 0, 0])
    if advantage == "classmate_non_neg":
        assert (0, 1) not in rows, "nobody is punished, so nothing is computed"
    else:
        assert rows[0, 1] == pytest.approx([0, size, size, 0, 0])


@pytest.mark.slow
def test_tokens_can_be_restricted(tiny):
    wanted = {
        "cot_only": [0, 1, 1, 0, 0, 0, 0],
        "output_only": [0, 0, 0, 0, 1, 1, 1],
        "all_tokens": [1] * 7,
    }
    for mode, mask in wanted.items():
        batch = made(tiny, FOUR, f"method.main_tokens={mode}").until_estimate()
        assert batch.tokens["loss_mask"][:7].int().tolist() == mask
        assert not batch.tokens["advantages"][~batch.tokens["loss_mask"]].any()
    separated = made(
        tiny, FOUR, "method.classmate_tokens=all", value=lambda text: float(len(text) % 3)
    ).until_estimate()
    assert all(
        len(set(row.tolist())) == 1
        for row in separated.tokens["advantages"].split(separated.response.lengths.tolist())
    )


def test_consistency_is_a_channel_of_its_own_on_the_thought(tiny):
    s = made(
        tiny,
        ["(1)7", "(2)8", "(3)7", "(4)8"],
        "method.consistency_weight=2",
        "method.classmate_weight=0",
    )
    s.scorer.score = lambda problems, texts, *_: [
        Score(float(p.ground_truth == t)) for p, t in zip(problems, texts, strict=True)
    ]
    batch = s.until_estimate()
    assert batch.rows["reward/consistency"].tolist() == [1, 0, 1, 0]
    first = batch.tokens["advantages"].split(batch.response.lengths.tolist())[0]
    assert first.tolist() == pytest.approx([0, 1.0, 0, 0, 0]), (
        "2 times (1 - 1/2), on the thought alone"
    )


def test_consistency_gives_functions_of_trl_the_output_as_truth(tiny):
    """They read the columns of the row, verifiers the field; both are the policy's output."""
    s = made(tiny, ["(1)7", "(2)8", "(3)7", "(4)8"], "method.consistency_weight=2")
    seen: list[tuple[str, str]] = []

    def reward(completions, answer, ground_truth):
        seen.extend(zip(answer, ground_truth, strict=True))
        return [0.0] * len(completions)

    trl = Scorer(PythonObject("test", [Term(1.0, "reward", function=reward)]))

    rows = [{"prompt": "?", "answer": "old"} for _ in s.step.data.problems]
    pairs = zip(s.step.data.problems, rows, strict=True)
    s.step.data.problems = [
        dataclasses.replace(problem, row=row, ground_truth="old") for problem, row in pairs
    ]
    s.scorer.score = trl.score
    s.until_estimate()
    assert seen[:4] == [("old", "old")] * 4
    assert seen[-4:] == [("7", "7"), ("8", "8"), ("7", "7"), ("8", "8")]


@pytest.mark.slow
def test_equal_classmates_make_the_run_the_baseline_s(tiny):
    """Specification 8.12: equal scores in a group give b = 0, the main reward's update."""
    outcomes = []
    for overrides in (
        ("method.advantage=classmate_gdpo_wo_bn",),
        ("method.condition=no_classmate",),
        ("method.classmates=['']",),
    ):
        s = made(
            tiny,
            ["(12)34", "(56)7", "(89)1", "(1)222"],
            *overrides,
            "optimizer.lr=1e-2",
            value=lambda text: float(len(text)),
        )
        s.host.policy.update(s.until_estimate(), 1)
        outcomes.append(flat_weights(s.host.policy))
    assert torch.equal(outcomes[0], outcomes[1]) and torch.equal(outcomes[0], outcomes[2])
    assert not torch.equal(outcomes[0], flat_weights(made(tiny, FOUR).host.policy)), "and it moved"
