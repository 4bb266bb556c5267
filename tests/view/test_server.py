"""The page's server: its responses about folders, and which requests it rejects."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from jsonl import write_jsonl
from tables import tabled
from view_runs import HOSTILE, Server, WrittenRun, batch_of, drawn, metrics_of, serving

from postgrad.types import Ragged
from postgrad.view import metrics as metrics_module
from postgrad.view.folder import Folder, NotFound
from postgrad.view.metrics import Metrics, read_sample
from postgrad.view.runs import Runs
from postgrad.view.server import MAX_COMPARED, Page


def overviews(server: Server) -> dict[str, dict]:
    return {run["name"]: run for run in server.json("/api/runs")["runs"]}


def test_state_of_a_run_is_read_from_its_folder(server):
    runs = overviews(server)
    finished = runs["finished"]
    assert finished["state"] == "finished" and finished["step"] == 20
    assert runs["group/failed"]["state"] == "failed"
    assert "90% could not be judged" in runs["group/failed"]["reason"]
    assert runs["killed/run"]["state"] == "stopped"
    assert "without an event" in runs["killed/run"]["reason"]
    assert finished["last"] == pytest.approx(0.5) and len(finished["sparkline"]) == 20
    assert finished["accuracy"] == pytest.approx(0.6)


def test_a_held_lock_means_running_and_reading_does_not_take_it(runs, server):
    lock = runs / "killed" / "run" / ".lock"
    lock.touch()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert overviews(server)["killed/run"]["state"] == "running"
        old = time.time() - 3600
        for name in ("metrics.jsonl", "events.jsonl", "config.yaml"):
            os.utime(lock.parent / name, (old, old))
        assert "60 min" in overviews(server)["killed/run"]["reason"]
    assert overviews(server)["killed/run"]["state"] == "stopped"


def write_short_run(folder: Path, steps: int, goal: str) -> Path:
    """Write two of the run's steps, and a validation with 0.5."""
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}]
    write_jsonl(folder / "metrics.jsonl", *lines, {"step": 2, "validation/accuracy": 0.5})
    (folder / "config.yaml").write_text(f"training: {{steps: {steps}, stop_at: {goal}}}\n")
    return folder


def test_a_run_without_events_is_finished_at_its_last_step_or_its_goal(tmp_path):
    for name, steps, goal in (("complete", 2, "null"), ("short", 9, "null"), ("goal", 9, "0.5")):
        write_short_run(tmp_path / name, steps, goal)
    states = {run["name"]: (run["state"], run["reason"]) for run in Runs(Folder(tmp_path)).all()}
    assert states["complete"] == ("finished", "")
    assert states["goal"] == ("finished", "reached training.stop_at=0.5")
    assert states["short"][0] == "stopped"


@pytest.mark.parametrize(("steps", "goal"), [(2, "null"), (9, "0.5")])
def test_a_run_killed_before_its_last_checkpoint_is_stopped(tmp_path, steps, goal):
    folder = write_short_run(tmp_path / "run", steps, goal)
    events = [
        {"time": 1.0, "step": 0, "event": "started", "text": ""},
        {"time": 2.0, "step": 1, "event": "checkpoint", "text": "step-1"},
        {"time": 3.0, "step": 2, "event": "checkpoint", "text": "step-2"},
    ]
    states = []
    for number in (1, 2, 3):
        write_jsonl(folder / "events.jsonl", *events[:number])
        states.append(Runs(Folder(tmp_path)).all()[0]["state"])
    assert states == ["stopped", "stopped", "finished"]


def test_broken_files_do_not_break_the_page(server):
    overview = overviews(server)["broken"]
    assert overview["step"] == 2 and overview["method"] == ""
    columns = server.json("/api/metrics?run=broken")["columns"]
    assert columns["step"] == [1, 2]
    assert columns["loss"] == [None, None], "JSON has no NaN and no infinity"
    status, _, body = server.get("/api/groups?run=broken&step=1")
    assert status == 503 and json.loads(body)["error"]


