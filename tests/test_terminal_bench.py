"""The Terminal-Bench runner: configuration, order of actions, session protocol, what it leaves behind; a scripted server, Harbor and docker."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.fakes.bench_place import FOLDER, REPO, Place, until

import runner  # isort: skip - bench_place knows where it lies


@pytest.fixture
def place(tmp_path, free_port):
    """A folder with a configuration, a cache with a stand-in for Harbor, a PATH with a stand-in for docker."""
    return Place(tmp_path, free_port())


# --- configuration


@pytest.mark.parametrize(
    ("table", "key", "value", "says"),
    [
        ("bench", "task", ["x"], "unknown key(s): task"),
        ("bench", "max_output_tokens", 2048, "max_output_tokens = 2048: expected more than 0 and less than [server] max_context = 2048"),
        ("bench", "max_output_tokens", 0, "max_output_tokens = 0"),
        ("bench", "attempts", 0, "attempts = 0: expected a whole number, 1 or more"),
        ("bench", "attempts", True, "attempts = true"),
        ("bench", "step_limit", 0, "step_limit = 0"),
        ("bench", "concurrency", 0, "concurrency = 0"),
        ("bench", "tasks", [], "tasks = []"),
        ("bench", "temperature", 2.1, "temperature = 2.1: expected 0 to 2"),
        ("bench", "session_affinity", "a b", "session_affinity"),
        ("server", "model_id", None, "model_id is missing"),
        ("server", "port", 70000, "port = 70000"),
        ("server", "max_context", 0, "max_context = 0"),
        ("energy", "hertz", 1, "[energy] unknown key(s): hertz"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(place, table, key, value, says):
    getattr(place, table)[key] = value
    with pytest.raises(ValueError) as e:
        runner.load_config(place.config())
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_bad_value_is_one_line_and_exit_1(place):
    place.bench["temperature"] = 2.1
    code, out, err = place.run()
    assert (code, out) == (1, "") and len(err.splitlines()) == 1 and "temperature" in err
    assert not place.out.exists()


def test_session_affinity_and_concurrency_exclude_each_other(place):
    place.bench |= {"session_affinity": "one", "concurrency": 2}
    with pytest.raises(ValueError, match="remove session_affinity, or set concurrency = 1"):
        runner.load_config(place.config())


def test_paths_are_relative_to_the_file_and_links_stay(place, tmp_path):
    os.symlink(sys.executable, tmp_path / "python")
    place.server |= {"python": "./python", "worker_bin": "bin/worker", "tokenizer_path": "~/tok.bin", "hf_tokenizer": "org/name"}
    server = runner.load_config(place.config())["server"]
    assert server["python"] == str(tmp_path / "python")
    assert server["worker_bin"] == str(tmp_path / "bin/worker")
    assert server["tokenizer_path"] == str(Path.home() / "tok.bin")
    assert server["hf_tokenizer"] == "org/name"
    place.server["hf_tokenizer"] = "./tok"
    assert runner.load_config(place.config())["server"]["hf_tokenizer"] == str(tmp_path / "tok")


def test_server_keys_become_options_of_the_module(place):
    place.server |= {"artifact_mode": ["a", "b"], "quiet": False, "ratio": 0.5}
    argv = runner.server_argv(runner.load_config(place.config())["server"])
    assert argv[:3] == [sys.executable, "-m", "tests.fakes.session_server"]
    assert {"--no-think", "--tool-parser=hermes", "--artifact-mode=a", "--artifact-mode=b", "--ratio=0.5"} <= set(argv)
    assert not [x for x in argv[3:] if x.startswith(("--quiet", "--env", "--module", "--python", "--proxied"))]


def test_a_command_gets_its_placeholders_and_nothing_else(place):
    words = ["./serve", "--port", "{port}", "{host}", '{"a": {model}}', "{model_id}"]
    place.server = {"command": words, "model_id": "m", "max_context": 64, "port": place.port}
    place.bench["max_output_tokens"] = 8
    config = runner.load_config(place.config())
    assert runner.server_argv(config["server"]) == [str(place.tmp / "serve"), "--port", str(place.port), "127.0.0.1", '{"a": {model}}', "m"]
    assert config["terminal_bench"]["proxy"] is True  # such a server logs no turns: the proxy counts
    place.server["no_think"] = True
    with pytest.raises(ValueError, match="no_think: not passed on beside `command`"):
        runner.load_config(place.config())


def test_the_example_names_every_key_and_states_its_default(tmp_path, monkeypatch):
    monkeypatch.setenv("EXECUTORCH_EVAL_CACHE", str(tmp_path))
    text = (REPO / "evals" / "configs" / "terminal-bench.example.toml").read_text()
    (tmp_path / "c.toml").write_text(text)
    config = runner.load_config(tmp_path / "c.toml")
    assert config["server"]["model_path"] == str(Path.home() / "models/qwen3/model.pte") and config["terminal_bench"]["proxy"] is False
    for table, defaults in (("terminal_bench", runner.BENCH_DEFAULTS), ("energy", runner.ENERGY_DEFAULTS)):
        part = re.split(rf"(?m)^\[{table}\]$", text)[1].partition("\n[")[0]
        named = dict(re.findall(r"(?m)^#? ?(\w+) = (.+?)(?:[ \t]+#.*)?$", part))
        assert set(named) == set(defaults)
        for key, value in named.items():
            if defaults[key] is not None and key not in ("max_output_tokens", "agent_preinstalled"):
                assert tomllib.loads(f"x = {value}")["x"] == defaults[key], key


def test_credentials_of_the_server_are_not_written_down(place):
    config = place.config({})
    config.write_text(config.read_text().replace("env = { ", 'env = { HF_TOKEN = "secret-1", ', 1))
    env = runner.recorded(runner.load_config(config)["server"])["env"]
    assert env["HF_TOKEN"] == "[hidden]" and env["FAULTS"] == "{}"


def test_energy_on_macos_is_refused_in_a_sentence(place, monkeypatch):
    place.energy["enabled"] = True
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="macOS gives an ordinary process no energy counters"):
        runner.load_config(place.config())


# --- dry run


def test_dry_run_writes_the_commands_and_starts_nothing(place):
    place.bench |= {"agent_host": None, "tasks": ["a"], "attempts": 3, "max_output_tokens": 77}
    code, out, err = place.run("--dry-run", "--task", "b", "--task", "c-*")
    assert (code, out) == (0, f"Results: {place.out}\n")
    assert [x.partition(" = ")[0] for x in err.splitlines()] == [f"run.sh: a run would fail: [server] {k}" for k in ("worker_bin", "tokenizer_path")]
    assert sorted(p.name for p in place.out.iterdir()) == ["agent.yaml", "compose.yaml", "run.json", "source.diff"]
    assert place.docker_log() == [["context", "show"]]
    run = place.json("run.json")
    assert run["config"]["terminal_bench"]["tasks"] == ["b", "c-*"]
    harbor = " ".join(run["harbor"])
    for part in (
        "--dataset terminal-bench@2.0", "--model openai/m", "--ak version=2.4.6", "--ak max_tokens=77", "--n-attempts 3", "--max-retries 0",
        "--n-concurrent 1", f"--jobs-dir {place.out} --job-name harbor", "--include-task-name b --include-task-name c-*",
        f"--ae OPENAI_BASE_URL=http://host.docker.internal:{place.port}/v1", "--ae NO_PROXY=host.docker.internal",
    ):  # fmt: skip
        assert part in harbor
    assert place.json("compose.yaml")["services"]["main"]["extra_hosts"] == ["host.docker.internal:host-gateway"]
    assert "--add-host" in run["probe"]
    assert run["revision"] == subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout.strip()


def test_colima_has_its_own_name_for_the_host(place):
    place.bench["agent_host"] = None
    place.run("--dry-run", docker="colima")
    assert f"OPENAI_BASE_URL=http://host.lima.internal:{place.port}/v1" in " ".join(place.json("run.json")["harbor"])
    assert "extra_hosts" not in place.json("compose.yaml")["services"]["main"]


def test_an_output_folder_is_never_used_twice(place):
    place.out.mkdir()
    code, _, err = place.run("--dry-run")
    assert code == 1 and "exists already" in err


def test_affinity_is_a_header_of_every_call(place):
    place.bench["session_affinity"] = "kv-1"
    place.run("--dry-run")
    assert place.json("agent.yaml")["model"]["model_kwargs"]["extra_headers"] == {"x-session-affinity": "kv-1"}
    run = place.json("run.json")
    assert run["harbor"][run["harbor"].index("--agent") + 1] == "mini-swe-agent" and "--plugin" not in run["harbor"]


def test_the_run_script_finds_its_environment_or_says_how_to_make_it(place):
    def run(*more):
        return subprocess.run(["bash", str(FOLDER / "run.sh"), *more], env=place.env, capture_output=True, text=True, timeout=60)

    config = ["--config", str(place.config()), "--output", str(place.out)]
    r = run(*config)
    assert r.returncode == 2 and "setup.sh" in r.stderr
    assert run("--help").returncode == 0
    (place.tmp / "cache/terminal-bench/venv/bin/harbor").rename(place.tmp / "harbor")
    r = run(*config, "--dry-run")  # what is resolved needs no environment
    assert r.returncode == 0 and r.stderr.splitlines()[-1].endswith("harbor: no such file; run setup.sh")
    (place.tmp / "cache/terminal-bench/venv/bin/python").symlink_to(sys.executable)
    assert run("--help").returncode == 0


# --- a run


def test_a_run_from_server_to_metrics(place):
    """Two trials at once, each with a session of its own that is closed before the next begins."""
    place.bench |= {"concurrency": 2}
    code, out, err = place.run(faults={"capacity": 2}, harbor={"trials": 5, "calls": 3})
    assert (code, err) == (0, "")
    assert out.count("agent_exit=Submitted, tool_calls=3") == 5 and "fix-git__fake1: reward=0.0" in out
    metrics = place.json("metrics.json")
    prompt = 40 // 4 + 1  # of each of the 15 calls; the preflight's is not in the sums
    assert metrics["requests"] == 15 and metrics["prompt_tokens"] == 15 * prompt and metrics["completion_tokens"] == 60
    assert metrics["reused_prompt_tokens"] == 10 and metrics["prefilled_prompt_tokens"] == 15 * prompt - 10
    assert metrics["prefill_ms"] == 157.5 and metrics["decode_ms"] == 33.75
    assert metrics["peak_prompt_tokens"] == prompt and metrics["context_violations"] == 0
    run = place.json("run.json")
    assert run["sessions"] == "trial" and run["harbor_exit"] == 0
    assert run["versions"]["server"] == "0.0.scripted" and run["versions"]["docker"] == "0.0-fake"
    assert run["artifacts"]["model_path"] == {"path": str(place.tmp / "model.pte"), "bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert run["artifacts"]["worker_bin"] is None  # there is none: unknown, not invented
    assert "--no-think" in (place.out / "server.log").read_text()
    assert runner.why_no_completion(place.json("connection.json")) is None
    assert ["rm", "--force"] in [x[:2] for x in place.docker_log()]


def test_sessions_are_closed_before_the_next_trial_begins(place):
    """A server with room for one session and two DELETEs that fail, three trials one after the other, none refused: 429 would end the run."""
    place.bench["sessions"] = True
    code, _, err = place.run(faults={"capacity": 1, "delete": [503, 503]}, harbor={"trials": 3, "calls": 1})
    assert (code, err) == (0, "")
    assert place.json("metrics.json")["requests"] == 3


def test_a_session_that_is_never_closed_stops_the_run(place):
    place.bench["concurrency"] = 2
    code, out, err = place.run(faults={"delete_always": 503}, harbor={"trials": 1, "deadline_s": 1})
    assert code == 1 and "Harbor ended with 1" in err and "was not closed" in err and "HTTP 503" in err
    assert "fix-git__fake0: reward=1.0" in out  # summaries and metrics all the same
    assert place.json("metrics.json")["requests"] == 2


def test_a_server_without_sessions_is_refused_for_concurrent_trials(place):
    place.bench["concurrency"] = 2
    code, _, err = place.run(faults={"no_sessions": True})
    assert code == 1 and "concurrency = 2 needs named sessions" in err and "answered 404" in err


def test_a_foreign_session_fails_the_run(place):
    code, _, err = place.run(faults={"foreign": "intruder"})
    assert code == 1 and "intruder belong to no trial" in err and "no trial made calls under another id" in err


def write_trial(out, name, ident, calls=1, **result):
    agent = out / "harbor" / name / "agent"
    agent.mkdir(parents=True)
    info = {"exit_status": "Submitted", "model_stats": {"api_calls": calls}, "mini_version": "2.4.6"}
    (agent / "mini-swe-agent.trajectory.json").write_text(json.dumps({"info": info, "messages": []}))
    (agent.parent / "result.json").write_text(json.dumps({"id": ident, **result}))


def test_sessions_and_trials_must_be_the_same(tmp_path):
    """A trial that made no call needs no session; one that did and has none called under another id."""
    write_trial(tmp_path, "a__1", "id-a")
    write_trial(tmp_path, "b__2", "id-b", calls=0)
    runner.check_sessions([{"session_id": "id-a"}], tmp_path)
    with pytest.raises(RuntimeError, match=r"<scratch> belong to no trial, a__1 \(id-a\) made calls under another id"):
        runner.check_sessions([{"session_id": "<scratch>"}], tmp_path)
    with pytest.raises(RuntimeError, match="intruder belong to no trial, no trial made calls"):
        runner.check_sessions([{"session_id": "id-a"}, {"session_id": "intruder"}], tmp_path)


@pytest.mark.parametrize(
    ("total", "done", "errored", "says"),
    [(2, 1, 0, "1 of 2 trials completed, 0 with errors"), (2, 2, 1, "2 of 2 trials completed, 1 with errors"), (0, 0, 0, "Harbor ran no trial")],
)
def test_every_trial_must_be_completed_without_error(tmp_path, total, done, errored, says):
    (tmp_path / "harbor").mkdir()
    job = {"n_total_trials": total, "stats": {"n_completed_trials": done, "n_errored_trials": errored}}
    (tmp_path / "harbor" / "result.json").write_text(json.dumps(job))
    with pytest.raises(RuntimeError, match=says):
        runner.check_job(tmp_path)


def test_harbors_failure_comes_after_summaries_and_metrics(place):
    code, out, err = place.run(harbor={"rc": 3, "trials": 2, "errored": 1})
    assert code == 1 and "Harbor ended with 3" in err and "harbor.log" in err
    assert "fix-git__fake0: error=EnvironmentStartTimeoutError, agent_exit=Submitted, tool_calls=2" in out
    assert "fix-git__fake1: reward=0.0, agent_exit=Submitted, tool_calls=2" in out
    assert place.json("metrics.json")["requests"] == 4 and place.json("run.json")["harbor_exit"] == 3


def test_a_trial_without_a_trajectory_is_unknown(tmp_path):
    assert runner.summary_line(tmp_path, {}) == f"{tmp_path.name}: reward=none, agent_exit=unknown, tool_calls=unknown"


def test_no_request_counted_fails_the_run(place):
    code, _, err = place.run(faults={"silent": True})
    assert code == 1 and "no model request was counted" in err and "proxy = true" in err


def test_a_prompt_without_room_for_its_answer_fails_the_run(place):
    """A context of 2048 and answers of up to 512: a prompt of 1537 tokens is one too long."""
    run = runner.Run(runner.load_config(place.config()), place.out)
    turns = [dict.fromkeys(runner.SUMS, 0) | {"session_id": "s", "prompt_tokens": n} for n in (1536, 1537)]
    metrics = runner.turn_metrics(turns, 0, run.config)
    assert metrics["context_violations"] == 1 and metrics["peak_prompt_tokens"] == 1537
    with pytest.raises(RuntimeError, match="1 of 2 requests had no room for max_output_tokens"):
        run.verdict(metrics)
    run.verdict(runner.turn_metrics(turns[:1], 0, run.config))


@pytest.mark.parametrize(("cut", "counted"), [(False, 2), (True, 1)])
def test_an_unterminated_last_line_counts_when_it_is_whole(tmp_path, cut, counted):
    log = tmp_path / "server.log"
    line = (
        "INFO llm_turn_stats session_id=a reason=new prompt_tokens=9 reused_prompt_tokens=1 prefilled_prompt_tokens=8 completion_tokens=128 "
        "prefill_ms=1.5 prefill_tok_s=1 decode_ms=2 decode_tok_s=1 total_ms=4 finish=stop"
    )
    log.write_text(f"start\n{line}\nloading 50 %\r{line[: line.index('8 prefill_ms')] if cut else line}")
    turns, malformed = runner.read_turns(log)
    assert (len(turns), malformed) == (counted, 0)
    assert {t["completion_tokens"] for t in turns} == {128}


def completion(**changes):
    return {"object": "chat.completion", "choices": [{"message": {"role": "assistant"}}], "usage": {"completion_tokens": 1}} | changes


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("not json", "the answer is no JSON object"),
        ("[]", "the answer is no JSON object"),
        (completion(object="error"), "object is 'error', expected 'chat.completion'"),
        (completion(usage={"completion_tokens": 0}), "usage.completion_tokens is 0, expected 1 or more"),
        (completion(usage=None), "usage.completion_tokens is None"),
        (completion(choices=[]), "choices[0].message is no assistant's"),
        (completion(choices=[{"message": {"role": "user"}}]), "choices[0].message is no assistant's"),
        (completion(), None),
    ],
)
def test_a_preflight_wants_a_completion_and_names_its_files(place, monkeypatch, answer, says):
    monkeypatch.setenv("PATH", place.env["PATH"])
    monkeypatch.setenv("DOCKER_FAKE_LOG", place.env["DOCKER_FAKE_LOG"])
    run = runner.Run(runner.load_config(place.config()), place.out)
    place.out.mkdir()
    run.record = {"probe": ["printf", "%s", answer if isinstance(answer, str) else json.dumps(answer)]}
    if says is None:
        run.preflight()
    else:
        with pytest.raises(RuntimeError) as e:
            run.preflight()
        for part in (says, "connection.json", "connection.log", "server.log"):
            assert part in str(e.value)
    assert ["rm", "--force", runner.probe_name()] in place.docker_log()


def test_a_refused_preflight_starts_no_harbor(place):
    code, _, err = place.run(faults={"status": 500})
    assert code == 1 and len(err.splitlines()) == 1 and "curl in the container ended with 22" in err
    assert (place.out / "harbor.log").read_text() == "" and not (place.out / "harbor").exists()
    assert place.json("metrics.json")["requests"] == 0


def test_a_preflight_that_hangs_is_ended_and_its_container_removed(place, monkeypatch):
    monkeypatch.setattr(runner, "PROBE_LIMIT_S", 1)
    run = runner.Run(runner.load_config(place.config()), place.out)
    for key in ("PATH", "DOCKER_FAKE_LOG", "EXECUTORCH_EVAL_CACHE"):
        monkeypatch.setenv(key, place.env[key])
    monkeypatch.setenv("DOCKER_FAKE", "hang")
    run.prepare()
    with pytest.raises(RuntimeError, match="no answer within 1 s"):
        run.preflight()
    assert ["rm", "--force", runner.probe_name()] in place.docker_log()


# --- the server's life


def test_a_busy_port_is_named_before_anything_starts(place):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", place.port))
        s.listen()
        code, _, err = place.run()
    assert code == 1 and f"[server] port = {place.port}" in err and "choose another" in err
    assert (place.out / "server.log").read_text() == ""


def test_a_server_that_ends_at_once_is_quoted(place):
    code, _, err = place.run(faults={"exit": 3})
    assert code == 1 and "the server was not ready: scripted: no worker binary (exit 3; log: " in err and "server.log" in err


def test_a_server_that_is_never_ready_is_ended(place):
    place.bench["server_ready_s"] = 1
    code, _, err = place.run(faults={"never_ready": True})
    assert code == 1 and "within 1 s" in err and "/health answered 503" in err and "server_ready_s allows more" in err


def test_a_server_that_dies_during_the_run_stops_it(place):
    code, _, err = place.run(faults={"die_after": 2}, harbor={"calls": 5})
    assert code == 1 and ("the server ended while Harbor ran (exit 7)" in err or "Harbor ended with 1" in err)


def test_a_dead_worker_stops_the_run(place, monkeypatch):
    """The process lives and answers /health with 503: nobody would ever answer the agents."""
    monkeypatch.setattr(runner, "HEALTH_EVERY_S", 0.1)
    for key, value in place.env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("HARBOR_FAKE", json.dumps({"hang": True}))
    run = runner.Run(runner.load_config(place.config({"dead_after": 1})), place.out)
    run.prepare()
    try:
        with pytest.raises(RuntimeError, match="the server's worker is dead: /health answered 503"):
            run.go()
    finally:
        run.close()
    assert not place.left()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_130_and_leaves_nothing(place, sig):
    p = place.start(harbor={"hang": True})
    assert until(lambda: (place.out / "harbor").exists())
    p.send_signal(sig)
    _, err = p.communicate(timeout=40)
    assert p.returncode == 130 and err == "run.sh: interrupted\n"
    assert not place.left()
    assert place.json("metrics.json")["requests"] == 0  # written all the same
    assert [x for x in place.docker_log() if x[:2] == ["ps", "--all"]]  # containers were looked for


def test_kill_9_of_the_runner_leaves_nothing(place):
    place.bench["proxy"] = True
    p = place.start(harbor={"hang": True})
    assert until(lambda: (place.out / "harbor").exists())
    assert len(place.left()) >= 4
    p.kill()
    p.communicate()
    assert until(lambda: not place.left(), 60), place.left()
    runner.check_port("127.0.0.1", place.port, "port")


# --- with the proxy, and measured


def test_a_server_without_turn_lines_is_counted_by_the_proxy(place, free_port):
    place.bench |= {"proxy": True, "proxy_port": free_port()}
    code, _, err = place.run(faults={"silent": True, "no_sessions": True})
    assert (code, err) == (0, "")
    metrics = place.json("metrics.json")
    assert metrics["source"] == "calls" and metrics["requests"] == 2 and metrics["failed_requests"] == 0
    assert metrics["prompt_tokens"] == 22 and metrics["completion_tokens"] == 8 and metrics["reused_prompt_tokens"] == 2
    assert metrics["prefill_ms"] is None  # not streamed: when the first token came is not known
    assert place.json("run.json")["sessions"] == "none"  # one trial at a time needs none


def test_measured_trials_become_trajectories(place, free_port):
    place.bench |= {"proxy": True, "proxy_port": free_port()}
    place.energy = {"enabled": True, "gpus": "none", "powercap": str(place.tmp), "cpu_model": "0.74:3.5"}
    code, out, err = place.run(harbor={"trials": 2})
    assert (code, err) == (0, "")
    folders = sorted((place.out / "traj").iterdir())
    assert [f.name for f in folders] == ["fix-git__mini-swe-agent__r1", "fix-git__mini-swe-agent__r2"]
    import align_trial

    for folder in folders:
        row = align_trial.align(folder)
        assert row["calls"] == 2 and row["model_s"] > 0 and row["cpu_total_j"] > 0 and row["cpu_source"] == "estimated"
        assert row["agent"] == "mini-swe-agent" and row["trajectory"] == folder.name


def mini_trajectory(agent, t0, cut=None, steps=3):
    """mini-SWE-agent's file after `steps` steps: replies at t0 + 1, 4, 7 … and their commands done 2 s later."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for n in range(steps):
        reply = {"actions": [{"command": f"step {n}", "tool_call_id": "c"}], "timestamp": t0 + 1 + 3 * n}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{}], "extra": reply})
        messages.append({"role": "tool", "content": "out", "extra": {"returncode": 0, "timestamp": t0 + 3 + 3 * n}})
    text = json.dumps({"info": {"exit_status": "", "model_stats": {"api_calls": steps}}, "messages": messages}, indent=2)
    (agent / "mini-swe-agent.trajectory.json").write_text(text[: text.index(cut)] if cut else text)


