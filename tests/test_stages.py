"""The bash stages and their small Python helpers: settings, plans, context policies, processes that leave nothing behind."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import energylib
import llm_proxy
from servers import llamacpp
from stages import csvfiles, plan, trial


def clean(**env):
    """The environment without settings of ours, then with these."""
    ours = ("PROFILE", "PORT", "PROXY_PORT", "DATA_DIR", "RESULTS_DIR", "ORACLE_DIR", "MODE", "CUDA_VISIBLE_DEVICES")
    return {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("TRAJOULE_")} | env


def bash(repo, command, **env):
    """Run a bash command in the repository with a clean set of our settings; returns the finished process."""
    return subprocess.run(["bash", "-c", command], cwd=repo, env=clean(**env), capture_output=True, text=True, timeout=60)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


# ---- settings

PROFILES = ["cpu-smollm2", "cpu-vllm", "l4x2-qwen3-coder", "h200", "h200-random"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid(repo, profile):
    r = bash(repo, "bash 00_env_check.sh --settings", PROFILE=profile)
    assert r.returncode == 0, r.stderr
    settings = dict(line.split("=", 1) for line in r.stdout.splitlines())
    assert settings["PROFILE"] == profile
    section = settings["SERVER_PACKAGES"].strip("'")
    assert f"[{section}]" in (repo / "env_freeze.txt").read_text().splitlines()


def test_environment_wins_over_profile_wins_over_defaults(repo):
    def value(name, **env):
        out = bash(repo, "bash 00_env_check.sh --settings", **env).stdout
        return dict(line.split("=", 1) for line in out.splitlines())[name]

    assert value("MAX_MODEL_LEN", PROFILE="cpu-smollm2") == "8192"
    assert value("MAX_MODEL_LEN", PROFILE="h200") == "32768"
    assert value("MAX_MODEL_LEN", PROFILE="cpu-smollm2", MAX_MODEL_LEN="4096") == "4096"
    assert value("CPU_MODEL_W", PROFILE="cpu-smollm2", CPU_MODEL_W="") == "''"  # set to nothing: the estimate is off
    assert value("CHECK_IDLE_S", CHECK_IDLE_S="0.0") == value("CHECK_IDLE_S", CHECK_IDLE_S="0") == "0"  # stages compare with it
    assert value("CHECK_IDLE_S", CHECK_IDLE_S="0.50") == "0.50"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"PORT": "eight"}, "setting PORT='eight': expected a port, 1 to 65535"),
        ({"PORT": "0"}, "PORT='0': expected a port"),
        ({"PROXY_PORT": "99999"}, "PROXY_PORT='99999': expected a port"),
        ({"PORT": "8003", "CONCURRENCY": "4"}, "PORT='8003' is one of the 4 ports from PROXY_PORT=8001 on"),
        ({"SAMPLER_HZ": "0"}, "SAMPLER_HZ='0': expected a number above 0"),
        ({"SAMPLER_HZ": "200"}, "SAMPLER_HZ='200': expected at most 100"),
        ({"GPUS": "x"}, "GPUS='x': expected auto, none, or a list such as 0,1"),
        ({"CALIB_REPS": "0"}, "CALIB_REPS='0': expected a whole number from 1 on"),
        ({"GPU_MEMORY_UTILIZATION": "7"}, "GPU_MEMORY_UTILIZATION='7': expected a fraction"),
        ({"SERVER_THREADS": "x"}, "SERVER_THREADS='x': expected a whole number from 1 on"),
        ({"CPU_MODEL_W": "5:3"}, "CPU_MODEL_W='5:3': expected IDLE:BUSY watts per logical CPU, of which busy is the larger"),
        ({"MODEL": "models/x/"}, "SERVED_MODEL='': expected a name"),
        ({"PROFILE": "nope"}, "PROFILE=nope: no file"),
        ({"PROFILE": "h200", "PORT": "8001"}, "PORT and PROXY_PORT are both 8001"),
        ({"CPU_MODEL_W": "65"}, "CPU_MODEL_W='65': expected IDLE:BUSY"),
        ({"MODE": "repaly"}, "MODE='repaly': expected live or replay"),
        ({"CALIB_CONTEXTS": "1k,2k"}, "CALIB_CONTEXTS='1k,2k'"),
        ({"DATA_DIR": ""}, "DATA_DIR='': expected a folder"),
        ({"RESULTS_DIR": ""}, "RESULTS_DIR='': expected a folder"),
        ({"CALIB_NAME": ""}, "CALIB_NAME='': expected a folder's name"),
        ({"CALIB_NAME": ".."}, "CALIB_NAME='..': expected a folder's name"),
        ({"SERVER_READY_S": "090"}, "SERVER_READY_S='090': expected a number above 0, such as 90"),
        ({"SAMPLER_HZ": "08"}, "SAMPLER_HZ='08': expected a number above 0"),
        ({"CHECK_WAIT_S": "08"}, "CHECK_WAIT_S='08': expected a number"),
        ({"IDLE_S": "0.0"}, "IDLE_S='0.0': expected a number above 0"),
        ({"SERVER_PYTHON": "3.08"}, "SERVER_PYTHON='3.08': expected a version"),
        ({"PROFILE": "profiles/"}, "PROFILE=profiles/: no file profiles/; there are: cpu-smollm2.sh"),
    ],
)
def test_a_bad_setting_is_named_with_what_was_expected(repo, env, says):
    r = bash(repo, "bash 00_env_check.sh", **env)
    assert r.returncode == 2
    assert says in r.stderr
    assert len(r.stderr.strip().splitlines()) == 1


def test_a_misspelt_setting_is_told_once_and_is_no_error(repo, tmp_path):
    wrong = {"MAX_TURN": "MAX_TURNS", "CALIB_CONTEXT": "CALIB_CONTEXTS", "TRIAL_DEADLINE": "TRIAL_DEADLINE_S", "DATADIR": "DATA_DIR", "PORTS": "PORT"}
    right = ("NODE", "XDG_DATA_DIRS", "MODULE", "POST", "TRAJOULE_RUN_DIRS", "HOSTNAME")  # other words, other programs' names
    stages = "source common.sh; bash -c 'source common.sh'; TRAJOULE_CALLER=x bash -c 'source common.sh; echo on'"  # the last one is nested
    r = bash(repo, stages, **dict.fromkeys((*wrong, *right), "1"))
    assert r.returncode == 0 and r.stdout == "on\n"
    said = [line.partition("WARNING: ")[2] for line in r.stderr.splitlines()]
    assert sorted(said) == sorted(2 * [f"{a} is no setting and has no effect; is {b} meant? (config.sh has them all)" for a, b in wrong.items()])

    (tmp_path / "p=x.sh").write_text('MAX_TURN=3\nexport VLLM_X=1\n# : "${NO=1}"\n: "${MODE=live}" # a comment\nsource "$ROOT/profiles/cpu-smollm2.sh"\n')
    r = bash(repo, "source common.sh", PROFILE=str(tmp_path / "p=x.sh"))
    assert r.returncode == 0 and "MAX_TURN is no setting" in r.stderr and len(r.stderr.splitlines()) == 1
    (tmp_path / "q.sh").write_text(': "${MAX_TURN=3}"\n')
    r = bash(repo, "source common.sh", PROFILE=str(tmp_path / "q.sh"))
    assert r.returncode == 2 and f"{tmp_path}/q.sh: MAX_TURN is no setting" in r.stderr and len(r.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "stage",
    ["00_env_check", "01_setup", "02_serve_vllm", "03_calibrate", "04_run_trial", "05_oracle_check", "06_run_batch", "quickstart", "test"],
)
def test_help_shows_an_example(repo, stage):
    r = bash(repo, f"bash {stage}.sh --help")
    assert r.returncode == 0
    assert f"bash {stage}.sh" in r.stdout


def test_help_comes_whatever_the_settings_and_from_any_folder(repo, tmp_path):
    for env in ({"PROFILE": "nope"}, {"PORT": "x"}):
        for command in (f"cd {tmp_path} && bash {repo}/03_calibrate.sh --help", "bash quickstart.sh --help", "bash slurm/run.sh --help"):
            r = bash(repo, command, **env)
            assert r.returncode == 0 and r.stderr == "" and "  bash " in r.stdout


@pytest.mark.parametrize(
    ("command", "env", "says"),
    [
        ("bash 05_oracle_check.sh tasks", {}, "task list 'tasks': no such file"),
        ("bash 06_run_batch.sh nope.txt summarize-off 1", {}, "task list 'nope.txt'"),
        ("bash 06_run_batch.sh tasks/pilot.txt '' 1 --dry-run", {}, "POLICIES='': expected one or more"),
        ("bash 06_run_batch.sh tasks/pilot.txt summarize-of 1", {}, "policy 'summarize-of' is unknown"),
        ("bash 06_run_batch.sh tasks/pilot.txt summarize-off 1 --shard 5/4", {}, "--shard '5/4': expected i/n"),
        ("bash 06_run_batch.sh tasks/pilot.txt summarize-off 1 --shard 5/4 --dry-run", {}, "--shard '5/4': expected i/n"),
        ("bash 06_run_batch.sh tasks/pilot.txt summarize-off 1", {"DATA_DIR": "/proc/x"}, "see DATA_DIR=/proc/x"),
        ("bash 05_oracle_check.sh tasks/local.txt", {"DATA_DIR": "/proc/x"}, "see DATA_DIR=/proc/x"),
        ("bash 03_calibrate.sh --idle-bare", {"DATA_DIR": "/proc/x"}, "see DATA_DIR=/proc/x"),
        ("bash 00_env_check.sh --settings x", {}, "unknown argument 'x'"),
        ("bash 00_env_check.sh x", {}, "unknown argument 'x'"),
        ("bash 01_setup.sh x", {}, "unknown argument 'x'"),
        ("bash 02_serve_vllm.sh x", {}, "unknown argument 'x'"),
        ("bash 03_calibrate.sh --idle", {}, "unknown arguments '--idle'"),
        ("bash 06_run_batch.sh tasks/pilot.txt summarize-off 0", {}, "REPETITIONS='0': expected a whole number from 1"),
        ("bash slurm/run.sh tasks/pilot.txt summarize-off 0", {}, "REPETITIONS='0': expected a whole number from 1"),
        ("bash slurm/run.sh tasks/pilot.txt summarize-off 1x --nodes 2", {}, "REPETITIONS='1x': expected a whole number from 1"),
        ("bash slurm/run.sh tasks/pilot.txt summarize-off 1 --nodes", {}, "--nodes: expected a whole number behind it"),
        ("bash slurm/run.sh tasks/pilot.txt summarize-off 1 --nodes -- -p gpu", {}, "--nodes: expected a whole number behind it"),
        ("bash slurm/run.sh tasks/pilot.txt summarize-off 1 --nodes 0", {}, "--nodes '0': expected a whole number from 1"),
        ("bash quickstart.sh x", {}, "unknown argument 'x'"),
        ("bash slurm/collect.sh x", {}, "unknown argument 'x'"),
        ("PY=/nope; source common.sh; PY=/nope; need_venv", {"PORT": "8123"}, "run `PROFILE=cpu-smollm2 PORT=8123 bash 01_setup.sh` first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(repo, command, env, says):
    r = bash(repo, command, PROFILE="cpu-smollm2", **env)
    assert r.returncode == 2
    assert says in r.stderr and len(r.stderr.strip().splitlines()) == 1, r.stderr


@pytest.mark.parametrize(
    ("kind", "env", "says"),
    [
        ("vllm", {"SERVER_KIND": "vllm", "SERVED_MODEL": "words"}, None),
        ("llamacpp", {"SERVED_MODEL": "words"}, None),
        ("openai", {"SERVER_KIND": "openai"}, None),  # what others serve has the name that they gave it
        ("vllm", {"SERVED_MODEL": "words"}, "is of kind vllm, the settings say SERVER_KIND=llamacpp"),
        ("llamacpp", {"SERVER_KIND": "vllm", "SERVED_MODEL": "words"}, "is of kind llamacpp, the settings say SERVER_KIND=vllm"),
        ("llamacpp", {}, "serves words, the settings say SERVED_MODEL=smollm2"),
    ],
)
def test_a_server_of_another_kind_or_model_is_refused(repo, kind, env, says):
    from fakes.model_server import ModelServer

    with ModelServer(kind) as s:
        port = s.url.rpartition(":")[2].strip("/")
        r = bash(repo, "source common.sh; need_server", PROFILE="cpu-smollm2", PORT=port, **env)
    if says is None:
        assert r.returncode == 0, r.stderr
        return
    assert r.returncode == 2 and len(r.stderr.strip().splitlines()) == 1
    assert says in r.stderr and f"PORT={port}" in r.stderr and "bash 02_serve_vllm.sh`" in r.stderr


def test_a_batch_does_not_plan_a_policy_that_the_servers_context_is_too_small_for(repo, tmp_path):
    from fakes.model_server import ModelServer

    with ModelServer("llamacpp", max_context=8192) as s:
        where = {"DATA_DIR": str(tmp_path / "data"), "RESULTS_DIR": str(tmp_path / "results"), "TRAJOULE_RUN_DIR": str(tmp_path), "SERVED_MODEL": "words"}
        port = s.url.rpartition(":")[2].strip("/")
        r = bash(repo, "bash 06_run_batch.sh tasks/pilot.txt 'summarize-off summarize-8k' 1", PROFILE="cpu-smollm2", PORT=port, **where)
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1
    assert "policy summarize-8k needs a context of at least 10240 tokens, the server offers 8192: raise MAX_MODEL_LEN or" in r.stderr
    assert not (tmp_path / "data/traj/plan.csv").exists()


def test_a_calibration_is_not_mended_with_another_server(repo, tmp_path):
    from fakes.model_server import ModelServer

    for folder in ("data/calib", "results/calib"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/calib/samples.done").write_text("llamacpp words 0.9\n")
    (tmp_path / "data/calib/idle_loaded.csv").write_text("as it was")
    (tmp_path / "results/calib/params.json").write_text("{}")
    with ModelServer("llamacpp") as s:
        where = {"DATA_DIR": str(tmp_path / "data"), "RESULTS_DIR": str(tmp_path / "results"), "TRAJOULE_LOCK_DIR": str(tmp_path)}
        port = s.url.rpartition(":")[2].strip("/")
        r = bash(repo, "bash 03_calibrate.sh --idle-loaded", PROFILE="cpu-smollm2", PORT=port, SERVED_MODEL="words", **where)
    assert r.returncode == 2 and "is of another model or server (llamacpp words 0.9)" in r.stderr and "FORCE=1" in r.stderr, r.stderr
    assert (tmp_path / "data/calib/idle_loaded.csv").read_text() == "as it was"


def test_one_measurement_at_a_time_unless_each_names_gpus_of_its_own(repo, tmp_path):
    def second(first, then, **env):
        script = f"source common.sh; GPUS={first}; measuring_lock; GPUS={then} bash -c 'source common.sh; measuring_lock; echo both'"
        r = bash(repo, script, PROFILE="cpu-smollm2", TRAJOULE_LOCK_DIR=str(tmp_path), **env)
        return r.stdout == "both\n", r.stderr

    assert second("0", "1")[0]
    assert second("0", "auto", CUDA_VISIBLE_DEVICES="1")[0]
    for first, then in (("0", "0"), ("0,1", "1,2"), ("auto", "auto"), ("none", "1"), ("1", "none")):
        both, err = second(first, then)
        assert not both and "something else is measuring on this machine (process " in err
    r = bash(repo, "source common.sh; measuring_lock; measuring_unlock; bash -c 'source common.sh; measuring_lock; echo both'",
             PROFILE="cpu-smollm2", TRAJOULE_LOCK_DIR=str(tmp_path))  # fmt: skip
    assert r.stdout == "both\n"


def test_a_lock_is_the_machines_unless_a_folder_is_named(repo, tmp_path):
    shown = "source common.sh; echo $TRAJOULE_LOCK_DIR $RUN_DIR; bash -c 'source common.sh; echo $TRAJOULE_LOCK_DIR $RUN_DIR'"
    assert bash(repo, shown).stdout == f"/tmp {repo}/.cache/run\n" * 2
    assert bash(repo, shown, TRAJOULE_RUN_DIR=str(tmp_path)).stdout == f"{tmp_path} {tmp_path}\n" * 2


def test_a_terminated_stage_says_what_goes_on_once(repo, tmp_path):
    (tmp_path / "outer.sh").write_text(f"source {repo}/common.sh; stage {tmp_path}/inner.sh\n")
    (tmp_path / "inner.sh").write_text(f"source {repo}/common.sh; next inner; touch {tmp_path}/runs; supervise -- sleep 60\n")
    p = subprocess.Popen(["bash", tmp_path / "outer.sh", "a b"], cwd=repo, env=clean(PROFILE="cpu-smollm2"), stderr=subprocess.PIPE, text=True)
    assert wait_for((tmp_path / "runs").exists)
    p.terminate()
    _, err = p.communicate(timeout=30)
    assert p.returncode == 143
    assert err.splitlines()[0].endswith(f"outer: interrupted; `PROFILE=cpu-smollm2 bash {tmp_path}/outer.sh a\\ b` goes on") and "inner" not in err


def test_sudo_setup_shows_before_it_does(repo):
    r = bash(repo, "bash sudo_setup.sh --dry-run")
    assert r.returncode == 0
    assert "udev" in r.stdout and "powercap" in r.stdout
    assert not Path("/etc/udev/rules.d/60-trajoule-powercap.rules").exists()
    assert bash(repo, "bash sudo_setup.sh --foo").returncode == 2


def test_the_containers_of_a_stage_go_with_it_and_no_others(repo, tmp_path):
    """A stand-in for docker that lists the containers of two trials; the stage is of one of them and is terminated."""
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin/docker"
    docker.write_text(f"""#!/bin/sh
