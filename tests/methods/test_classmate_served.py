"""A classmate behind `postgrad serve`, found through the mapping file that the server wrote."""

import json

import pytest
from method_runs import SMALL, run
from serve_process import command
from tiny_runs import metrics_without_timing


@pytest.mark.slow
def test_a_run_with_a_served_classmate_is_the_run_with_it_in_this_process(tiny, tmp_path):
    servers, verifier = tmp_path / "servers.json", tmp_path / "mine.py"
    verifier.write_text("def sevens(response, problem):\n    return response.count('7') / 4\n")
    overrides = (
        *SMALL,
        "method.classmate_max_tokens=4",
        "optimizer.lr=5e-3",
        "method.condition=always",
        "method.classmate_temperature=0",
        "method.reward_type=remove_wo_cot",
        f"reward.verifier={verifier}:sevens",
    )
    with command(str(tiny), "--name", "mate", "--servers", str(servers), "--threads", "1"):
        run(
            "classmate",
            tiny,
            tmp_path,
            *overrides,
            f"method.classmates=['{servers}#mate']",
            "name=http",
        )
    assert json.loads(servers.read_text()) == {}, "the server is gone, and so is its entry"
    run("classmate", tiny, tmp_path, *overrides, "method.classmates=['']", "name=here")
    metrics = [metrics_without_timing(tmp_path / name) for name in ("http", "here")]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 2 and metrics[0][0]["grad_norm"] > 0