@pytest.mark.parametrize(
    ("cut", "calls", "spans", "flags"),
    [
        (None, 3, [(1, 3), (4, 6), (7, 9)], set()),
        (None, 4, [(1, 3), (4, 6), (7, 9), (10, 20)], {"command_open"}),  # stopped in a fourth command, before its step was written
        ('"step 2"', 3, [(1, 3), (4, 6), (7, 20)], {"command_open", "trajectory_damaged"}),  # killed while the file was written
    ],
)
def test_commands_of_mini_swe_agent_begin_and_end_by_its_own_file(tmp_path, cut, calls, spans, flags):
    import align_trial

    t0 = 1_700_000_000.0
    mini_trajectory(tmp_path, t0, cut)
    wire = [{"start": t0 + 3 * n, "end": t0 + 1 + 3 * n, "ok": True, "kind": "agent"} for n in range(calls)]
    found, said = align_trial.commands_from_mini_swe(tmp_path / "mini-swe-agent.trajectory.json", wire, t0, t0 + 20)
    assert [(c["start"] - t0, c["end"] - t0) for c in found] == spans and said == flags


def test_without_its_file_nothing_is_claimed(tmp_path):
    import align_trial

    assert align_trial.commands_from_mini_swe(tmp_path / "mini-swe-agent.trajectory.json", [], 0, 1) == (None, set())


