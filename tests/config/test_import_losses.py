"""`postgrad import`: policy losses with their options, corrections and schedules."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
BY_ROW = {"method.aggregation": "seq-mean-token-mean"}
VERL_CLIP = {"method.clip_low": "0.2", "method.clip_high": "0.2"}


def of_verl(loss: str, **settings: str):
    """The translation of a GRPO script of verl with this loss and these settings of its actor."""
    return translate(
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            f"{ACTOR}.policy_loss.loss_mode": loss,
            **{f"{ACTOR}.{key}": value for key, value in settings.items()},
        },
    )


@pytest.mark.parametrize(
    ("loss", "settings", "overrides"),
    [
        # verl's bounds are 0.2 for all losses; ours are those of the papers.
        ("gspo", {}, VERL_CLIP | BY_ROW),
        ("geo_mean", {}, VERL_CLIP | BY_ROW),
        ("cispo", {}, VERL_CLIP),
        ("cispo", {"clip_ratio_low": "10"}, VERL_CLIP | {"method.clip_low": "10"}),
        ("clip_cov", {}, VERL_CLIP),
        ("dppo_tv", {}, VERL_CLIP | {"method.loss_options.max_ratio": "3.0"}),
        ("dppo_kl", {"clip_ratio_c": "20"}, VERL_CLIP | {"method.loss_options.max_ratio": "20"}),
        # They read neither clip nor dual clip.
        ("gpg", {"clip_ratio_low": "0.1", "clip_ratio_c": "5"}, {}),
        ("sapo", {"clip_ratio_high": "0.1"}, BY_ROW),
    ],
)
def test_losses_of_verl_have_its_bounds_and_aggregation(loss, settings, overrides):
    result = of_verl(loss, **settings)
    assert result.overrides == {"method.loss": loss} | overrides
    assert result.missing == []


@pytest.mark.parametrize(
    ("loss", "settings", "options"),
    [
        ("sapo", {"tau_pos": "2.0", "tau_neg": "3.0"}, {"positive": "2.0", "negative": "3.0"}),
        (
            "clip_cov",
            {"policy_loss.clip_cov_ratio": "0.1", "policy_loss.clip_cov_ub": "7"},
            {"cov_share": "0.1", "cov_high": "7"},
        ),
        (
            "kl_cov",
            {"policy_loss.kl_cov_ratio": "0.1", "policy_loss.ppo_kl_coef": "0.5"},
            {"cov_share": "0.1", "coefficient": "0.5"},
        ),
        ("dro", {"policy_loss.dro_beta": "0.3"}, {"beta": "0.3"}),
        # verl's files list the options of all losses.
        ("gpg", {"policy_loss.dro_beta": "null", "tau_pos": "1.0"}, {}),
    ],
)
def test_options_of_losses_of_verl(loss, settings, options):
    result = of_verl(loss, **settings)
    prefix = "method.loss_options."
    found = {k.removeprefix(prefix): v for k, v in result.overrides.items() if prefix in k}
    assert {key.removeprefix("temperature_"): value for key, value in found.items()} == options
    assert result.missing == []


def test_an_aggregation_that_verl_ignores_is_listed():
    result = of_verl("gspo", loss_agg_mode="token-mean")
    assert result.overrides["method.aggregation"] == "seq-mean-token-mean"
    assert [line.partition(":")[0] for line in result.missing] == ["loss_agg_mode=token-mean"]


def test_a_clip_ratio_that_verl_does_not_read_is_listed():
    result = of_verl("vanilla", clip_ratio="0.3")
    assert result.overrides["method.clip_high"] == "0.3"
    assert len(result.missing) == 1
    both = of_verl("vanilla", clip_ratio="0.3", clip_ratio_low="0.3", clip_ratio_high="0.3")
    assert both.missing == []


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        # In any order of the settings; 2.0 is verl's bound.
        (
            {"rollout_is_threshold": "0.5_5.0", "rollout_is": "token"},
            {"correction": "token", "correction_bound": "0.5_5.0"},
        ),
        (
            {"rollout_is": "sequence", "rollout_is_batch_normalize": "True"},
            {
                "correction": "sequence",
                "correction_bound": "2.0",
                "correction_normalize": "true",
            },
        ),
        # verl compares 1 / rho: 0.5 <= 1 / rho <= 4 is 0.25 <= rho <= 2.
        (
            {"rollout_rs": "seq_mean_k1,token_k2", "rollout_rs_threshold": "0.5_4.0,0.1"},
            {
                "correction": "rejection",
                "rejection.seq_mean_k1": "0.25_2.0",
                "rejection.token_k2": "0.1",
            },
        ),
        (
            {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "2.0"},
            {"correction": "token", "correction_bound": "2.0", "rejection.token_k1": "2.0"},
        ),
        # Bypass has no weights.
        (
            {"bypass_mode": "True", "rollout_is": "token", "loss_type": "ppo_clip"},
            {"correction": "bypass"},
        ),
        ({"rollout_is": "null", "rollout_is_threshold": "2.0", "rollout_rs": "null"}, {}),
    ],
)
def test_corrections_of_verl(settings, overrides):
    settings = {f"{CORRECTION}.{key}": value for key, value in settings.items()}
    result = translate("verl", settings | {"algorithm.adv_estimator": "grpo"})
    assert result.overrides == {f"method.{key}": value for key, value in overrides.items()}
    assert result.missing == []


def test_what_verl_corrects_otherwise_is_listed():
    settings = {"bypass_mode": "True", "loss_type": "reinforce", "rollout_rs": "token_k1"}
    settings = {f"{CORRECTION}.{key}": value for key, value in settings.items()}
    result = translate("verl", settings)
    assert [line.partition("=")[0] for line in result.missing] == [
        f"{CORRECTION}.loss_type",
        f"{CORRECTION}.rollout_rs",
    ]
    wrong = {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "a_b"}
    assert len(translate("verl", wrong).missing) == 1


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        # TRL's epsilon is 0.2 for all losses.
        (
            "importance_sampling_level='sequence'",
            {"loss": "gspo", "clip_low": "0.2", "clip_high": "0.2"},
        ),
        (
            "importance_sampling_level='sequence', loss_type='grpo', epsilon=3e-4, "
            "epsilon_high=4e-4",
            {
                "loss": "gspo",
                "aggregation": "seq-mean-token-mean",
                "clip_low": "0.0003",
                "clip_high": "0.0004",
            },
        ),
        ("epsilon_high=0.28, epsilon=0.1", {"clip_low": "0.1", "clip_high": "0.28"}),
        ("delta=4.0", {"dual_clip": "4.0"}),
        # TRL's bound is the weight itself.
        (
            "loss_type='cispo', epsilon_high=5.0, epsilon=0.1",
            {"loss": "cispo", "aggregation": "token-mean", "clip_high": "4"},
        ),
        (
            "loss_type='sapo', sapo_temperature_neg=1.2, epsilon=0.1",
            {
                "loss": "sapo",
                "aggregation": "seq-mean-token-mean",
                "loss_options.temperature_negative": "1.2",
            },
        ),
        (
            "loss_type='luspo', importance_sampling_level='sequence', epsilon=2e-3",
            {
                "loss": "gspo",
                "aggregation": "seq-mean-token-sum",
                "clip_low": "0.002",
                "clip_high": "0.002",
            },
        ),
        ("scale_rewards='batch'", {"advantage": "lite_ppo"}),
        ("off_policy_mask_threshold=0.5", {"sequence_mask": "0.5"}),
        ("top_entropy_quantile=0.2", {"top_entropy": "0.2"}),
        ("entropy_coef=0.01", {"entropy_coef": "0.01"}),
        (
            "beta=0.1, use_bias_correction_kl=False",
            {"kl": "loss", "kl_coef": "0.1"},
        ),
        ("beta=0.0, use_bias_correction_kl=True", {}),
    ],
)
def test_losses_of_trl(arguments, overrides, tmp_path, capsys):
    script = f"GRPOConfig({arguments})"
    result = translate(*read_settings(script))
    assert result.overrides == {f"method.{key}": value for key, value in overrides.items()}
    assert result.missing == []
    file = tmp_path / "run.py"
    file.write_text(script)
    assert main(["import", str(file)]) == 0
    out = capsys.readouterr().out
    assert "needs a change" not in out, out


@pytest.mark.parametrize(
    "script",
    [
        "GRPOConfig(loss_type='cispo', importance_sampling_level='sequence', epsilon_high=5.0)",
        "GRPOConfig(loss_type='cispo')",  # weights of at most 0.2
        "GRPOConfig(loss_type='new')",
        "GRPOConfig(importance_sampling_level='sequence', delta=4.0)",
        "GRPOConfig(vllm_importance_sampling_mode='token_truncate')",
        "RLOOConfig(num_iterations=2, epsilon=0.1)",
    ],
)
def test_what_trl_does_otherwise_is_listed(script):
    assert len(translate(*read_settings(script)).missing) == 1


def test_the_clip_of_rloo_acts_on_later_updates_only():
    assert translate(*read_settings("RLOOConfig(epsilon=0.1)")).overrides == {}


@pytest.mark.parametrize(
    ("arguments", "overrides", "lines"),
    [
        ("lr_scheduler_type='constant', warmup_ratio=0.1", {"warmup_steps": "0"}, ["warmup_ratio"]),
        ("lr_scheduler_type='constant'", {"warmup_steps": "0"}, []),
        ("lr_scheduler_type='constant_with_warmup', warmup_steps=5", {"warmup_steps": "5"}, []),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}",
            {"final_lr_ratio": "0.1"},
            [],
        ),
        (
            "lr_scheduler_type='warmup_stable_decay', lr_scheduler_kwargs={'num_decay_steps': 9}",
            {},
            ["lr_scheduler_type", "lr_scheduler_kwargs"],
        ),
        ("weight_decay=0.1", {"weight_decay": "0.1"}, ["weight_decay"]),
        ("weight_decay=0.0", {"weight_decay": "0.0"}, []),
    ],
)
def test_schedules_of_transformers(arguments, overrides, lines):
    result = translate(*read_settings(f"GRPOConfig({arguments})"))
    found = {key: value for key, value in result.overrides.items() if key != "optimizer.schedule"}
    assert found == {f"optimizer.{key}": value for key, value in overrides.items()}
    assert [line.partition("=")[0] for line in result.missing] == lines
