"""The page's server: what it says of folders, and whom it lets in."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from view_world import HOSTILE, Server, Written, serving

from postgrad.view import metrics as metrics_module
from postgrad.view.folder import Folder, NotFound
from postgrad.view.metrics import Metrics, glance
from postgrad.view.runs import Runs


def overviews(server: Server) -> dict[str, dict]:
    return {run["name"]: run for run in server.json("/api/runs")["runs"]}


def test_every_end_of_a_run_is_told_from_its_folder(server):
    found = overviews(server)
    assert found["finished"]["state"] == "finished" and found["finished"]["step"] == 20
    assert (
        found["group/failed"]["state"] == "failed"
        and "90% could not be judged" in found["group/failed"]["why"]
    )
    assert (
        found["killed/run"]["state"] == "stopped" and "without a word" in found["killed/run"]["why"]
    )
    assert (
        found["finished"]["last"] == pytest.approx(0.5)
        and len(found["finished"]["sparkline"]) == 20
    )
    assert found["finished"]["accuracy"] == pytest.approx(0.6)


def test_a_held_lock_means_running_and_looking_does_not_take_it(runs, server):
    lock = runs / "killed" / "run" / ".lock"
    lock.touch()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert overviews(server)["killed/run"]["state"] == "running"
        old = time.time() - 3600
        for name in ("metrics.jsonl", "events.jsonl", "config.yaml"):
            os.utime(lock.parent / name, (old, old))
        assert "no news for 60 min" in overviews(server)["killed/run"]["why"]
    assert overviews(server)["killed/run"]["state"] == "stopped"


def test_a_run_without_events_is_finished_when_its_last_step_or_its_goal_is_there(tmp_path):
    for name, steps, goal in (("whole", 2, "null"), ("short", 9, "null"), ("goal", 9, "0.5")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"training: {{steps: {steps}, stop_at: {goal}}}\n")
        lines = [
            {"step": 1, "loss": 1.0},
            {"step": 2, "loss": 1.0},
            {"step": 2, "validation/accuracy": 0.5},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    states = {run["name"]: (run["state"], run["why"]) for run in Runs(Folder(tmp_path)).all()}
    assert states["whole"] == ("finished", "") and states["goal"] == (
        "finished",
        "reached training.stop_at=0.5",
    )
    assert states["short"][0] == "stopped"


def test_broken_files_are_shown_for_what_they_are(server):
    found = overviews(server)["broken"]
    assert found["step"] == 2 and found["method"] == ""
    columns = server.json("/api/metrics?run=broken")["columns"]
    assert columns["step"] == [1, 2] and columns["loss"] == [None, None], (
        "NaN and infinity are no JSON"
    )
    status, _, body = server.get("/api/groups?run=broken&step=1")
    assert status == 503 and "could not be read" in json.loads(body)["error"]


def test_settings_that_differ_are_named(server):
    found = server.json("/api/compare?run=finished&run=group/failed")
    assert "optimizer.lr" in found["different"] and "model.path" not in found["different"]
    assert found["values"]["finished"]["optimizer.lr"] == 0.001


# ---- metrics


def test_metrics_are_read_on_from_where_they_ended_and_anew_when_replaced(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "b": 5}\n{"step": 3, "a"')
    metrics = Metrics(file).refresh()
    assert metrics.num_lines == 2 and metrics.series("a") == ([1.0], [1.0])
    with file.open("a") as opened:
        opened.write(': 7}\n{"step": 4, "a": 8}\n')
    assert json.loads(metrics.refresh().json(2)) == {
        "generation": 0, "from": 2, "count": 4, "columns": {"step": [3, 4], "a": [7, 8], "b": [None, None]},
    }  # fmt: skip
    other = tmp_path / "new"
    other.write_text('{"step": 1, "a": 1}\n')
    other.rename(file)
    assert metrics.refresh().generation == 1 and metrics.num_lines == 1


def test_metrics_of_an_endless_run_stay_bounded_and_keep_validations(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "MOST_LINES", 100)
    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": n, "a": n, **({"validation/accuracy": 0.5} if n % 97 == 0 else {})}
        for n in range(1, 5001)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(file).refresh()
    steps, values = metrics.series("a")
    assert (
        metrics.num_lines < 100 and steps == values and steps[-1] > 4800 and steps == sorted(steps)
    )
    assert metrics.generation > 0


def test_a_glance_at_a_large_file_reads_little_of_it_and_has_its_ends(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as opened:
        for n in range(1, 20001):
            opened.write(
                json.dumps({"step": n, "time": n, "reward/mean": n / 20000, "filler": "x" * 100})
                + "\n"
            )
    seen = glance(file)
    assert seen[0]["step"] == 1 and seen[-1]["step"] == 20000 and 40 <= len(seen) <= 60


# ---- rollouts


def test_rows_are_filtered_sorted_and_searched(server):
    base = "/api/groups?run=finished&step=4"
    found = server.json(base)
    assert found["total"] == 3 and found["rows"] == 9
    assert found["counts"] == {
        "all": 9,
        "right": 3,
        "wrong": 5,
        "truncated": 3,
        "failed": 1,
        "given": 3,
    }
    wrong = server.json(f"{base}&keep=wrong")["groups"][0]["rows"]
    assert [row["passes"] for row in wrong] == [False, True, True], (
        "the others of the group stay in sight"
    )
    assert [g["group"] for g in server.json(f"{base}&sort=longest")["groups"]] == [2, 1, 0]
    assert server.json(f"{base}&search={quote('1 + 4')}")["passing"] == 3
    assert server.json(f"{base}&search=problem-1")["passing"] == 3
    assert server.json(f"{base}&search=nowhere")["total"] == 0


def test_a_group_has_its_tokens_with_every_column(server):
    found = server.json("/api/group?run=finished&step=4&group=1")
    rows = found["rows"]
    assert (
        len(rows) == 3
        and found["position"] == [2, 3]
        and (found["before"], found["after"]) == (0, 2)
    )
    assert found["prompt"]["texts"] == ["so", " the", " answer", " is"]
    assert rows[0]["texts"][:6] == ["so", " the", " answer", " is", " 8", "\n"]
    assert (
        rows[0]["tokens"]["behavior_logprobs"][:2] == [-0.2, -0.4]
        and rows[1]["tokens"]["advantages"][0] == -0.5
    )
    assert rows[0]["tokens"]["loss_mask"][:3] == [1, 0, 1] and rows[2]["source"] == "demonstration"
    assert rows[0]["parts"] == {
        "answer": None if rows[0]["reward"] is None else rows[0]["reward"],
        "format": 0.5,
    }
    assert rows[1]["failure"].startswith("timeout") and rows[1]["reward"] is None
    assert rows[0]["others"]["classmate_continuations"] == ["then 7 it is", "or 8"]


def test_one_problem_is_followed_over_the_run(server):
    for _ in range(50):
        found = server.json("/api/follow?run=finished&uid=problem-1")
        if found["looked"] == found["steps"]:
            break
    assert [visit["step"] for visit in found["visits"]] == [
        s for s in range(1, 21) for g in range(3) if (s + g) % 5 == 1
    ]
    assert found["visits"][0]["group"] == 0 and found["visits"][0]["reward"] == pytest.approx(
        1 / 3, abs=1e-5
    )


def test_words_are_found_anywhere_in_the_run(server):
    found = server.json(f"/api/search?run=finished&words={quote('2 + 17?')}")
    assert [(hit["step"], hit["group"]) for hit in found["hits"]] == [(17, 2)] * 3 and found[
        "next"
    ] is None


def test_without_a_tokenizer_the_ids_are_given(runs, tmp_path):
    Written(tmp_path / "bare").steps(1)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with serving(tmp_path) as server:
        row = server.json("/api/group?run=bare&step=1&group=0")["rows"][0]
        assert (
            row["texts"] is None
            and row["ids"][:3] == [1, 2, 3]
            and row["text"].startswith("so the")
        )


# ---- who is let in, and how far


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../x",
        "/etc",
        "finished/../../etc",
        "nowhere",
        "finished/..",
        "~root",
        "a\0b",
        "finished\\..\\x",
        "link",
        "%2e%2e",
        ".",
    ],
)
def test_nothing_outside_is_read(runs, server, name, tmp_path_factory):
    outside = tmp_path_factory.getbasetemp() / "outside"
    if not outside.exists():
        Written(outside).steps(1)
        (runs / "link").symlink_to(outside, target_is_directory=True)
    for path in ("run", "metrics", "groups", "group", "follow", "search"):
        status, _, body = server.get(f"/api/{path}?run={quote(name)}&step=1&group=0&uid=x&words=x")
        assert status == 404 and json.loads(body) == {"error": "not found"}
    assert server.get(f"/api/live?run={quote(name)}")[0] == 404
    assert server.get(f"/api/responses?eval={quote(name)}&set=sums")[0] == 404
    assert "link" not in overviews(server)


def test_files_of_a_run_that_are_links_to_elsewhere_are_not_there(tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "key": 42}\n')
    root = tmp_path / "root"
    run = Written(root / "run").steps(1)
    for name in (
        "metrics.jsonl",
        "config.yaml",
        "events.jsonl",
        "tokenizer.json",
        "rollouts/step-000001.parquet",
    ):
        (run.folder / name).unlink()
        (run.folder / name).symlink_to(secret)
    with serving(root) as server:
        assert server.get("/api/metrics?run=run")[0] == 404
        assert server.get("/api/groups?run=run&step=1")[0] == 404
        found = server.json("/api/run?run=run")
        assert found["events"] == [] and found["config"] == {} and "42" not in json.dumps(found)
    with pytest.raises(NotFound):
        Folder(root).inside("run/metrics.jsonl")


def test_assets_are_named_files_only(server):
    assert server.get("/assets/app.js")[1]["content-type"].startswith("text/javascript")
    for path in (
        "/assets/../server.py",
        "/assets/%2e%2e%2fserver.py",
        "/assets/nothing.js",
        "/assets/",
    ):
        assert server.get(path)[0] == 404


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


def test_every_answer_carries_a_strict_policy(server):
    for path in ("/", "/assets/app.js", "/api/runs", "/api/run?run=nowhere", "/nothing"):
        _, headers, _ = server.get(path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self';" in policy
            and "unsafe" not in policy
        )
        assert (
            headers["x-content-type-options"] == "nosniff"
            and headers["cross-origin-resource-policy"] == "same-origin"
        )
        assert "access-control-allow-origin" not in headers


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_from_strings():
    import postgrad.view.server as server_module

    for file in server_module.ASSETS.iterdir():
        text = file.read_text()
        assert "//cdn" not in text and "https://" not in text, file
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert word not in text, (file.name, word)


def test_beyond_loopback_a_token_is_needed(runs):
    with pytest.raises(ValueError, match="token"), serving(runs, host="0.0.0.0"):
        pass
    with serving(runs, host="0.0.0.0", token="secret-token") as server:
        for path in (
            "/",
            "/api/runs",
            "/assets/app.js",
            "/?token=wrong",
            "/?token=",
            "/api/runs?token=secret-token",
        ):
            assert server.get(path)[0] == 401, path
        status, headers, _ = server.get("/?token=secret-token")
        assert status == 303 and headers["location"] == "/"
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert server.get("/api/runs", Cookie=cookie.split(";")[0])[0] == 200
        assert server.get("/api/runs", Authorization="Bearer secret-token")[0] == 200
        assert server.get("/api/runs", Authorization="Bearer secret-tokem")[0] == 401
        assert (
            server.get("/api/runs", Host="evil.example", Authorization="Bearer secret-token")[0]
            == 403
        )


@pytest.mark.parametrize("query", ["step=x", "step=", "step=1&keep=odd", "step=1&sort=odd", ""])
def test_questions_without_sense_get_a_sentence(server, query):
    status, _, body = server.get(f"/api/groups?run=finished&{query}")
    assert status == 400 and json.loads(body)["error"]


def test_the_live_stream_tells_of_new_lines(runs, tmp_path):
    import http.client

    written = Written(tmp_path / "live").steps(2)
    with serving(tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
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


def test_hostile_words_are_only_data_in_the_answers(server):
    _, headers, body = server.get("/api/group?run=hostile&step=1&group=0")
    assert headers["content-type"] == "application/json" and HOSTILE in json.loads(body)["question"]


def test_the_command_names_what_is_wrong(tmp_path, capsys, monkeypatch):
    from postgrad.cli.main import main

    monkeypatch.chdir(tmp_path)
    for words, part in (
        (["nowhere"], "no folder nowhere"),
        ([], "no folder runs"),
        (["--prot", "1"], "did you mean --port?"),
        ([".", "--port", "x"], "--port: x"),
        ([".", "--port"], "--port: "),
        (["a", "b"], "unexpected argument b"),
        ([".", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ):
        assert main(["view", *words]) == 2
        err = capsys.readouterr().err
        assert part in err and err.count("\n") == 1, err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_it_without_a_word(runs, number):
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "view",
        str(runs),
        "--no-browser",
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = [process.stdout.readline() for _ in range(3)][1].strip()
    for _ in range(100):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=5).close()
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
