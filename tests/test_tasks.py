"""The local tasks and their recordings: well-formed, solvable, not passed by doing nothing, replayed as they say."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fakes.openai_server import running

import local_env as L
from stages.trial import policy_kwargs

REPO = Path(__file__).resolve().parent.parent
TASKS = REPO / "tasks"
NAMES = sorted(p.name for p in (TASKS / "local").iterdir() if p.is_dir())
CONTEXT = 32768  # tokens that the server of a measured run offers
RECORDINGS = sorted((TASKS / "recordings").glob("*/*.json"))


def listed(name):
    return [line for line in (TASKS / name).read_text().splitlines() if line and not line.startswith("#")]


def namespaces():
    try:
        L.detect_mode()
        L.check_packages(L.read_environment(TASKS / "local" / NAMES[0] / "environment")["packages"], NAMES[0])
        return True
    except L.LocalEnvError:
        return False


needs_namespaces = pytest.mark.skipif(
    not namespaces(), reason="local_env.py cannot run these tasks here: see `python local_env.py --check`"
)

# ---------------------------------------------------------------------------------------------------- files


def test_lists_agree_with_the_folders():
    assert listed("local.txt") == NAMES and listed("candidates.txt") == NAMES
    assert len(listed("quickstart.txt")) == 4 and set(listed("quickstart.txt")) <= set(NAMES)
    final = listed("final.txt")
    assert len(final) == len(set(final)) == 20 and set(final) <= set(NAMES)
    for pilot in ("pilot.txt", "pilot2.txt"):
        assert set(listed(pilot)) < set(final)
    for name in final:  # a machine without the sqlite3 program runs them all
        assert "sqlite3" not in tomllib.loads((TASKS / "local" / name / "task.toml").read_text())["metadata"]["packages"], name


def test_terminal_bench_candidates_follow_from_the_facts():
    """The command in the list's own comment selects its lines."""
    text = (TASKS / "tb2_candidates.txt").read_text()
    command = re.search(r"^#   (awk .*)$", text, re.M)[1]
    p = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=True)
    assert p.stdout.split() == listed("tb2_candidates.txt") and len(p.stdout.split()) > 10