def test_odd_entries_hide_no_run(tmp_path):
    """A link to itself; a folder whose name is no text, which no address can hold."""
    WrittenRun(tmp_path / "run").steps(1)
    (tmp_path / "loop").symlink_to("loop")
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    latin.mkdir()
    (latin / "metrics.jsonl").write_text('{"step": 1}\n')
    assert [run["name"] for run in Runs(Folder(tmp_path)).all()] == ["run"]


def test_infinite_settings_are_shown_as_they_are_typed(tmp_path):
    for name, clip in (("clipped", "null"), ("free", ".inf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"method: {{clip_low: {clip}}}\n")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n')
    with serving(tmp_path) as server:
        comparison = server.json("/api/compare?run=clipped&run=free")
    shown = [settings["method.clip_low"] for settings in comparison["values"].values()]
    assert shown == [None, "inf"], "null means the loss's default"


def test_different_settings_are_listed(server):
    comparison = server.json("/api/compare?run=finished&run=group/failed")
    assert "optimizer.lr" in comparison["different"]
    assert "model.path" not in comparison["different"]
    assert comparison["values"]["finished"]["optimizer.lr"] == 0.001


def test_too_many_runs_are_not_compared_in_part(server):
    query = "&".join(["run=finished"] * (MAX_COMPARED + 1))
    status, _, body = server.get(f"/api/compare?{query}")
    assert status == 400 and str(MAX_COMPARED) in json.loads(body)["error"]


# Metrics


def test_metrics_are_read_incrementally_and_again_if_replaced(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "b": 5}\n{"step": 3, "a"')
    metrics = Metrics(file).refresh()
    assert metrics.num_lines == 2 and metrics.series("a") == ([1.0], [1.0])
    with file.open("a") as opened:
        opened.write(': 7}\n{"step": 4, "a": 8}\n')
    assert json.loads(metrics.refresh().json(2)) == {
        "generation": 0,
        "from": 2,
        "count": 4,
        "columns": {"step": [3, 4], "a": [7, 8], "b": [None, None]},
    }
    other = tmp_path / "new"
    other.write_text('{"step": 1, "a": 1}\n')
    other.rename(file)
    assert metrics.refresh().generation == 1 and metrics.num_lines == 1


def test_metrics_of_a_long_run_stay_bounded_and_keep_validations(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "MAX_LINES", 100)
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": n, "a": n, **({"validation/accuracy": 0.5} if n % 97 == 0 else {})}
        for n in range(1, 5001)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(file).refresh()
    steps, values = metrics.series("a")
    assert metrics.num_lines < 100
    assert steps == values == sorted(steps) and steps[-1] > 4800
    assert metrics.generation > 0


def test_sample_of_a_large_file_has_its_first_and_last_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as opened:
        for n in range(1, 20001):
            line = {"step": n, "time": n, "reward/mean": n / 20000, "filler": "x" * 100}
            opened.write(json.dumps(line) + "\n")
    lines = read_sample(file)
    assert lines[0]["step"] == 1 and lines[-1]["step"] == 20000
    assert 40 <= len(lines) <= 60


# Rollouts


def test_rows_are_filtered_sorted_and_searched(server):
    base = "/api/groups?run=finished&step=4"
    groups = server.json(base)
    assert groups["total"] == 3 and groups["rows"] == 9
    counts = {"all": 9, "correct": 3, "wrong": 5, "truncated": 3, "failed": 1, "given": 3}
    assert groups["counts"] == counts
    wrong = server.json(f"{base}&filter=wrong")["groups"][0]["rows"]
    assert [row["passes"] for row in wrong] == [False, True, True], "the others are still listed"
    assert [g["group"] for g in server.json(f"{base}&sort=longest")["groups"]] == [2, 1, 0]
    assert server.json(f"{base}&search={quote('1 + 4')}")["passing"] == 3
    assert server.json(f"{base}&search=problem-1")["passing"] == 3
    assert server.json(f"{base}&search=nowhere")["total"] == 0


def test_a_group_has_its_tokens_with_all_columns(server):
    group = server.json("/api/group?run=finished&step=4&group=1")
    rows = group["rows"]
    assert len(rows) == 3
    assert group["position"] == [2, 3] and (group["before"], group["after"]) == (0, 2)
    assert group["prompt"]["texts"] == ["so", " the", " answer", " is"]
    assert rows[0]["texts"][:6] == ["so", " the", " answer", " is", " 8", "\n"]
    assert rows[0]["tokens"]["behavior_logprobs"][:2] == [-0.2, -0.4]
    assert rows[1]["tokens"]["advantages"][0] == -0.5
    assert rows[0]["tokens"]["loss_mask"][:3] == [1, 0, 1] and rows[2]["source"] == "demonstration"
    assert rows[0]["parts"] == {"answer": rows[0]["reward"], "format": 0.5}
    assert rows[1]["failure"].startswith("timeout") and rows[1]["reward"] is None
    assert rows[0]["others"]["classmate_continuations"] == ["then 7 it is", "or 8"]


def test_evaluations_are_a_table_of_models_by_sets(server, runs):
    table = server.json("/api/pivot")
    assert table["sets"] == ["sums"]
    rows = {row["model"]: row["values"] for row in table["rows"]}
    assert rows["before"] == [0.25] and rows["after"] == [0.75]
    assert "| after | 75.0% |" in table["markdown"] and "after,0.75" in table["csv"]
    assert server.json("/api/pivot?metric=format")["rows"][0]["values"] == [1.0]


def test_groups_of_one_problem_over_the_run(server):
    for _ in range(50):
        problem = server.json("/api/problem?run=finished&uid=problem-1")
        if problem["indexed"] == problem["steps"]:
            break
    visits = problem["visits"]
    expected = [step for step in range(1, 21) for group in range(3) if (step + group) % 5 == 1]
    assert [visit["step"] for visit in visits] == expected
    assert visits[0]["group"] == 0 and visits[0]["reward"] == pytest.approx(1 / 3, abs=1e-5)


def test_search_over_the_whole_run(server):
    result = server.json(f"/api/search?run=finished&search={quote('2 + 17?')}")
    assert [(hit["step"], hit["group"]) for hit in result["hits"]] == [(17, 2)] * 3
    assert result["next"] is None


def test_without_a_tokenizer_the_ids_are_returned(runs, tmp_path):
    WrittenRun(tmp_path / "bare").steps(1)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with serving(tmp_path) as server:
        row = server.json("/api/group?run=bare&step=1&group=0")["rows"][0]
        assert row["texts"] is None and row["ids"][:3] == [1, 2, 3]
        assert row["text"].startswith("so the")


# Access


@tabled("name")
def test_nothing_outside_the_folder_is_read(runs, server, name, tmp_path_factory):
    outside = tmp_path_factory.getbasetemp() / "outside"
    if not outside.exists():
        WrittenRun(outside).steps(1)
        (runs / "link").symlink_to(outside, target_is_directory=True)
    for path in ("run", "metrics", "groups", "group", "problem", "search"):
        query = f"run={quote(name)}&step=1&group=0&uid=x&search=x"
        status, _, body = server.get(f"/api/{path}?{query}")
        assert status == 404 and json.loads(body) == {"error": "not found"}
    assert server.get(f"/api/live?run={quote(name)}")[0] == 404
    assert server.get(f"/api/responses?eval={quote(name)}&set=sums")[0] == 404
    assert "link" not in overviews(server)


def test_links_out_of_the_folder_are_treated_as_missing(tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "key": 42}\n')
    root = tmp_path / "root"
    written = WrittenRun(root / "run").steps(1)
    files = "metrics.jsonl config.yaml events.jsonl tokenizer.json rollouts/step-000001.parquet"
    for name in files.split():
        (written.folder / name).unlink()
        (written.folder / name).symlink_to(secret)
    with serving(root) as server:
        assert server.get("/api/metrics?run=run")[0] == 404
        assert server.get("/api/groups?run=run&step=1")[0] == 404
        run = server.json("/api/run?run=run")
        assert run["events"] == [] and run["config"] == {} and "42" not in json.dumps(run)
    with pytest.raises(NotFound):
        Folder(root).resolve("run/metrics.jsonl")


def test_only_files_of_the_assets_folder_are_served(server):
    assert server.get("/assets/app.js")[1]["content-type"].startswith("text/javascript")
    for path in ("../server.py", "%2e%2e%2fserver.py", "nothing.js", ""):
        assert server.get(f"/assets/{path}")[0] == 404


def test_other_hosts_origins_sites_and_methods_are_refused(server):
    assert server.get("/api/runs")[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1", "192.168.0.9"):
        assert server.get("/api/runs", Host=host)[0] == 403, host
    for host in ("localhost", f"localhost:{server.port}", "127.0.0.1:99", "[::1]:80"):
        assert server.get("/api/runs", Host=host)[0] == 200, host
    here = f"127.0.0.1:{server.port}"
    assert server.get("/api/runs", Host=here, Origin=f"http://{here}")[0] == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert server.get("/api/runs", Host=here, Origin=origin)[0] == 403, origin
    assert server.get("/api/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert server.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert server.get("/api/runs", method=method)[0] == 405


def test_every_response_has_a_strict_content_security_policy(server):
    for path in ("/", "/assets/app.js", "/api/runs", "/api/run?run=nowhere", "/nothing"):
        _, headers, _ = server.get(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_page_loads_nothing_from_other_hosts_and_parses_no_markup():
    import postgrad.view.server as server_module

    for file in server_module.ASSETS.iterdir():
        text = file.read_text()
        assert "//cdn" not in text and "https://" not in text, file
        writes = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "DOMParser",
        ]
        for word in (*writes, "new Function"):
            assert word not in text, (file.name, word)


def test_a_token_is_needed_beyond_loopback(runs):
    with pytest.raises(ValueError, match="token"), serving(runs, host="0.0.0.0"):
        pass
    with serving(runs, host="0.0.0.0", token="secret-token") as server:
        pages = ("/", "/api/runs", "/assets/app.js")
        for path in (*pages, "/?token=wrong", "/?token=", "/api/runs?token=secret-token"):
            assert server.get(path)[0] == 401, path
        status, headers, _ = server.get("/?token=secret-token")
        assert status == 303 and headers["location"] == "/"
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert server.get("/api/runs", Cookie=cookie.split(";")[0])[0] == 200
        # test_serve_hostile.py has the other ways to send a token, which are the same code.
        key = {"Authorization": "Bearer secret-token"}
        name = "gpu1.cluster.example:8765"
        assert server.get("/api/runs", Host=name)[0] == 401
        assert server.get("/?token=secret-token", Host=name)[0] == 303
        assert server.get("/api/runs", Host=name, **key)[0] == 200


@pytest.mark.parametrize("query", ["step=x", "step=", "step=1&filter=odd", "step=1&sort=odd", ""])
def test_bad_parameters_get_an_error_message(server, query):
    status, _, body = server.get(f"/api/groups?run=finished&{query}")
    assert status == 400 and json.loads(body)["error"]


PARAMETERS = ["run", "step", "start", "group", "full", "uid", "search", "filter", "sort"]
PARAMETERS += ["eval", "set", "metric", "a", "b", "folder", "key"]
WRONG = ("", "..", "../..", "/etc/passwd", "-1", "1e9", "9" * 400, "nan", "\0", "\ud800", "x" * 999)


@pytest.mark.parametrize("given", [{}, {"run": "finished"}, {"run": "finished", "step": "1"}])
def test_every_request_with_hostile_parameters_gets_json_and_no_server_error(runs, server, given):
    for name in Page(Folder(runs)).requests():
        for value in WRONG:
            query = urlencode(dict.fromkeys(PARAMETERS, value) | given, errors="surrogatepass")
            status, _, body = server.get(f"/api/{name}?{query}")
            assert status in (200, 400, 404), (name, value, body)
            assert isinstance(json.loads(body), dict), (name, value, body)


@pytest.mark.slow
def test_live_stream_sends_new_lines(runs, tmp_path):
    import http.client

    written = WrittenRun(tmp_path / "live").steps(2)
    with serving(tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        connection.request("GET", "/api/live?run=live&from=2&generation=0")
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = [answer.readline() for _ in range(3)]
        assert first[0] == b"event: status\n" and json.loads(first[1][6:])["steps"] == [1, 2]
        written.step()
        while (line := answer.readline()) != b"event: metrics\n":
            assert line.startswith((b":", b"\n", b"event: status", b"data: "))
        message = json.loads(answer.readline()[6:])
        assert message["from"] == 2 and message["columns"]["step"] == [3]
        connection.close()


def test_hostile_text_is_only_data_in_responses(server):
    _, headers, body = server.get("/api/group?run=hostile&step=1&group=0")
    assert headers["content-type"] == "application/json" and HOSTILE in json.loads(body)["question"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_it_without_output(runs, number):
    words = ["view", str(runs), "--no-browser", "--port", "0"]
    command = [sys.executable, "-m", "postgrad.cli.main", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = [process.stdout.readline() for _ in range(3)][1].strip()
    urllib.request.urlopen(address, timeout=600).close()  # it listens before it prints this
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0 and err == ""


def test_pictures_of_a_run_are_stored_once_and_served_as_what_they_are(tmp_path):
    red, blue = drawn("red"), drawn("blue")
    written = WrittenRun(tmp_path / "seen")
    for number in (1, 2):
        batch = batch_of(number, pictures=((red,), (red, blue), ()))
        batch.prompt = Ragged.of([[1, *[3] * 20, 2]] * len(batch))
        written.log.write_rollouts(number, [batch])
        written.log.write(number, metrics_of(number))
    names = sorted(file.name for file in (tmp_path / "seen" / "pictures").iterdir())
    assert names == sorted(f"{picture.key}.png" for picture in (red, blue))
    with serving(tmp_path) as server:
        group = server.json("/api/group?run=seen&step=1&group=1")
        assert group["images"] == [red.key, blue.key]
        assert group["prompt"]["texts"] == ["so", " answer × 20", " the"]
        assert all("images" not in row["others"] for row in group["rows"])
        status, headers, body = server.get(f"/api/picture?folder=seen&key={red.key}")
        assert (status, headers["content-type"], body) == (200, "image/png", red.data)
        assert headers["x-content-type-options"] == "nosniff"
        assert server.json("/api/group?run=seen&step=1&group=2")["images"] == []


def test_hostile_pictures_are_not_served(tmp_path):
    folder = WrittenRun(tmp_path / "hostile").steps(1).folder / "pictures"
    folder.mkdir()
    (tmp_path.parent / "secret.png").write_bytes(drawn("red").data)
    script = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    keys = [f"{number:016x}" for number in range(5)]
    (folder / f"{keys[0]}.png").write_bytes(script)
    (folder / f"{keys[1]}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + script)
    (folder / f"{keys[2]}.png").symlink_to(tmp_path.parent / "secret.png")
    os.mkfifo(folder / f"{keys[3]}.png")
    (folder / f"{keys[4]}.png").write_bytes(drawn("red").data)  # not what its name says
    with serving(tmp_path) as server:
        for key in (*keys, "../../config", "f" * 16, ""):
            status, headers, _ = server.get(f"/api/picture?folder=hostile&key={quote(key)}")
            assert status in (400, 404) and headers["content-type"] == "application/json"