[ "$1" = ps ] && cat {tmp_path}/running
[ "$1" = rm ] && echo "$3" >>{tmp_path}/removed && sed -i "/^$3 /d" {tmp_path}/running
exit 0
""")
    docker.chmod(0o755)
    (tmp_path / "running").write_text("c1 fix-git__abc__env\nc2 fix-git__other__env\nc3\n")
    (tmp_path / "d e/harbor/fix-git__ABC").mkdir(parents=True)
    ours = f"clean_containers() {{ remove_containers '{tmp_path}/d e'; }}"
    (tmp_path / "stage.sh").write_text(f"source {repo}/common.sh; {ours}; touch {tmp_path}/runs; supervise -- sleep 60\n")
    env = clean(PROFILE="cpu-smollm2", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    p = subprocess.Popen(["bash", tmp_path / "stage.sh"], cwd=repo, env=env, stderr=subprocess.PIPE, text=True)
    assert wait_for((tmp_path / "runs").exists)
    p.terminate()
    _, err = p.communicate(timeout=30)
    assert p.returncode == 143 and "removing the containers that fix-git__ABC left" in err
    assert (tmp_path / "removed").read_text() == "c1\n" and (tmp_path / "running").read_text() == "c2 fix-git__other__env\nc3\n"


@pytest.mark.parametrize("arguments", ["--undo --dry-run", "--dry-run --undo"])
def test_sudo_setup_takes_back_what_it_did_and_nothing_else(repo, tmp_path, arguments):
    rule = tmp_path / "r.rules"
    rule.write_text("# done: group powercap\n# done: member powercap ann\n# done: member docker ann\n# done: member powercap bob\nSUBSYSTEM==...\n")
    r = bash(repo, f"bash sudo_setup.sh {arguments}", ENERGY_RULE=str(rule))
    assert r.returncode == 0 and rule.exists()
    steps = [x.strip() for x in r.stdout.splitlines() if x.startswith("  ")]
    assert steps[0] == f"rm -f {rule}"
    assert steps[-4:] == ["gpasswd -d ann powercap", "gpasswd -d ann docker", "gpasswd -d bob powercap", "groupdel powercap"]
    again = bash(repo, "bash sudo_setup.sh --dry-run", ENERGY_RULE=str(rule)).stdout  # a second set-up keeps the notes of the first
    assert "member\\ docker\\ ann" in again
    rule.write_text("SUBSYSTEM==...\n")  # who was in the group docker before stays in it
    assert "gpasswd -d ann" not in bash(repo, f"bash sudo_setup.sh {arguments}", ENERGY_RULE=str(rule)).stdout


# ---- context policies


@pytest.mark.parametrize(
    ("policy", "context", "kwargs"),
    [
        ("summarize-off", 32768, {"enable_summarize": False}),
        ("summarize-8k", 32768, {"enable_summarize": True, "proactive_summarization_threshold": 32768 - 8192}),
        ("summarize-2k", 8192, {"enable_summarize": True, "proactive_summarization_threshold": 8192 - 2048}),
        ("summarize-on", 32768, {"enable_summarize": True, "proactive_summarization_threshold": 8000}),
    ],
)
def test_policy_becomes_the_threshold_of_free_tokens(policy, context, kwargs):
    assert trial.policy_kwargs(policy, context) == kwargs


@pytest.mark.parametrize(
    ("policy", "context", "says"),
    [
        ("summarize-8k", 8192, "needs a context of at least 10240 tokens"),
        ("summarize-on", 8192, "would summarize before every call"),
        ("summarize-0k", 8192, "unknown"),
        ("summarize-" + "9" * 5000 + "k", sys.maxsize, r"unknown; expected .* with N from 1 to 99999"),
        ("sumarize-8k", 32768, "unknown"),
    ],
)
def test_a_policy_that_cannot_do_what_it_says_is_refused(policy, context, says):
    with pytest.raises(trial.BadInput, match=says):
        trial.policy_kwargs(policy, context)


def test_task_is_a_folder_a_name_or_a_dataset(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "task.toml").touch()
    assert trial.find_task("t", tmp_path) == ("t", {"tasks": [{"path": str(tmp_path / "t")}]})
    assert trial.find_task(str(tmp_path / "t"), "nowhere")[0] == "t"
    assert trial.find_task("terminal-bench@2.0/fix-git", tmp_path) == (
        "fix-git",
        {"datasets": [{"name": "terminal-bench", "version": "2.0", "task_names": ["fix-git"]}]},
    )
    with pytest.raises(trial.BadInput, match="not in"):
        trial.find_task("u", tmp_path)


def test_a_linked_task_has_the_name_of_its_link_from_the_plan_to_the_trial(repo, tmp_path):
    write_tasks(tmp_path / "elsewhere", ["real"])
    (tmp_path / "alias").symlink_to(tmp_path / "elsewhere/real")
    assert trial.find_task("alias", tmp_path) == ("alias", {"tasks": [{"path": str(tmp_path / "alias")}]})
    row = plan.make(plan.single({"alias": "line 1"}, tmp_path), ["summarize-off"], 1, "live", 1, "")[0]
    r = prepare(repo, tmp_path / plan.name(row), task="alias", tasks_dir=tmp_path)
    assert r.returncode == 0 and json.loads((tmp_path / "alias__summarize-off__r1/request.json").read_text())["task"] == "alias", r.stderr


def prepare(repo, folder, preexec_fn=None, **more):
    values = dict(dir=folder, task="tidy-files", tasks_dir="tasks/local", registry="", policy="summarize-off", rep=1,
                  mode="live", recording="", model="m", context=8192, profile="p", environment="local_env", server_kind="openai", server_version="-",
                  proxy_url="http://x", temperature="", max_turns="", max_output_tokens=9, agent_timeout="", llm_timeout=9, schema="",
                  deadline=600) | more  # fmt: skip
    command = [sys.executable, "stages/trial.py", "prepare", *(f"--{k.replace('_', '-')}={v}" for k, v in values.items())]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, preexec_fn=preexec_fn)


@pytest.mark.parametrize(
    ("agent_timeout", "deadline", "in_force"),
    [("", 600, 900 + 360 + 900 + 60), ("", 7200, 7200), ("40", 600, 900 + 360 + 40 + 60)],
)
def test_a_trial_is_never_cut_before_its_own_limits(repo, tmp_path, agent_timeout, deadline, in_force):
    """sqlite-query allows itself 900 s of build, 900 s of agent and 60 s of verifier; Harbor 360 s to set the agent up."""
    r = prepare(repo, tmp_path / "sqlite-query__summarize-off__r1", task="sqlite-query", agent_timeout=agent_timeout, deadline=deadline)
    assert r.returncode == 0 and float(r.stdout) == in_force, r.stderr
    assert len(r.stderr.splitlines()) == 1


# ---- how a trial ended


def finished(tmp_path, harbor_exit, result=None, **more):
    folder = tmp_path / "t__summarize-off__r1"
    (folder / "harbor" / "t__x").mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps({"schema": 1, "trajectory": folder.name}))
    if result is not None:
        (folder / "harbor" / "t__x" / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    a = dict(dir=folder, harbor_exit=harbor_exit, deadline=9.0, t_begin=1.0, t_end=2.0, server_down=False, broken=None, calib=None) | more
    code = trial.finish(type("A", (), a))
    return code, json.loads((folder / "trial.json").read_text())


GOOD = {"verifier_result": {"rewards": {"reward": 1.0}}, "exception_info": None}


def test_a_measured_trial_ends_with_its_reward(tmp_path):
    code, t = finished(tmp_path, 0, GOOD)
    assert (code, t["ended"], t["reward"]) == (0, "finished", 1.0)
    assert not (tmp_path / "t__summarize-off__r1" / "request.json").exists()


@pytest.mark.parametrize("kind", ["AgentTimeoutError", "ContextLengthExceededError", "OutputLengthExceededError"])
def test_what_the_agent_did_is_no_infrastructure_failure(tmp_path, kind):
    code, t = finished(tmp_path, 0, {"exception_info": {"exception_type": kind}, "verifier_result": None})
    assert (code, t["exception"], t["reward"]) == (0, kind, None)


@pytest.mark.parametrize(
    ("harbor_exit", "result", "ended"),
    [
        (0, None, "harbor_failed"),
        (124, None, "deadline"),
        (143, None, "interrupted"),
        (0, '{"verifier_result": {"rew', "harbor_failed"),
        (0, {"exception_info": {"exception_type": "EnvironmentStartTimeoutError"}}, "finished"),
    ],
)
def test_infrastructure_failures_exit_with_3_and_a_reason(tmp_path, harbor_exit, result, ended):
    code, t = finished(tmp_path, harbor_exit, result)
    assert code == 3
    assert t["ended"] == ended
    assert t["reason"]


def test_a_trial_whose_sampler_died_is_an_infrastructure_failure(tmp_path):
    code, t = finished(tmp_path, 0, GOOD, broken="the sampler ended badly (exit 137)")
    assert (code, t["ended"], t["reason"]) == (3, "harness_failed", "the sampler ended badly (exit 137)")


def test_a_harbor_that_was_ended_because_the_sampler_died_is_not_the_one_to_blame(tmp_path):
    code, t = finished(tmp_path, 123, broken="the sampler ended badly (exit 137)")
    assert (code, t["ended"], t["reason"]) == (3, "harness_failed", "the sampler ended badly (exit 137)")


# ---- plans


def test_plan_interleaves_repetitions_and_keeps_what_is_planned(tmp_path):
    tasks, policies = ["a", "b", "c"], ["p", "q"]
    rows = plan.make(tasks, policies, 3, "live", 1, "")
    assert [r["rep"] for r in rows] == [1] * 6 + [2] * 6 + [3] * 6
    assert {(r["task"], r["policy"]) for r in rows[:6]} == {(t, p) for t in tasks for p in policies}
    assert [(r["task"], r["policy"]) for r in rows[:6]] != [(r["task"], r["policy"]) for r in rows[6:12]]
    assert rows == plan.make(tasks, policies, 3, "live", 1, "")

    write_tasks(tmp_path, ["a", "b"])
    lists = tmp_path / "list.txt"
    lists.write_text("# two tasks\na\nb # with a comment\n")
    out = tmp_path / "plan.csv"

    def run(*more):
        cmd = [sys.executable, "stages/plan.py", "--list", lists, "--tasks-dir", tmp_path, "--policies", "summarize-off summarize-4k", "--plan", out, "--show"]
        cmd += more
        return subprocess.run(cmd, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout.splitlines()

    first = run("--reps", "1")
    assert len(first) == 4
    before = out.read_text()
    assert run("--reps", "1") == first and out.read_text() == before
    assert len(run("--reps", "2")) == 8
    with open(out) as f:
        assert [r["order"] for r in csv.DictReader(f)] == [str(i) for i in range(1, 9)]
    shards = [run("--reps", "2", "--shard", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(sum(shards, [])) == sorted(run("--reps", "2"))


def test_a_trajectory_is_never_taken_for_one_of_another_kind(tmp_path):
    for name in ("01-solve.json", "02-fail.json"):
        (tmp_path / "rec/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "rec/a" / name).touch()
    write_tasks(tmp_path, ["a"])
    (tmp_path / "l.txt").write_text("a\n")
    traj = tmp_path / "traj"

    def run(mode, *more):
        cmd = [sys.executable, "stages/plan.py", "--list", tmp_path / "l.txt", "--policies", "summarize-on", "--plan", traj / "plan.csv", "--mode", mode,
               "--tasks-dir", tmp_path, "--recordings", tmp_path / "rec", "--show", *more]  # fmt: skip
        r = subprocess.run(cmd, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
        return r.returncode, r.stdout, r.stderr

    row = f"a\tsummarize-on\t1\treplay\topen\t{tmp_path}/rec/a/01-solve.json\n"
    assert run("replay", "--dry-run") == (0, row, "") and not traj.exists()
    assert run("replay") == (0, row, "")
    code, out, err = run("live")
    assert (code, out) == (2, "") and "a__summarize-on__r1 is planned as replay of 01-solve.json, asked for is live" in err

    folder = traj / "a__summarize-on__r1"
    folder.mkdir()
    measured = {"mode": "replay", "recording": {"file": "rec/a/01-solve.json"}}
    (folder / "trial.json").write_text(json.dumps(measured))
    assert "\tmeasured\t" in run("replay")[1] and "\tmeasured\t" in run("replay", "--dry-run")[1]
    (folder / "trial.json").write_text(json.dumps({"mode": "live", "recording": None}))
    code, out, err = run("replay")
    assert (code, out) == (2, "") and f"{folder} is measured as live, asked for is replay of 01-solve.json" in err
    (folder / "trial.json").write_text("{")
    assert run("replay")[0] == 2 and "trial.json cannot be read" in run("replay")[2]

    (folder / "trial.json").write_text(json.dumps(measured))
    kept = [sys.executable, "stages/trial.py", "kept", "--dir", folder, "--mode"]
    r = subprocess.run([*kept, "replay", "--recording", "01-solve.json"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert r.returncode == 0 and "finished already" in r.stdout
    (folder / "trial.json").write_text(json.dumps(measured | {"ended": "server_down", "reason": "the model server did not answer"}))
    r = subprocess.run([*kept, "replay", "--recording", "01-solve.json"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert r.returncode == 3 and "failed for infrastructure reasons: the model server did not answer (" in r.stdout and len(r.stdout.splitlines()) == 1
    r = subprocess.run([*kept, "live"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert r.returncode == 2 and "is measured as replay of 01-solve.json, asked for is live" in r.stderr


def test_the_idle_baseline_of_a_batch_is_taken_from_idle_counters_only(repo, tmp_path):
    quiet = repo / "tests/data/h200_qwen3_30b_a3b/idle_loaded.csv"
    assert trial.idle_rested(quiet) == {"gpu0": pytest.approx(124.9, abs=0.1)}
    assert trial.idle_rested(quiet.with_name("samples.csv")) == {}  # calls ran in it
    (tmp_path / "short.csv").write_text("".join(quiet.read_text().splitlines(keepends=True)[:20]))
    assert trial.idle_rested(tmp_path / "short.csv") == {}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--context", "8192", "--policies", "summarize-off summarize-8k"], "policy summarize-8k needs a context of at least 10240 tokens"),
        (["--policies", "summarize-of"], "policy 'summarize-of' is unknown"),
        (["--policies", " "], "POLICIES=' ': expected one or more"),
        (["--policies", "summarize-on summarize-on"], "more than once"),
        (["--shard", "5/4"], "--shard '5/4': expected i/n"),
        (["--shard", "x"], "--shard 'x': expected i/n"),
        (["--reps", "0"], "--reps 0: expected a whole number from 1"),
        (["--list", "tasks"], "tasks"),
        (["--list", "results/calib/residuals_gpu.png"], "no text file"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_exit_code_2(repo, tmp_path, more, says):
    cmd = [sys.executable, "stages/plan.py", "--list", "tasks/pilot.txt", "--policies", "summarize-off", "--plan", tmp_path / "plan.csv", "--dry-run", *more]
    r = subprocess.run(cmd, cwd=repo, capture_output=True, text=True)
    assert (r.returncode, r.stdout, len(r.stderr.splitlines())) == (2, "", 1) and says in r.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<html>404</html>\n", "found no plan, expected the columns order,task"),
        ("{head}1,a,p,1,live,,1\n2,a,p,1,live,,1\n", "line 3: a__p__r1 stands there twice"),
        ("{head}1,a,p,1,live,,1\n\0\0\0\0", "line 3"),
        ("{head}1,a,p,one,live,,1\n", "line 2: found '1', 'one', expected whole numbers"),
    ],
)
def test_a_damaged_plan_is_named_and_not_replaced(tmp_path, text, says):
    path = tmp_path / "plan.csv"
    path.write_text(text.replace("{head}", ",".join(plan.FIELDS) + "\n"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=says) as e:
        plan.read_plan(path)
    assert str(path) in str(e.value) and path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [("# nothing\n", "l.txt: no task"), ("a\nb\n\nset/a\n", "l.txt, line 4: 'set/a': a task a stands there more than once, in line 1 too")],
)
def test_a_bad_task_list_is_named(tmp_path, text, says):
    (tmp_path / "l.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        plan.read_list(tmp_path / "l.txt")


def test_a_list_may_come_from_windows(tmp_path):
    (tmp_path / "l.txt").write_bytes("\ufeffa\r\n\r\nb # with a comment\r\n".encode())
    assert plan.read_list(tmp_path / "l.txt") == {"a": f"{tmp_path}/l.txt, line 1", "b": f"{tmp_path}/l.txt, line 3"}


def write_tasks(folder, names, text=""):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "task.toml").write_text(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nope", "task 'nope' is no folder with a task.toml, not in"),
        ("hollow", "task 'hollow' is no folder with a task.toml"),
        ("set", "'set' is many tasks; 05_oracle_check.sh"),
        ("broken", "broken/task.toml: Expected ']'.*line 2"),
        ("silent", "no recording in"),
    ],
)
def test_a_bad_line_of_a_task_list_is_named_with_its_number(tmp_path, line, says):
    write_tasks(tmp_path, ["good", "silent", "set/a"])
    write_tasks(tmp_path, ["broken"], "\n[agent\n")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "rec/good").mkdir(parents=True)
    (tmp_path / "rec/good/01.json").touch()
    (tmp_path / "l.txt").write_text(f"good\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/l.txt, line 3: .*{says}"):
        plan.single(plan.read_list(tmp_path / "l.txt"), tmp_path, tmp_path / "rec")
    (tmp_path / "l.txt").write_text("good\n")
    assert plan.single(plan.read_list(tmp_path / "l.txt"), tmp_path, tmp_path / "rec") == ["good"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[agent\n", "line 1"),
        (b"\xef\xbb\xbf[agent]\n", "it begins with a byte order mark"),
        (b"[agent]\nname = '\xff'\n", "invalid start byte"),
        (b"agent = 3\n", r"agent: found 3, expected a table \[agent\]"),
        (b"[agent]\ntimeout_sec = '60'\n", r"timeout_sec of \[agent\]: found '60', expected seconds"),
        (b"[verifier]\ntimeout_sec = nan\n", r"timeout_sec of \[verifier\]: found nan, expected seconds"),
        (b"[environment]\nmemory_mb = '2048'\n", r"memory_mb of \[environment\]: found '2048', expected MB, a number"),
        (b"[environment]\ndocker_image = 3\n", r"docker_image of \[environment\]: found 3, expected the name of an image"),
    ],
)
def test_a_broken_task_toml_is_named_and_leaves_no_folder(repo, tmp_path, text, says):
    write_tasks(tmp_path, ["t"])
    (tmp_path / "t/task.toml").write_bytes(text)
    r = prepare(repo, tmp_path / "t__summarize-off__r1", task="t", tasks_dir=tmp_path)
    assert (r.returncode, r.stdout, r.stderr.count("\n")) == (2, "", 1) and re.search(f"{tmp_path}/t/task.toml: .*{says}", r.stderr), r.stderr
    assert not (tmp_path / "t__summarize-off__r1").exists()


def test_the_check_of_tasks_names_every_one_that_cannot_be_used(repo, tmp_path):
    write_tasks(tmp_path, ["memory"], "[environment]\nmemory_mb = '2048'\n")
    write_tasks(tmp_path, ["image"], "[environment]\ndocker_image = 3\n")
    write_tasks(tmp_path, ["good"])
    (tmp_path / "l.txt").write_text("memory\ngood\nimage\n")
    r = bash(repo, f"bash 00_env_check.sh --tasks {tmp_path}/l.txt", PROFILE="cpu-smollm2", TASKS_DIR=str(tmp_path))
    assert r.returncode == 1 and "Traceback" not in r.stdout + r.stderr
    said = r.stdout.partition("tasks of ")[2].splitlines()
    assert [x.strip() for x in said if "MISSING" in x] == [
        f"MISSING  {tmp_path}/memory/task.toml: memory_mb of [environment]: found '2048', expected MB, a number",
        f"MISSING  {tmp_path}/image/task.toml: docker_image of [environment]: found 3, expected the name of an image, in quotes"]  # fmt: skip


def test_a_trial_that_cannot_be_prepared_leaves_no_folder(repo, tmp_path):
    (tmp_path / "s.json").write_text("{")
    r = prepare(repo, tmp_path / "tidy-files__summarize-off__r1", schema=tmp_path / "s.json")
    assert r.returncode == 2 and f"RESPONSE_SCHEMA={tmp_path}/s.json: Expecting" in r.stderr
    r = prepare(repo, tmp_path / "tidy-files__summarize-off__r1", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))
    assert r.returncode == 2 and "File too large" in r.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_recordings_serve_repetitions_in_turn(tmp_path):
    (tmp_path / "t").mkdir()
    for n in ("02-b.json", "01-a.json"):
        (tmp_path / "t" / n).touch()
    assert [Path(plan.recording_of(tmp_path, "t", r)).stem for r in (1, 2, 3)] == ["01-a", "02-b", "01-a"]
    with pytest.raises(ValueError, match="no recording"):
        plan.recording_of(tmp_path, "u", 1)


# ---- a full disk


@pytest.fixture
def full_disk():
    """Files cannot grow beyond 300 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, full_disk):
    rows = [{"a": "x" * 50, "b": i} for i in range(20)]
    recorder = llm_proxy.Recorder(tmp_path / "rec.json")
    writers = {
        "t.csv": lambda path: csvfiles.write(path, ["a", "b"], rows),
        "log.csv": lambda path: csvfiles.append(path, ["a", "b"], rows),
        "o.json": lambda path: energylib.write_json_atomic(path, rows),
        "rec.json": lambda _: recorder.add("s", 1, {"kind": "agent", "content": "x" * 500}, "m", []),
    }
    for name, write in writers.items():
        for old in (None, "as it was\n"):
            if old:
                (tmp_path / name).write_text(old)
            with pytest.raises(OSError, match=f"File too large.*{name}" if name != "rec.json" else "File too large"):
                write(tmp_path / name)
            if old:
                assert (tmp_path / name).read_text() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(writers)