@pytest.mark.parametrize("name", NAMES)
def test_task_has_all_parts(name):
    task = TASKS / "local" / name
    config = tomllib.loads((task / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["agent"]["timeout_sec"] > 0 and config["verifier"]["timeout_sec"] > 0
    assert {"category", "tags", "difficulty"} <= set(config["metadata"])
    assert "/app/" in (task / "instruction.md").read_text()
    for script in ("solution/solve.sh", "tests/test.sh"):
        assert os.access(task / script, os.X_OK) and (task / script).read_text().startswith("#!/bin/bash\n")
    test = (task / "tests/test.sh").read_text()
    assert "/logs/verifier/reward.txt" in test and not re.search(r"\b(curl|wget|apt|apt-get|pip)\b|https?://", test)


def test_no_task_has_a_network():
    # in Docker through compose, in local_env because none asks for one
    for name in NAMES:
        environment = TASKS / "local" / name / "environment"
        assert "network_mode: none" in (environment / "docker-compose.yaml").read_text()
        assert "network_mode" not in (TASKS / "local" / name / "task.toml").read_text()


def test_all_images_share_their_first_layers():
    beginnings = {(TASKS / "local" / name / "environment/Dockerfile").read_text().partition("WORKDIR /app\n")[0] for name in NAMES}
    assert len(beginnings) == 1 and beginnings.pop().startswith("FROM debian:bookworm-slim\n")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_recording_is_well_formed(path):
    recording = json.loads(path.read_text())
    assert (recording["schema"], recording["name"], recording["task"]) == (1, path.stem, path.parent.name)
    assert recording["source"] == "authored" and recording["agent"] == "terminus-2"
    assert recording["expected_outcome"] in ("success", "fail") and recording["description"]
    agent = [c for c in recording["calls"] if c["kind"] == "agent"]
    assert len(agent) >= 3
    last = [json.loads(c["content"]) for c in agent[-2:]]
    assert all(reply["task_complete"] for reply in last), "Terminus-2 wants task_complete twice in a row"
    for call in recording["calls"]:
        if call["kind"] != "agent":
            # the quickstart's contexts are kept small on purpose
            longest = 480 if path.parent.name in listed("quickstart.txt") else 2400
            assert call["repeat"] is True and len(call["content"]) < longest
    for call in agent:
        try:
            commands = json.loads(call["content"])["commands"]
        except ValueError:
            continue  # a reply that cannot be parsed, on purpose
        assert all(0 <= c["duration"] <= 60 for c in commands)


def test_recordings_cover_the_tasks():
    by_task = {name: [json.loads(p.read_text()) for p in RECORDINGS if p.parent.name == name] for name in NAMES}
    assert {p.parent.name for p in RECORDINGS} == set(NAMES)
    for name, recordings in by_task.items():
        assert len(recordings) >= 2 and any(r["expected_outcome"] == "success" for r in recordings), name
    assert sum(any(r["expected_outcome"] == "fail" for r in rs) for rs in by_task.values()) >= len(NAMES) // 2
    for name in listed("quickstart.txt"):
        for r in by_task[name][:2]:
            assert {c["kind"] for c in r["calls"]} == {"agent", "summary", "questions", "answers", "short_summary"}, name


def test_recordings_are_those_of_their_sources():
    p = subprocess.run([sys.executable, TASKS / "author.py", "--check"], capture_output=True, text=True)
    assert p.returncode == 0, p.stdout + p.stderr


def test_the_table_is_that_of_the_recordings():
    with open(TASKS / "recordings.csv", newline="") as f:
        rows = [(r["task"], r["recording"], r["outcome"], int(r["calls"])) for r in csv.DictReader(f)]
    documents = [json.loads(p.read_text()) for p in RECORDINGS]
    calls = [sum(c["kind"] == "agent" for c in d["calls"]) for d in documents]
    assert rows == [(d["task"], d["name"], d["expected_outcome"], n) for d, n in zip(documents, calls, strict=True)]


def test_author_names_the_place_of_a_fault(tmp_path):
    sys.path.insert(0, str(TASKS))
    import author

    source = tmp_path / "task" / "01-x.toml"
    source.parent.mkdir()
    source.write_text('description = "d"\nexpected_outcome = "success"\n[[reply]]\nanalysis = "a"\nplan = "p"\n[[reply]]\nanalysis = "a"\n')
    with pytest.raises(ValueError, match="01-x.toml: reply 2: plan is missing"):
        author.recording(source)
    source.write_text('description = "d"\nexpected_outcome = "perhaps"\n')
    with pytest.raises(ValueError, match="'perhaps', expected 'success' or 'fail'"):
        author.recording(source)


def test_a_recording_repeats_replies_of_another(tmp_path):
    sys.path.insert(0, str(TASKS))
    import author

    head = 'description = "d"\nexpected_outcome = "fail"\n'
    (tmp_path / "01-a.toml").write_text(head + "".join(f'[[reply]]\nraw = "a{n}"\n' for n in (1, 2, 3)))
    second = tmp_path / "02-b.toml"
    second.write_text(head + '[[reply]]\nsame = "01-a:2-3"\n[[reply]]\nraw = "b"\n')
    assert [c["content"] for c in author.recording(second)["calls"]] == ["a2", "a3", "b"]
    for faulty, says in (("01-a:2-4", "asks for replies 2 to 4, 01-a.toml has 3"), ("02-b:1-1", "an earlier name"), ("00-x:1-1", "00-x.toml")):
        second.write_text(head + f'[[reply]]\nsame = "{faulty}"\n')
        with pytest.raises(ValueError, match=says):
            author.recording(second)


# ---------------------------------------------------------------------------------------------------- real trials


def harbor(jobs, *args, timeout=900):
    exe = Path(sys.executable).parent / "harbor"
    if not exe.exists():
        pytest.skip("Harbor is not installed in this environment")
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true", "PYTHONPATH": str(REPO), "OPENAI_API_KEY": "none"}
    argv = [exe, "run", "-p", TASKS / "local", "-o", jobs, "--job-name", "job", "-n", "6", "-y", "--quiet", *args]
    p = subprocess.run([str(a) for a in argv], env=env, capture_output=True, text=True, timeout=timeout)
    results = {r["task_name"]: r for r in (json.loads(f.read_text()) for f in Path(jobs).glob("job/*__*/result.json"))}
    assert results, p.stdout[-2000:] + p.stderr[-2000:]
    return results


def reward(result):
    assert result["exception_info"] is None, result["exception_info"]
    return result["verifier_result"]["rewards"]["reward"]


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_reference_solutions_pass_and_doing_nothing_fails(tmp_path):
    solved = harbor(tmp_path / "oracle", "-a", "oracle", "-e", "local_env:LocalEnvironment")
    assert {name: reward(r) for name, r in solved.items()} == dict.fromkeys(NAMES, 1)
    idle = harbor(tmp_path / "nop", "-a", "nop", "-e", "local_env:LocalEnvironment")
    assert {name: reward(r) for name, r in idle.items()} == dict.fromkeys(NAMES, 0)


WAIT = {"analysis": "The last command is still running.", "plan": "Wait.", "commands": [{"keystrokes": "", "duration": 2.0}]}


def replay(tmp_path, recordings, *args, context=8192):
    """Terminus-2 on these recordings {task: recording}, answered by a scripted server. Returns Harbor's results by task, and how many turns
    each had beyond its recording: the first task_complete waits until the terminal shows an empty prompt, so that the outcome does not
    depend on how busy this machine is."""
    tasks = {name: (TASKS / "local" / name / "instruction.md").read_text().strip() for name in recordings}
    given, waits = dict.fromkeys(recordings, 0), dict.fromkeys(recordings, 0)

    def script(body, _):
        name = next(name for name, text in tasks.items() if text in body["messages"][0]["content"])
        agent = [c["content"] for c in recordings[name]["calls"] if c["kind"] == "agent"]
        screen = body["messages"][-1]["content"].rstrip()
        if given[name] == len(agent) - 2 and waits[name] < 200 and not re.search(r"root@[\w-]+:\S*#\Z", screen):
            waits[name] += 1
            return WAIT
        given[name] += 1
        assert given[name] <= len(agent), f"{name} asks for more replies than {recordings[name]['name']} has"
        return {"raw": agent[given[name] - 1]}

    info = {"max_input_tokens": context, "max_output_tokens": 1024, "input_cost_per_token": 0, "output_cost_per_token": 0}
    with running(script) as server:
        kwargs = [f"api_base={server.url}/v1", f"model_info={json.dumps(info)}", 'session_id_headers=["X-Session-ID"]', *args]
        only = [x for name in recordings for x in ("-i", name)]
        ak = [x for k in kwargs for x in ("--ak", k)]
        results = harbor(tmp_path, "-a", "terminus-2", "-m", "openai/fake", "-e", "local_env:LocalEnvironment", *only, *ak)
    return results, waits


def policy(name):
    """Terminus-2's arguments for a context policy, as the stages make them for a context of CONTEXT tokens."""
    return [f"{k}={json.dumps(v)}" for k, v in policy_kwargs(name, CONTEXT).items()]


def recordings_numbered(nn, tasks):
    return {p.parent.name: json.loads(p.read_text()) for p in RECORDINGS if p.name.startswith(nn) and p.parent.name in tasks}


def check_replay(tmp_path, recordings, *args):
    """Replays recordings {task: recording}; each must end as it says, all its replies used. Returns {task: summaries}."""
    results, waits = replay(tmp_path, recordings, *args, context=CONTEXT)
    assert {n: reward(r) for n, r in results.items()} == {n: float(r["expected_outcome"] == "success") for n, r in recordings.items()}
    for name, r in results.items():
        used = r["agent_result"]["metadata"]["n_episodes"] - waits[name]
        assert used == sum(c["kind"] == "agent" for c in recordings[name]["calls"]), f"{name}: replies left over"
    return {name: r["agent_result"]["metadata"]["summarization_count"] for name, r in results.items()}


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_first_recordings_end_as_they_say_also_with_summaries_at_8k(tmp_path):
    """A context summary throws the history away, not the work: commands and outcome stay the same."""
    summaries = check_replay(tmp_path, recordings_numbered("01", NAMES), *policy("summarize-8k"))
    assert sum(n > 0 for n in summaries.values()) >= 8, summaries  # on these the two policies differ


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
def test_other_recordings_end_as_they_say(tmp_path):
    """One further recording of ten tasks, other ones each time; TRAJOULE_ALL_RECORDINGS=1 tries all with both policies."""
    if os.environ.get("TRAJOULE_ALL_RECORDINGS"):
        for nn in ("01", "02", "03", "04"):
            for name in ("summarize-off", "summarize-8k"):
                check_replay(tmp_path / nn / name, recordings_numbered(nn, NAMES), *policy(name))
        return
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    r = random.Random(seed)
    further = {name: [p for p in RECORDINGS if p.parent.name == name and not p.name.startswith("01")] for name in NAMES}
    sample = {name: json.loads(r.choice(further[name]).read_text()) for name in r.sample(NAMES, 10)}
    check_replay(tmp_path, sample, *policy("summarize-off"))


@pytest.mark.integration
@pytest.mark.timeout(900)
@needs_namespaces
@pytest.mark.parametrize("nn", ["01", "02"])
def test_summaries_at_2k_fire_in_the_quickstart_and_change_no_outcome(tmp_path, nn):
    recordings = recordings_numbered(nn, listed("quickstart.txt"))
    results, _ = replay(tmp_path, recordings, f"proactive_summarization_threshold={8192 - 2048}")
    assert {n: reward(r) for n, r in results.items()} == {n: float(r["expected_outcome"] == "success") for n, r in recordings.items()}
    fired = {name for name, r in results.items() if r["agent_result"]["metadata"]["summarization_count"] >= 1}
    assert any("sqlite-query" in name for name in fired), fired  # the task on which the two policies differ


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_tasks_build_and_pass_in_docker(tmp_path):
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("NO DOCKER HERE (docker with compose): the tasks' images were not tried")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("NO DOCKER ENGINE RUNS HERE: the tasks' images were not tried")
    only = ["python-bug", "git-rescue", "sqlite-query"]
    results = harbor(tmp_path, "-a", "oracle", "-e", "docker", *[x for name in only for x in ("-i", name)])
    assert {name: reward(r) for name, r in results.items()} == dict.fromkeys(only, 1)
