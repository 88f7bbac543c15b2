"""A folder in which the Terminal-Bench runner can be run: a configuration, a cache with a stand-in for Harbor, a PATH with one for docker."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
FOLDER = REPO / "evals" / "terminal_bench"
sys.path.insert(0, str(FOLDER))
sys.path.insert(0, str(REPO))
from tests.fakes.processes import mentioning  # noqa: E402


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


class Place:
    def __init__(self, tmp, port):
        self.tmp, self.port, self.out = tmp, port, tmp / "out"
        for folder, name in (("cache/terminal-bench/venv/bin", "harbor"), ("bin", "docker")):
            (tmp / folder).mkdir(parents=True)
            script = tmp / folder / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{REPO}/tests/fakes/{name}_cli.py" "$@"\n')
            script.chmod(0o755)
        self.env = dict(os.environ) | {
            "EXECUTORCH_EVAL_CACHE": str(tmp / "cache"),
            "PATH": f"{tmp / 'bin'}:{os.environ['PATH']}",
            "TRAJOULE_RUN_DIR": str(tmp / "run"),  # where the lock of who measures lies
            "DOCKER_FAKE_LOG": str(tmp / "docker.log"),
        }
        self.server = {
            "python": sys.executable, "module": "tests.fakes.session_server", "host": "127.0.0.1", "port": port, "worker_bin": "worker",
            "model_path": "model.pte", "tokenizer_path": "tok.bin", "hf_tokenizer": "org/name", "model_id": "m", "max_context": 2048,
            "no_think": True, "tool_parser": "hermes",
        }  # fmt: skip
        self.bench = {"agent_host": "127.0.0.1", "server_ready_s": 20, "server_stop_s": 5}
        self.energy = {}
        (tmp / "model.pte").write_bytes(b"weights")

    def config(self, faults=None):
        server = {**self.server, "env": {"PYTHONPATH": str(REPO), "FAULTS": json.dumps(faults or {})}}
        tables = {"server": server, "terminal_bench": self.bench, "energy": self.energy}
        path = self.tmp / "c.toml"
        lines = []
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{k} = {toml(v)}" for k, v in table.items() if v is not None), ""]
        path.write_text("\n".join(lines))
        return path

    def start(self, *args, faults=None, harbor=None, docker=None):
        env = self.env | {"HARBOR_FAKE": json.dumps(harbor or {})} | ({"DOCKER_FAKE": docker} if docker else {})
        command = [sys.executable, str(FOLDER / "runner.py"), "--config", str(self.config(faults)), "--output", str(self.out), *args]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *args, **kw):
        p = self.start(*args, **kw)
        out, err = p.communicate(timeout=60)
        assert not self.left(), self.left()
        return p.returncode, out, err

    def left(self):
        """Command lines of processes that belong to this place and live."""
        return mentioning(str(self.tmp), f"--port={self.port}")

    def json(self, name):
        return json.loads((self.out / name).read_text())

    def docker_log(self):
        return [json.loads(x) for x in (self.tmp / "docker.log").read_text().splitlines()] if (self.tmp / "docker.log").exists() else []


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