def test_a_model_that_cannot_be_copied_leaves_no_part_of_it(tmp_path):
    key = llamacpp.CONTEXT_KEY
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<Q", len(key)) + key + struct.pack("<II", llamacpp.GGUF_UINT32, 512) + bytes(5000))
    copy = f"import pathlib, sys; from servers import llamacpp; llamacpp.with_context(sys.argv[1], 1024, pathlib.Path({str(tmp_path / 'c')!r}))"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))  # noqa: E731
    r = subprocess.run([sys.executable, "-c", copy, tmp_path / "m.gguf"], cwd=Path(__file__).parent.parent, capture_output=True, text=True, preexec_fn=limit)
    assert r.returncode == 1 and "File too large" in r.stderr and not list((tmp_path / "c").iterdir()), r.stderr


def test_a_group_that_cannot_be_noted_is_not_run(tmp_path, run_dir, full_disk):
    p = supervise("--name", "x", "--", "sh", "-c", f"sleep 1; touch {tmp_path}/ran", "x" * 500, stderr=subprocess.PIPE, text=True)
    err = p.communicate(timeout=20)[1]
    assert p.returncode == 125 and err == f"supervise: {run_dir}/x.json: File too large; without this note sh is not run\n"
    assert not list(run_dir.iterdir()) and not (tmp_path / "ran").exists()


