"""`postgrad doctor --fit` shows which passes and which decoding a model gets, and why."""

import pytest
from families import make_family
from tiny_runs import config_of

from postgrad.doctor.paths import describe_paths
from postgrad.doctor.report import Report

# model type -> training passes and decoding on a CPU
EXPECTED = {
    "gemma3_text": ("packed", "native, contiguous cache"),
    "gpt_oss": ("shared", "native, contiguous cache"),
    "lfm2": ("rows", "transformers' generate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXPECTED)
def test_the_report_names_the_passes_and_the_decoding(model_type, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    report = Report()
    describe_paths(report, config_of("grpo", tiny), make_family(model_type).config, samples=True)
    rows = dict(row for row in report.rows if row[0])
    assert (rows["passes"], rows["decoding"]) == EXPECTED[model_type]
    reasons = [value for name, value in report.rows if not name]
    assert bool(reasons) == (rows["passes"] != "packed")


def test_a_run_that_does_not_sample_has_no_decoding(tiny):
    report = Report()
    describe_paths(report, config_of("grpo", tiny), make_family("llama").config, samples=False)
    assert [name for name, _ in report.rows] == ["passes"]
