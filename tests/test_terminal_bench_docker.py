"""Terminal-Bench runs with real parts: real Harbor, mini-SWE-agent in real containers, a real small server; and containers after a kill."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.bench_place import REPO, Place, until

import runner  # isort: skip - bench_place knows where it lies

AGENT = runner.AGENT_VERSION


def docker_answers():
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not docker_answers(), reason="NO DOCKER ENGINE ANSWERS: no Terminal-Bench run with real containers"),
]

DOCKERFILE = """\
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 curl ca-certificates && rm -rf /var/lib/apt/lists/*
COPY site /opt/mini
COPY mini-swe-agent /usr/local/bin/
RUN python3 -m compileall -q /opt/mini/litellm /opt/mini/minisweagent /opt/mini/openai || true
"""
START = "import sys; sys.path.insert(0, '/opt/mini'); from minisweagent.run.mini import app; app()"


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """Name of a local image with mini-SWE-agent and curl, built once per version: Harbor's own installer would need the internet."""
    key = hashlib.sha256((DOCKERFILE + START + AGENT).encode()).hexdigest()[:12]
    name = f"trajoule-test-mini-swe-agent:{key}"
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode:
        context = tmp_path_factory.mktemp("image")
        uv = str(Path(sys.executable).parent / "uv")
        install = [uv, "pip", "install", "--quiet", "--target", str(context / "site"), "--python-version", "3.11", "--only-binary", ":all:"]
        subprocess.run([*install, "--python-platform", "x86_64-unknown-linux-gnu", f"mini-swe-agent=={AGENT}"], check=True, timeout=300)
        for big in ("pyarrow", "pandas", "datasets", "numpy"):  # for benchmarks of its own only
            for path in (context / "site").glob(f"{big}*"):
                subprocess.run(["rm", "-rf", str(path)], check=True)
        (context / "mini-swe-agent").write_text(f'#!/bin/sh\nexec python3 -c "{START}" "$@"\n')
        (context / "mini-swe-agent").chmod(0o755)
        (context / "Dockerfile").write_text(DOCKERFILE)
        subprocess.run(["docker", "build", "--quiet", "--tag", name, str(context)], check=True, timeout=600, stdout=subprocess.DEVNULL)
    return name


@pytest.fixture
def bench(tmp_path, free_port, image):
    """A place with the real Harbor, the real docker and one local task."""
    place = Place(tmp_path, free_port())
    place.env["PATH"] = os.environ["PATH"]
    harbor = tmp_path / "cache/terminal-bench/venv/bin/harbor"
    harbor.unlink()
    harbor.symlink_to(Path(sys.executable).parent / "harbor")
    task = tmp_path / "tasks" / "hello"
    files = {
        "instruction.md": "Create a file /app/hello.txt whose only line is: Hello, world!\n",
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 240.0\n[verifier]\ntimeout_sec = 60.0\n'
        "[environment]\nbuild_timeout_sec = 300.0\ncpus = 2\nmemory_mb = 2048\nstorage_mb = 1024\n",
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n",
        "environment/docker-compose.yaml": "services:\n  main:\n    init: true\n",  # ends at once when it is told to
        "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/hello.txt)" = "Hello, world!" ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    place.server["host"] = "0.0.0.0"
    place.bench = {
        "dataset": "./tasks", "tasks": ["hel*"], "agent_preinstalled": True, "probe_image": image, "proxy": True, "proxy_port": free_port(),
        "server_ready_s": 120,
    }  # fmt: skip
    place.energy = {"enabled": True, "gpus": "none", "powercap": str(tmp_path), "cpu_model": "0.74:3.5"}
    return place


def run(place, **kw):
    p = place.start(**kw)
    out, err = p.communicate(timeout=600)
    assert containers(place) == [] and not place.left()
    return p.returncode, out, err


def containers(place):
    words = ["docker", "ps", "--all", "--quiet", "--filter", f"label={runner.LABEL}={place.out}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.split()


def align(place):
    import align_trial

    return [align_trial.align(folder) for folder in sorted((place.out / "traj").iterdir())]


def test_concurrent_trials_have_sessions_of_their_own_and_become_trajectories(bench):
    """Three attempts, two at a time, on a server with room for two sessions whose first DELETE fails."""
    bench.bench |= {"concurrency": 2, "attempts": 3}
    commands = ["echo Hello, world! > /app/hello.txt; sleep 1", "cat /app/hello.txt"]
    code, out, err = run(bench, faults={"capacity": 2, "delete": [503], "commands": commands})
    assert (code, err) == (0, ""), (bench.out / "harbor.log").read_text()[-3000:]
    assert out.count("reward=1.0, agent_exit=Submitted, tool_calls=3") == 3
    metrics = bench.json("metrics.json")
    assert metrics["requests"] == 9 and metrics["source"] == "turn_stats"
    trials = {json.loads(p.read_text())["id"] for p in bench.out.glob("harbor/*/result.json")}
    assert {t["session_id"] for t in runner.read_turns(bench.out / "server.log")[0]} - {"<scratch>"} == trials
    assert bench.json("run.json")["versions"]["mini-swe-agent"] == AGENT
    rows = align(bench)
    assert len(rows) == 3 and max(row["concurrency"] for row in rows) >= 2
    for row in rows:
        assert row["outcome"] == "success" and row["calls"] == 3 and row["tokens_match"] is True
        assert row["split_source"] == "agent_log" and 1 <= row["command_s"] < row["total_s"]
        assert row["model_s"] + row["command_s"] + row["waiting_s"] == pytest.approx(row["total_s"], abs=1e-6)
        assert row["cpu_model_j"] + row["cpu_command_j"] + row["cpu_waiting_j"] == pytest.approx(row["cpu_total_j"], abs=1e-5)


def test_the_real_small_server_from_one_command_line(bench):
    """llama.cpp and a model that is too small to call a tool: the run is complete, its reward 0, its calls counted and measured."""
    words = [sys.executable, str(REPO / "servers" / "llamacpp.py"), "--host", "{host}", "--port", "{port}", "--alias", "{model_id}"]
    bench.server = {
        "command": [*words, "--ctx", "{max_context}", "--cache-dir", str(bench.tmp / "models")],
        "port": bench.port, "model_id": "smollm2", "max_context": 2048,
    }  # fmt: skip
    bench.bench |= {"step_limit": 1, "max_output_tokens": 8}
    code, out, err = run(bench)
    assert (code, err) == (0, ""), (bench.out / "harbor.log").read_text()[-3000:]
    assert "reward=0.0, agent_exit=LimitsExceeded, tool_calls=0" in out
    metrics = bench.json("metrics.json")
    assert metrics["source"] == "calls" and metrics["requests"] == 1 and 0 < metrics["completion_tokens"] <= 8
    (row,) = align(bench)
    assert row["outcome"] == "fail" and row["calls"] == 1 and row["model_s"] > 0 and row["cpu_model_j"] > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_run_ends_its_containers(bench, how):
    p = bench.start(faults={"commands": ["sleep 300"]})
    assert until(lambda: containers(bench), 120)
    p.send_signal(how)
    _, err = p.communicate(timeout=120)
    assert p.returncode == (130 if how == signal.SIGTERM else -9)
    assert until(lambda: not bench.left() and not containers(bench), 90), (bench.left(), containers(bench))
    for port in (bench.port, bench.bench["proxy_port"]):
        runner.check_port("0.0.0.0", port, "port")