# ---- processes


def supervise(*args, **kw):
    return subprocess.Popen([sys.executable, "stages/supervise.py", *args], cwd=Path(__file__).parent.parent, **kw)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAJOULE_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_exit_codes_pass_through():
    assert supervise("--", "sh", "-c", "exit 7").wait(20) == 7
    assert supervise("--", "sh", "-c", "kill -9 $$").wait(20) == 137
    assert supervise("--", "/nonexistent").wait(20) == 125
    assert supervise("--deadline", "0.3", "--", "sleep", "60").wait(20) == 124
    sampler = subprocess.Popen(["sleep", "60"])
    needy = supervise("--needs", str(os.getpid()), "--needs", str(sampler.pid), "--", "sleep", "60")
    with pytest.raises(subprocess.TimeoutExpired):
        needy.wait(1)
    sampler.kill()  # and not waited for: a zombie measures nothing
    assert needy.wait(20) == 123
    assert supervise("--needs", str(sampler.pid), "--", "sleep", "60").wait(20) == 123
    sampler.wait()


def test_nothing_is_left_of_a_command_not_even_a_session_of_its_own(tmp_path):
    note = tmp_path / "pid"
    assert supervise("--", "bash", "-c", f"setsid sleep 300 & echo $! > {note}; sleep 0.2").wait(20) == 0
    assert wait_for(lambda: not alive(int(note.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_stage_killed_by_kill_9_takes_its_processes_along(tmp_path):
    note = tmp_path / "pid"
    stage = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} stages/supervise.py -- bash -c 'echo $$ > {note}; sleep 300 & wait' & wait"],
        cwd=Path(__file__).parent.parent,
    )
    assert wait_for(note.exists) and wait_for(lambda: note.read_text().strip())
    pid = int(note.read_text())
    assert alive(pid)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert wait_for(lambda: not alive(pid))


def test_a_command_whose_starter_died_before_the_supervisor_was_up_is_not_run(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert supervise("--parent", str(gone.pid), "--", "touch", str(tmp_path / "ran")).wait(20) == 0
    assert not (tmp_path / "ran").exists()
    assert supervise("--parent", str(os.getpid()), "--", "touch", str(tmp_path / "ran")).wait(20) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_leftover_of_a_killed_supervisor_is_ended_by_the_next_start(tmp_path, run_dir):
    note = tmp_path / "pid"
    s = supervise("--name", "x", "--", "bash", "-c", f"sleep 300 & echo $! > {note}; wait")
    assert wait_for(lambda: note.exists() and note.read_text().strip())
    assert wait_for((run_dir / "x.json").exists)
    s.send_signal(signal.SIGKILL)
    s.wait()
    left = int(note.read_text())  # the command itself dies with its supervisor, its child does not
    assert alive(left)
    second = supervise("--name", "x", "--", "true", stderr=subprocess.PIPE, text=True)
    _, err = second.communicate(timeout=30)
    assert second.returncode == 0
    assert "left over" in err
    assert wait_for(lambda: not alive(left))
    assert not (run_dir / "x.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_server_started_with_nohup_outlives_its_shell_but_not_its_stage(tmp_path, run_dir):
    note = tmp_path / "pid"
    command = f"{sys.executable} stages/supervise.py --name z --detachable -- bash -c 'echo $$ > {note}; sleep 300 & wait'"
    shell_command = f"nohup {command} & until [[ -s {note} ]]; do sleep 0.1; done"
    shell = subprocess.Popen(["bash", "-c", shell_command], cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
    assert shell.wait(30) == 0
    time.sleep(0.5)  # to die it would need a moment
    pid = int(note.read_text())
    assert alive(pid)
    assert wait_for((run_dir / "z.json").exists)
    os.kill(json.loads((run_dir / "z.json").read_text())["supervisor"], signal.SIGHUP)
    time.sleep(0.5)
    assert alive(pid)
    os.kill(json.loads((run_dir / "z.json").read_text())["supervisor"], signal.SIGTERM)
    assert wait_for(lambda: not alive(pid))

    note.unlink()
    outer = supervise("--", "bash", "-c", f"exec {command}")  # as start_server does
    assert wait_for(lambda: note.exists() and note.read_text().strip())
    pid = int(note.read_text())
    outer.send_signal(signal.SIGKILL)
    outer.wait()
    assert wait_for(lambda: not alive(pid))


def test_two_of_one_name_are_refused(run_dir):
    first = supervise("--name", "y", "--", "sleep", "60")
    assert wait_for((run_dir / "y.json").exists)
    second = supervise("--name", "y", "--", "true", stderr=subprocess.PIPE, text=True)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 1 and "already runs" in err
    first.terminate()
    assert first.wait(20) == 143


# ---- a stage that needs a server says which command starts it


def test_a_trial_without_a_server_names_the_command(repo, tmp_path, free_port):
    env = dict(PROFILE="cpu-smollm2", PORT=str(free_port()), DATA_DIR=str(tmp_path / "d"), RESULTS_DIR=str(tmp_path / "r"), MODE="live")
    env["TRAJOULE_RUN_DIR"] = str(tmp_path)
    r = bash(repo, "timeout 50 bash 04_run_trial.sh tidy-files summarize-off 1", **env)
    assert r.returncode == 1
    assert "bash 02_serve_vllm.sh" in r.stderr.splitlines()[-1]
    assert not list((tmp_path / "d").glob("traj/*/trial.json"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "expected TASK POLICY REP"),
        ("tidy-files summarize-off", "expected TASK POLICY REP"),
        ("tidy-files summarize-off zero", "REP='zero'"),
        ("tidy-file summarize-off 1", "task 'tidy-file' is no folder with a task.toml, not in tasks/local (of 23 tasks, such as tidy-files"),
        ("tidy-files sumarize-off 1", "policy 'sumarize-off' is unknown"),
        ("tidy-files summarize-off 1 x.json", "RECORDING='x.json': with MODE=live nothing is replayed"),
    ],
)
def test_a_trial_with_wrong_arguments_is_refused_before_anything_else(repo, tmp_path, args, says):
    r = bash(repo, f"bash 04_run_trial.sh {args}", PROFILE="cpu-smollm2", MODE="live", DATA_DIR=str(tmp_path / "d"), TRAJOULE_RUN_DIR=str(tmp_path / "run"))
    assert r.returncode == 2 and len(r.stderr.strip().splitlines()) == 1 and says in r.stderr, r.stderr
    assert not list(tmp_path.iterdir())  # no lock, no folder


# ---- quickstart.sh and test.sh, in a folder of their own with stand-ins for what they run


@pytest.fixture
def checkout(repo, tmp_path):
    """A function: a checkout with our scripts, in which the named files are the given bash scripts."""

    def make(**scripts):
        here = tmp_path / "checkout"
        for name in ("common.sh", "config.sh", "quickstart.sh", "test.sh", "profiles", "stages", "slurm"):
            (here / name).parent.mkdir(exist_ok=True)
            (here / name).symlink_to(repo / name)
        (here / "common.sh").unlink()  # it finds its folder by its own path
        shutil.copy(repo / "common.sh", here)
        for name, text in scripts.items():
            path = here / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        return here

    return make


def quickstart(here, **env):
    return subprocess.Popen(["bash", "quickstart.sh"], cwd=here, env=clean(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SLOW_SETUP = "sleep 300 & echo $! >note; wait"


def path_without_python(tmp_path):
    (tmp_path / "bin").mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if not program.name.startswith(("python", "pypy")) and not (tmp_path / "bin" / program.name).exists():
                (tmp_path / "bin" / program.name).symlink_to(program)
    return str(tmp_path / "bin")


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
@pytest.mark.parametrize(("sig", "python"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGTERM, False)])
def test_a_quickstart_that_is_ended_takes_its_set_up_along_and_the_next_one_starts(checkout, tmp_path, sig, python):
    here = checkout(**{"01_setup.sh": SLOW_SETUP})
    env = {} if python else {"PATH": path_without_python(tmp_path)}
    p = quickstart(here, **env)
    assert wait_for(lambda: (here / "note").exists() and (here / "note").read_text().strip()), p.kill() or p.communicate()
    pid = int((here / "note").read_text())
    p.send_signal(sig)
    assert wait_for(lambda: not alive(pid), 10), os.kill(pid, signal.SIGKILL)
    assert p.wait(20) == (143 if sig == signal.SIGTERM else -9)
    (here / "01_setup.sh").write_text("exit 7\n")
    again = quickstart(here, **env)
    err = again.communicate(timeout=30)[1]
    assert again.returncode == 7 and "another quickstart" not in err, err


def test_one_quickstart_at_a_time(checkout):
    here = checkout(**{"01_setup.sh": SLOW_SETUP})
    first = quickstart(here)
    assert wait_for((here / "note").exists)
    second = quickstart(here)
    try:
        err = second.communicate(timeout=30)[1]
    finally:
        first.terminate()
    assert second.returncode == 1 and err.endswith("another quickstart.sh runs in this folder\n")
    assert first.wait(20) == 143


@pytest.mark.parametrize(
    ("args", "unit", "integration", "code", "says"),
    [
        ("-k x", 0, 0, 0, "all tests passed"),
        ("-k x", 5, 0, 0, "all tests passed"),
        ("-k x", 0, 5, 0, "all tests passed"),
        ("-k x", 5, 5, 2, "no test is selected by '-k x'"),
        ("-k x", 1, 0, 1, None),
        ("-k x", 5, 1, 1, None),
        ("--quick -k x", 5, 0, 2, "no unit test is selected by '-k x'"),
        ("--quick -k x", 0, 1, 0, None),
    ],
)
def test_a_test_run_needs_one_of_the_tests_that_are_asked_for(checkout, args, unit, integration, code, says):
    python = f'case "$*" in *"not integration"*) exit {unit};; *) exit {integration};; esac'
    tools = dict.fromkeys((".venv__bin__ruff", ".venv__bin__shellcheck", ".venv__bin__shfmt", ".venv__bin__uv", ".venv-pandas2__bin__python"), "exit 0")
    here = checkout(**{"01_setup.sh": "exit 0", ".venv__bin__python": python, **tools})
    r = bash(here, f"bash test.sh {args}")
    assert r.returncode == code and (says is None or r.stderr.splitlines()[-1].endswith(says)), r.stderr


# ---- the exit code of a trial that is there already, whole


def test_a_finished_trial_keeps_its_exit_code(repo, tmp_path):
    folder = tmp_path / "d/traj/tidy-files__summarize-off__r1"
    folder.mkdir(parents=True)
    env = {"PROFILE": "cpu-smollm2", "MODE": "live", "DATA_DIR": str(tmp_path / "d"), "TRAJOULE_RUN_DIR": str(tmp_path / "run")}
    for more, code in (({"ended": "finished", "reason": None}, 0), ({"ended": "server_down", "reason": "no answer"}, 3)):
        (folder / "trial.json").write_text(json.dumps({"mode": "live", "recording": None} | more))
        r = bash(repo, "bash 04_run_trial.sh tidy-files summarize-off 1", **env)
        assert r.returncode == code and len(r.stderr.splitlines()) == 1, r.stderr
