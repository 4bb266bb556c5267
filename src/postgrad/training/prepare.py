"""Checks and loads everything that a run needs. Writes nothing and changes no argument."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from postgrad import phases
from postgrad.config.schema import Config
from postgrad.data.problem_queue import Cursor
from postgrad.data.problems import Report, load_problems
from postgrad.data.sets import find_test_set_evidence, split_sets
from postgrad.errors import Conflict, Missing, TooLarge, UnknownName, did_you_mean
from postgrad.methods import find_method
from postgrad.methods.method import Method
from postgrad.model.load.context import context_length
from postgrad.model.load.load import load_tokenizer, model_config
from postgrad.rollout.served_path import is_served
from postgrad.rollout.turns import TurnRunner
from postgrad.training.resolve import resolve
from postgrad.training.run import resume_config
from postgrad.types import Problem

if TYPE_CHECKING:
    from postgrad.data.encode.encoder import Encoder
    from postgrad.environments.lookup import Environments
    from postgrad.sizing.devices import Device
    from postgrad.training.players import Players
    from postgrad.verifiers.scorer import Scorer

MEAN = "mean"  # training.keep_best=mean: the mean of all sets
TRAIN = "data.train"  # what lines call the training problems


@dataclass
class Prepared:
    """A run that may start: its settings without anything automatic, its method, its data."""

    config: Config
    method: Method
    train: list[Problem]
    validation: dict[str, list[Problem]]  # sets by name
    encoder: "Encoder"
    scorer: "Scorer"
    turns: TurnRunner | None  # None without tools, environment and agent
    notes: list[str]  # lines about the data that the start of a run reports

    @property
    def held_out(self) -> list[Problem]:
        """The problems of all validation sets."""
        return [problem for problems in self.validation.values() for problem in problems]


def prepare(config: Config, planned: "Device | None" = None) -> Prepared:
    """Return the run of these settings, checked and loaded. Raises ConfigError.

    `planned`: the run is only estimated, for this GPU, which this machine need not have.
    """
    given = find_method(config.method.name)(config)
    given.check()
    config = resolve(resume_config(config), given, planned)
    method = type(given)(config)
    if config.track:
        from postgrad.training.trackers import check_tracker

        check_tracker(config)
    notes: list[str] = []
    train = load_problems(config.data.train, notes.append)
    validation = load_sets(config, notes.append)
    tokenizer = load_tokenizer(config.model, config.seed)
    from postgrad.data.encode.encoder import make_encoder
    from postgrad.training.players import open_players

    players = open_players(config, partial(make_encoder, tokenizer, config.data))
    scorer = _make_scorer(config, players)
    run = Prepared(config, method, train, validation, players.encoder, scorer, players.turns, notes)
    phases.begin(f"encoding the prompts of {len(train):,} problems")
    too_long = _leave_out_overlong(run)
    Cursor(len(run.train)).take(config.training.problems_per_step)  # raises if there are too few
    if config.training.epochs:
        num_problems = config.training.epochs * len(run.train)
        config.training.steps = max(1, int(num_problems / config.training.problems_per_step))
    method.check_problems(run.train)
    method.check_validation_problems(run.held_out)
    _check_tokenizers(config, method, tokenizer)
    _check_lengths(run, has_agents=players.agents is not None)
    _check_scores(run, players.environments)
    run.notes += [*too_long, *_notes(run)]
    return run


def _notes(run: Prepared) -> list[str]:
    """Return lines about the data. Raises ConfigError if the method's data are missing."""
    method = run.method
    notes = method.data_notes(run.encoder, run.train)
    if supply := method.supply(run.encoder, run.train):
        if not supply.num:
            raise Missing(f"{supply.line}; {supply.fix}", at="data.train")
        notes.append(supply.line)
    if run.encoder.is_plain_by_default and run.config.model.path != "tiny":
        notes.append(
            "the tokenizer has no chat template, so prompts are plain text (data.template=plain)"
        )
    if method.needs_verifier():
        notes += run.scorer.notes(run.train)
        notes += run.scorer.truth_notes(_scored_sets(run))
    return notes


def load_sets(config: Config, report: Report | None = None) -> dict[str, list[Problem]]:
    """Return the sets of data.validation by name, each cut to training.validation_problems.

    `report` takes a line per set about its columns.

    Raises ConfigError if training.keep_best names no set, or a set that looks like a test set.
    """
    sources = split_sets(config.data.validation) if config.data.validation else {}
    sets: dict[str, list[Problem]] = {}
    for name, source in sources.items():
        sets[name] = load_problems(source, report)[: config.training.validation_problems or None]
    if config.training.keep_best:
        _check_keep_best(config, sources, sets)
    return sets


def _check_keep_best(
    config: Config, sources: Mapping[str, str], sets: Mapping[str, list[Problem]]
) -> None:
    best = config.training.keep_best
    if not sets or not config.training.validate_every:
        missing = "data.validation=FILE" if not sets else "training.validate_every=N"
        raise Missing(f"training.keep_best={best} chooses among validations; add {missing}")
    if best != MEAN and best not in sets:
        hint = did_you_mean(best, [*sets, MEAN])
        raise UnknownName(f"training.keep_best={best} is not a validation set; {hint}")
    for name in sets if best == MEAN else [best]:
        if evidence := find_test_set_evidence(sources[name], sets[name]):
            raise Conflict(
                f"training.keep_best={best}: {evidence}; the score on a test set is biased if it "
                "chose the checkpoint; choose by problems held out from the training data"
            )