def test_trials_that_overlap_directly_or_through_others_are_one_group():
    assert runner.overlapping([(0, 10), (5, 6), (6, 20), (20, 30), (29, 31)]) == [[0, 1, 2], [3, 4]]
    assert runner.overlapping([]) == []


def test_no_counter_to_read_is_said_before_the_server_starts(place, free_port):
    place.bench |= {"proxy": True, "proxy_port": free_port()}
    place.energy = {"enabled": True, "gpus": "none", "powercap": str(place.tmp)}
    code, _, err = place.run()
    assert code == 1 and "the sampler gave no row" in err and (place.out / "server.log").read_text() == ""


# --- closing a session


def scripted_delete(answers):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_DELETE(self):
            seen.append(self.path)
            status, body = answers[min(len(seen), len(answers)) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    seen = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}", seen


CLOSED = (200, '{"closed": true, "session_id": "s"}')


@pytest.mark.parametrize(
    ("answers", "tries"),
    [([CLOSED], 1), ([(503, ""), (503, ""), CLOSED], 3), ([(429, "{}"), (408, ""), (500, "no"), CLOSED], 4)],
)
def test_closing_is_repeated_until_the_server_says_closed(answers, tries):
    import kv_sessions

    server, url, seen = scripted_delete(answers)
    assert kv_sessions.close_session(url, "s", sleep=lambda _: None) == tries
    assert seen == ["/v1/sessions/s"] * tries
    server.shutdown()


@pytest.mark.parametrize("answer", [(404, "{}"), (400, '{"error": {"code": "unsupported_session"}}'), (200, '{"closed": false}'), (200, "ok")])
def test_an_answer_that_will_not_change_is_final(answer):
    import kv_sessions

    server, url, seen = scripted_delete([answer])
    with pytest.raises(RuntimeError, match=f"HTTP {answer[0]}.*at try 1"):
        kv_sessions.close_session(url, "s", sleep=lambda _: None)
    assert len(seen) == 1
    server.shutdown()


def test_closing_is_given_up_after_two_minutes(free_port):
    import kv_sessions

    now, pauses = [0.0], []

    def sleep(s):
        pauses.append(s)
        now[0] += s

    with pytest.raises(RuntimeError, match="gave no answer"):
        kv_sessions.close_session(f"http://127.0.0.1:{free_port()}", "s", clock=lambda: now[0], sleep=sleep)
    assert 110 < now[0] <= 120 and max(pauses) <= 8 and pauses == sorted(pauses)
