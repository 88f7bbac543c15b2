"""What a line of a task list may be, and what its tasks need that this machine may lack: the traps of tasks that come from elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages import datasets, plan, trial

REPO = Path(__file__).resolve().parent.parent
# what Terminal-Bench 2's tasks look like: an image by tag, a verifier that installs packages when it runs
TB2_TOML = '[agent]\ntimeout_sec = 3600.0\n[environment]\ndocker_image = "alexgshaw/fix-git:20251031"\nmemory = "4G"\n'
TB2_TEST = "apt-get update && apt-get install -y curl\ncurl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\nuvx -p 3.13 -w pytest==8.4.1 pytest /tests\n"


def make(folder, toml=TB2_TOML, test=TB2_TEST):
    files = {"task.toml": toml, "instruction.md": "x\n", "tests/test.sh": test, "environment/Dockerfile": "FROM x\n", "solution/solve.sh": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_line_is_a_task_of_a_folder_a_data_set_or_a_package(tmp_path):
    part = trial.find_task("terminal-bench@2.0/fix-git", tmp_path)
    assert part == ("fix-git", {"datasets": [{"name": "terminal-bench", "version": "2.0", "task_names": ["fix-git"]}]})
    assert trial.find_task("org/set@latest/x", tmp_path)[1] == {"datasets": [{"name": "org/set", "ref": "latest", "task_names": ["*/x"]}]}
    assert trial.find_task("tb@2.0/x", tmp_path, "r.json")[1]["datasets"][0]["registry_path"] == "r.json"
    assert trial.find_task("tb@2.0/x", tmp_path, "https://h/r.json")[1]["datasets"][0]["registry_url"] == "https://h/r.json"
    for bad in ("tb@2.0/", "tb/x", "@2/x"):
        with pytest.raises(trial.BadInput, match="DATASET@VERSION/NAME"):
            trial.find_task(bad, tmp_path)


def test_a_folder_of_tasks_becomes_one_line_a_task(tmp_path):
    for name in ("b", "a"):
        make(tmp_path / "set" / name)
    make(tmp_path / "c")
    assert datasets.expand({str(tmp_path / "set"): "", "c": ""}, tmp_path) == [f"{tmp_path}/set/a", f"{tmp_path}/set/b", "c"]
    (tmp_path / "empty").mkdir()
    for bad in (str(tmp_path / "empty"), "nope"):
        with pytest.raises(ValueError, match="l.txt, line 7: task '.*' is no folder with a task.toml"):
            datasets.expand({bad: "l.txt, line 7"}, tmp_path)


@pytest.mark.parametrize("line", ["terminal-bench@2.0", "org/set@1"])
def test_a_batch_wants_single_tasks_and_says_who_lists_them(line):
    with pytest.raises(ValueError, match="oracle_ok.txt"):
        plan.single({line: "l.txt, line 1"}, "tasks")
    assert plan.single({f"{line}/x": "l.txt, line 1"}, "tasks") == [f"{line}/x"]


def found(tmp_path, **more):
    return {"fix-git": datasets.needs(make(tmp_path / "fix-git")) | more}


def test_what_a_task_needs_is_read_from_its_folder(tmp_path):
    n = found(tmp_path)["fix-git"]
    assert (n["image"], n["memory_mb"], n["verifier_downloads"], n["hosts"]) == ("alexgshaw/fix-git:20251031", 4096, True, ["astral.sh"])
    assert n["limit_s"] == 600 + 360 + 3600 + 600
    local = datasets.needs(REPO / "tasks/local/sqlite-query")
    assert local["limit_s"] == 900 + 360 + 900 + 60 and datasets.limit_s(REPO / "tasks/local/sqlite-query", 40) == 900 + 360 + 40 + 60
    assert not local["image"] and not local["verifier_downloads"] and not local["hosts"]


@pytest.mark.parametrize(
    ("more", "reach", "docker", "level", "says"),
    [
        ({}, True, False, "missing", "Docker: 1 task(s) use prebuilt images, such as alexgshaw/fix-git:20251031"),
        ({}, True, False, "note", "named by tag, not by digest"),
        ({}, True, False, "note", "install packages at test time (from astral.sh and package mirrors)"),
        ({}, False, False, "missing", "astral.sh cannot be reached: they would judge right solutions wrong"),
        ({"network": False}, True, False, "missing", "the task forbids it and its verifier downloads"),
        ({}, True, False, "missing", "want up to 86 minutes for build, agent and verifier, here are 30"),
        ({}, True, False, "missing", "want up to 4096 MB of memory, here are 2048"),
        ({"gpus": 1}, True, False, "missing", "a GPU for the tasks themselves"),
    ],
)
def test_the_traps_are_clear_lines_with_a_way_out(tmp_path, more, reach, docker, level, says):
    lines = datasets.findings(found(tmp_path, **more), 1800, 2048, docker, lambda _: reach)
    assert any(says in text and have == level and (way or level != "missing") for have, text, way in lines), lines


def test_nothing_is_said_about_tasks_that_need_nothing():
    tasks = {p.parent.name: datasets.needs(p.parent) for p in (REPO / "tasks/local").glob("*/task.toml")}
    assert datasets.findings(tasks, 7200, 4096, False, lambda _: False) == []


def test_a_local_registry_needs_no_network(tmp_path):
    """Harbor itself looks the data set up; what is planned and run afterwards is one line a task."""
    make(tmp_path / "tasks/one", '[agent]\ntimeout_sec = 60.0\n[environment]\nmemory_mb = 100\n', "true\n")
    registry = [{"name": "mine", "version": "1.0", "description": "", "tasks": [{"name": "one", "path": str(tmp_path / "tasks/one")}]}]
    (tmp_path / "registry.json").write_text(json.dumps(registry))
    (tmp_path / "list.txt").write_text("mine@1.0\n")
    command = [sys.executable, "stages/datasets.py"]
    options = [tmp_path / "list.txt", "--registry", tmp_path / "registry.json"]
    r = subprocess.run([*command, "expand", *options], cwd=REPO, capture_output=True, text=True)
    assert (r.returncode, r.stdout) == (0, "mine@1.0/one\n"), r.stderr
    r = subprocess.run([*command, "check", *options], cwd=REPO, capture_output=True, text=True)
    assert (r.returncode, r.stdout) == (0, "ok\t1 task(s): nothing is missing\t\n"), r.stderr
    (tmp_path / "list.txt").write_text("mine@2.0\n")
    r = subprocess.run([*command, "check", *options], cwd=REPO, capture_output=True, text=True)
    assert r.returncode == 1 and r.stdout.startswith(f"missing\t{tmp_path}/list.txt, line 1: data set mine: Version 2.0") and "TASK_REGISTRY" in r.stdout