def _make_scorer(config: Config, players: "Players") -> "Scorer":
    """Return the scorer of reward.*."""
    from postgrad.methods.support.judging import check_judge
    from postgrad.verifiers.scorer import Scorer

    reward = config.reward
    verifier = players.verifier(reward.verifier)
    check_judge(reward)
    return Scorer(verifier, reward.timeout_s, reward.workers, reward.objective == "minimize")


# ---- what is checked


def _leave_out_overlong(run: Prepared) -> list[str]:
    """Leave out problems whose prompt or demonstrations do not fit; return a note about them.

    Raises ConfigError for them unless data.overlong says what to do.
    """
    data = run.config.data
    learns_from_data = run.method.traits.demonstrations
    response_limit = run.config.rollout.max_response_tokens if learns_from_data else None
    encode = partial(run.method.encode_row, run.encoder)
    counts: list[str] = []

    def fitting(label: str, loaded: list[Problem]) -> list[Problem]:
        problems, num_truncated = run.encoder.fit(loaded, encode, response_limit)
        count = len(loaded) - len(problems) or num_truncated
        if count:
            counts.append(f"{count} of {len(loaded)} in {label}")
        return problems

    run.train = fitting(TRAIN, run.train)
    for name, problems in run.validation.items():
        run.validation[name] = fitting(_set_label(name), problems)
    if not counts:
        return []
    cut = f"cut to data.max_prompt_tokens={data.max_prompt_tokens}"
    action = "left out" if data.overlong == "drop" else cut
    return [f"too long: {', '.join(counts)}; {action} (data.overlong={data.overlong})"]


def _check_tokenizers(config: Config, method: Method, tokenizer: Any) -> None:
    """Refuse a frozen model with other ids of tokens than the policy's.

    Its log-probs would be those of other texts. One of the two may have further tokens.
    """
    ids = tokenizer.get_vocab()
    for name, role in method.roles().items():
        if role.kind != "frozen" or role.path in ("", config.model.path) or is_served(role.path):
            continue
        settings = dataclasses.replace(config.model, path=role.path)
        other = load_tokenizer(settings, config.seed).get_vocab()
        if any(other.get(token, number) != number for token, number in ids.items()):
            raise Conflict(
                f"the model {name} ({role.path}) has another tokenizer than "
                f"model.path={config.model.path}, so it gives no log-probs of the policy's tokens",
                at="model.path",
            )


def _check_lengths(run: Prepared, has_agents: bool) -> None:
    """Raise ConfigError if a prompt and its response may exceed the model's context."""
    config = run.config
    traits = run.method.traits
    limit = config.rollout.max_response_tokens
    lengths: list[tuple[int, int]] = []  # (prompt, response)
    for problem in [*run.train, *run.held_out]:
        row = run.method.encode_row(run.encoder, problem)
        lengths.append((len(row.prompt), len(row.response) if traits.demonstrations else limit))
    if traits.mixes_rows:  # a prompt is also read with the responses of other rows
        prompts, responses = zip(*lengths, strict=True)
        lengths = [(max(prompts), max(responses))]
    if run.method.needs_verifier():  # validation samples responses
        lengths += [(len(run.encoder.prompt(problem)), limit) for problem in run.held_out]
    if has_agents:  # they write their own prompts
        lengths.append((config.data.max_prompt_tokens, limit))
    prompt, response = max(lengths, key=sum)
    context = context_length(model_config(config.model, config.seed))
    if prompt + response > context:
        may_drop = traits.demonstrations and config.data.overlong != "drop"
        drop = "; with data.overlong=drop longer rows are left out" if may_drop else ""
        raise TooLarge(
            f"a prompt of {prompt} tokens and a response of {response} exceed the model's context "
            f"of {context}; lower rollout.max_response_tokens or data.max_prompt_tokens{drop}",
            at="rollout.max_response_tokens",
        )


def _check_scores(run: Prepared, environments: "Environments | None") -> None:
    """Raise ConfigError for problems that the environments or the verifier cannot take.

    Also for a part of the score that the method reads and the verifier does not report.
    """
    method = run.method
    problems = [*run.train, *run.held_out]
    if environments is not None:
        for problem in problems:
            environments.choose(problem)
    if not method.needs_verifier():
        return
    from postgrad.methods.support.judging import check_references

    run.scorer.check(problems, method.keeps_token_ids())
    check_references(run.config.reward, problems)
    for label, scored in _scored_sets(run).items():
        run.scorer.check_fit(scored, label)
    if method.scores_training_rows() and (parts := method.reward_parts()):
        run.scorer.check_parts(run.train, parts)


def _scored_sets(run: Prepared) -> dict[str, list[Problem]]:
    """Return the sets whose responses the run scores, by the names that lines give them."""
    sets = {TRAIN: run.train} if run.method.scores_training_rows() else {}
    return sets | {_set_label(name): problems for name, problems in run.validation.items()}


def _set_label(name: str) -> str:
    """Return what lines call a validation set."""
    return f"validation set {name}"
