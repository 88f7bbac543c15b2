"""Terminal-Bench through Harbor and mini-SWE-agent against a local LLM server, from one TOML file.

    bash run.sh --config ../configs/terminal-bench.local.toml --dry-run
    bash run.sh --config ../configs/terminal-bench.local.toml
    bash run.sh --config ../configs/terminal-bench.local.toml --task fix-git --task 'sqlite-*' --output results/first

The run owns its server: it proves that the port is free, starts the server, waits until it is healthy, lets a container ask it for one
completion, runs Harbor, and ends both, whatever happens. Every key of the TOML file is explained in ../configs/terminal-bench.example.toml,
every file of the results in README.md. `--dry-run` writes what would be run (run.json, agent.yaml, compose.yaml, source.diff), says which of
its files are missing, and starts nothing.

Exit codes: 0 the run is complete (a reward of 0 is a result, not an error), 1 anything that went wrong, a mistake in the TOML file included,
2 bad arguments on the command line, another platform, or no environment (setup.sh), 130 interrupted (Ctrl-C, SIGTERM).
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SUPERVISE = ROOT / "stages" / "supervise.py"
AGENT_VERSION = "2.4.6"
LABEL = "trajoule.evals.results"  # on every container of a run, so that they can be found whatever became of Harbor

SERVER_PATHS = ("worker_bin", "model_path", "tokenizer_path")  # always paths
SERVER_MAYBE_PATHS = ("hf_tokenizer", "python")  # paths when they begin with one of / ~ .
MODULE_NEEDS = ("worker_bin", "model_path", "tokenizer_path", "hf_tokenizer", "model_id", "max_context")
COMMAND_NEEDS = ("model_id", "max_context")
COMMAND_KEYS = {"command", "host", "port", "model_id", "max_context", "model_path", "env"}
NOT_OPTIONS = {"python", "module", "command", "env"}  # of [server]: everything else goes to the module's command line
BENCH_DEFAULTS = {
    "tasks": ["fix-git"],
    "attempts": 1,
    "step_limit": 100,
    "max_output_tokens": 512,
    "temperature": 0.0,
    "agent_host": None,
    "session_affinity": None,
    "concurrency": 1,
    "dataset": "terminal-bench@2.0",
    "sessions": None,
    "agent_preinstalled": False,
    "proxy": None,
    "proxy_port": None,
    "probe_image": "curlimages/curl:8.12.1",
    "server_ready_s": 180,
    "server_stop_s": 20,
}
ENERGY_DEFAULTS = {"enabled": False, "hz": 10, "gpus": "auto", "powercap": "/sys/class/powercap", "cpu_model": None}

PROBE_S, PROBE_LIMIT_S = 90, 120  # the completion itself; with the start of the container
HARBOR_STOP_S = 20
HEALTH_EVERY_S = 5.0  # while Harbor runs
DEAD_AFTER = 3  # answers of 503 in a row, after which the worker is taken for dead
TURN_LINE_S = 2.0  # s that the preflight's own turn line may take to reach the log

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # requests to our own ports never go through a proxy


class ConfigError(ValueError):
    """A key of the TOML file cannot be; the text names key, value, what was expected and the way out."""


# --- configuration -----------------------------------------------------------------------------------------------------------------


def cache_root():
    """Folder of environments and results; EXECUTORCH_EVAL_CACHE relocates it."""
    return Path(os.environ.get("EXECUTORCH_EVAL_CACHE") or "~/.cache/executorch-evals").expanduser().absolute()


def load_config(path, tasks=None):
    """The three tables of a TOML file, checked, with defaults filled in and paths resolved. Raises OSError, ConfigError."""
    path = Path(path).absolute()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: no TOML: {e}") from None
    known = ("server", "terminal_bench", "energy")
    if unknown := sorted(set(tables) - set(known)):
        raise ConfigError(f"unknown table(s) {', '.join(f'[{k}]' for k in unknown)}; expected [server], [terminal_bench], [energy]")
    for name in known:
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(f"{name} = {tables[name]!r}: expected a table [{name}]")
    if "server" not in tables:
        raise ConfigError(f"{path} has no table [server]; see terminal-bench.example.toml")
    bench = with_defaults("terminal_bench", tables.get("terminal_bench", {}), BENCH_DEFAULTS)
    energy = with_defaults("energy", tables.get("energy", {}), ENERGY_DEFAULTS)
    if tasks:
        bench["tasks"] = list(tasks)
    if bench["proxy"] is None:
        bench["proxy"] = bool(energy["enabled"]) or "command" in tables["server"]
    server = check_server(tables["server"], path.parent, bench["proxy"])
    check_bench(bench, server, path.parent)
    check_energy(energy, bench)
    return {"server": server, "terminal_bench": bench, "energy": energy}


def with_defaults(table, found, defaults):
    if unknown := sorted(set(found) - set(defaults)):
        raise ConfigError(f"[{table}] unknown key(s): {', '.join(unknown)}; expected some of {', '.join(defaults)}")
    return {**defaults, **found}


def need(ok, table, key, value, expected):
    if not ok:
        raise ConfigError(f"[{table}] {key} = {json.dumps(value, default=str)}: expected {expected}")


def whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def resolve(text, base):
    """An absolute path, relative to the TOML file's folder; symbolic links stay, since a virtual environment's python is one."""
    return os.path.normpath(os.path.join(base, os.path.expanduser(text)))


def looks_like_path(text):
    return text.startswith(("/", "~", "."))


def check_server(found, base, proxied):
    own_command = "command" in found
    server = {"host": "0.0.0.0", "port": 8000, **found}
    if not own_command:
        server = {"python": str(cache_root() / "server-venv/bin/python"), "module": "executorch.examples.llm_server.python.server", **server}
    for key in COMMAND_NEEDS if own_command else MODULE_NEEDS:
        if key not in found:
            raise ConfigError(f"[server] {key} is missing; see terminal-bench.example.toml for what it is")
    if own_command:
        command = found["command"]
        fine = isinstance(command, list) and command and all(isinstance(x, str) and x for x in command)
        need(fine, "server", "command", command, 'a list of words such as ["vllm", "serve", "{model_path}", "--port", "{port}"]')
        if extra := sorted(set(found) - COMMAND_KEYS):
            raise ConfigError(f"[server] {', '.join(extra)}: not passed on beside `command`; write the option into the command's list")
        if looks_like_path(command[0]):
            server["command"] = [resolve(command[0], base), *command[1:]]
    need(isinstance(server.get("env", {}), dict) and all(isinstance(v, str) for v in server.get("env", {}).values()), "server", "env",
         server.get("env"), 'a table of texts such as { CUDA_VISIBLE_DEVICES = "0" }')  # fmt: skip
    need(whole(server["port"]) and 0 < server["port"] < 65536, "server", "port", server["port"], "a TCP port, 1 to 65535")
    need(whole(server["max_context"]) and server["max_context"] > 0, "server", "max_context", server["max_context"], "tokens, 1 or more")
    for key in ("host", "model_id", *(("module",) if not own_command else ())):
        need(isinstance(server[key], str) and server[key] and not re.search(r"\s", server[key]), "server", key, server[key], "a word")
    for key, value in server.items():
        if key in NOT_OPTIONS - {"python"}:
            continue
        scalars = value if isinstance(value, list) else [value]
        need(all(isinstance(x, (str, int, float)) for x in scalars), "server", key, value, "a text, a number, true, false or a list of them")
    for key in (*SERVER_PATHS, *SERVER_MAYBE_PATHS):
        if key in server:
            need(isinstance(server[key], str) and server[key], "server", key, server[key], "a path as text")
            always = key in SERVER_PATHS and not own_command
            if always or looks_like_path(server[key]):
                server[key] = resolve(server[key], base)
    server["proxied"] = proxied
    return server


def check_bench(bench, server, base):
    def check(key, ok, expected):
        need(ok(bench[key]), "terminal_bench", key, bench[key], expected)

    text = lambda v: isinstance(v, str) and v.strip() != ""  # noqa: E731
    check("tasks", lambda v: isinstance(v, list) and v and all(text(x) for x in v), 'a list of task names or globs such as ["fix-git"], not empty')
    for key in ("attempts", "step_limit", "concurrency"):
        check(key, lambda v: whole(v) and v >= 1, "a whole number, 1 or more")
    context = server["max_context"]
    check("max_output_tokens", lambda v: whole(v) and 0 < v < context, f"more than 0 and less than [server] max_context = {context}")
    check("temperature", lambda v: number(v) and 0 <= v <= 2, "0 to 2")
    for key in ("agent_host", "session_affinity"):
        check(key, lambda v: v is None or text(v), "a text, or leave it out")
    check("session_affinity", lambda v: v is None or re.fullmatch(r"[!-~]{1,128}", v), "1 to 128 printable ASCII characters without spaces")
    for key in ("dataset", "probe_image"):
        check(key, text, "a text")
    for key in ("agent_preinstalled", "proxy"):
        check(key, lambda v: isinstance(v, bool), "true or false")
    check("sessions", lambda v: v is None or isinstance(v, bool), "true, false, or leave it out to ask the server")
    for key in ("server_ready_s", "server_stop_s"):
        check(key, lambda v: number(v) and v > 0, "seconds, more than 0")
    if bench["session_affinity"] is not None and bench["concurrency"] > 1:
        raise ConfigError(
            f"[terminal_bench] session_affinity = {json.dumps(bench['session_affinity'])} with concurrency = {bench['concurrency']}: "
            f"concurrent trials cannot share one session; remove session_affinity, or set concurrency = 1"
        )
    if bench["session_affinity"] is not None and bench["sessions"]:
        raise ConfigError("[terminal_bench] sessions = true with session_affinity: a session per trial or one for all; remove one of the two keys")
    if looks_like_path(bench["dataset"]):
        bench["dataset"] = resolve(bench["dataset"], base)
    if bench["proxy"]:
        bench["proxy_port"] = server["port"] + 1 if bench["proxy_port"] is None else bench["proxy_port"]
        fine = lambda v: whole(v) and 0 < v < 65536 and v != server["port"]  # noqa: E731
        check("proxy_port", fine, f"a TCP port other than [server] port = {server['port']}")
    elif bench["proxy_port"] is not None:
        raise ConfigError(f"[terminal_bench] proxy_port = {bench['proxy_port']} without a proxy: set proxy = true, or remove proxy_port")


def check_energy(energy, bench):
    def check(key, ok, expected):
        need(ok(energy[key]), "energy", key, energy[key], expected)

    check("enabled", lambda v: isinstance(v, bool), "true or false")
    check("hz", lambda v: number(v) and 0 < v <= 100, "rows per second, more than 0, at most 100")
    for key in ("gpus", "powercap"):
        check(key, lambda v: isinstance(v, str) and v, "a text")
    check("cpu_model", lambda v: v is None or isinstance(v, str) and re.fullmatch(r"[\d.]+:[\d.]+", v), 'IDLE:BUSY watts such as "0.74:3.5"')
    if energy["enabled"] and sys.platform == "darwin":
        raise ConfigError("[energy] enabled = true: macOS gives an ordinary process no energy counters to read; set it false, the rest works")
    if energy["enabled"] and not bench["proxy"]:
        raise ConfigError("[terminal_bench] proxy = false with [energy] enabled = true: model time is seen in the proxy; remove proxy = false")


# --- commands ----------------------------------------------------------------------------------------------------------------------


def server_host(server):
    """Address that the server binds: behind the proxy it listens to this machine alone, and the proxy takes `host`."""
    return "127.0.0.1" if server["proxied"] else server["host"]


def reach(host):
    """Address under which this machine reaches a server that binds `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)


def server_url(server):
    return f"http://{reach(server_host(server))}:{server['port']}"


def server_argv(server):
    """The server's command line: `command` with its placeholders filled in, or the module with every key as an option."""
    host = server_host(server)
    if "command" in server:
        fill = {"host": host, "port": server["port"], "model_id": server["model_id"], "max_context": server["max_context"]}
        fill |= {"model_path": server["model_path"]} if "model_path" in server else {}
        pattern = re.compile("{(" + "|".join(fill) + ")}")
        return [pattern.sub(lambda m: str(fill[m[1]]), word) for word in server["command"]]
    argv = [server["python"], "-m", server["module"]]
    for key, value in server.items():
        if key in NOT_OPTIONS or key == "proxied":
            continue
        flag = f"--{key.replace('_', '-')}"
        for one in value if isinstance(value, list) else [host if key == "host" else value]:
            if one is True:
                argv.append(flag)
            elif one is not False:
                argv.append(f"{flag}={one}")
    return argv


def agent_host(bench):
    """Name of this machine inside the task's container."""
    if bench["agent_host"]:
        return bench["agent_host"]
    try:
        shown = subprocess.run(["docker", "context", "show"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    return "host.lima.internal" if shown.strip().startswith("colima") else "host.docker.internal"


def agent_config(config):
    """What mini-SWE-agent is told beyond its own defaults."""
    bench = config["terminal_bench"]
    kwargs = {"temperature": bench["temperature"]}
    if bench["session_affinity"] is not None:
        kwargs["extra_headers"] = {"x-session-affinity": bench["session_affinity"]}
    return {"agent": {"step_limit": bench["step_limit"]}, "model": {"model_kwargs": kwargs}}


def needs_gateway(host):
    """Docker Desktop and Colima know their host's name; the engine on Linux has to be told."""
    return host == "host.docker.internal" and sys.platform == "linux"


def missing_files(server):
    """What the server's command needs and this machine lacks, in words."""
    keys = {k: server[k] for k in (*SERVER_PATHS, *SERVER_MAYBE_PATHS) if k in server and os.path.isabs(server[k])}
    if "command" in server:
        keys = {"command": server["command"][0], **{k: v for k, v in keys.items() if k == "model_path"}}
    found = [f"[server] {k} = {v}: no such file" for k, v in keys.items() if not (os.path.exists(v) or k == "command" and shutil.which(v))]
    return found + ([] if harbor_bin().exists() else [f"{harbor_bin()}: no such file; run setup.sh"])


def compose_overlay(out, host):
    main = {"labels": {LABEL: str(out)}}
    if needs_gateway(host):
        main["extra_hosts"] = [f"{host}:host-gateway"]
    return {"services": {"main": main}}


def agent_url(config, host):
    bench, server = config["terminal_bench"], config["server"]
    return f"http://{host}:{bench['proxy_port'] if bench['proxy'] else server['port']}/v1"


def harbor_bin():
    return cache_root() / "terminal-bench/venv/bin/harbor"


def harbor_argv(config, out, host):
    bench, server = config["terminal_bench"], config["server"]
    by_trial = bench["session_affinity"] is None
    if bench["agent_preinstalled"]:
        agent = "harbor_side:PreinstalledAgent"
    else:
        agent = "harbor_side:SessionAgent" if by_trial else "mini-swe-agent"
    dataset = ["--path", bench["dataset"]] if looks_like_path(bench["dataset"]) else ["--dataset", bench["dataset"]]
    argv = [str(harbor_bin()), "run", *dataset, "--agent", agent, "--model", f"openai/{server['model_id']}"]
    agent_args = [*([] if bench["agent_preinstalled"] else [f"version={AGENT_VERSION}"]), f"max_tokens={bench['max_output_tokens']}"]
    for arg in (*agent_args, f"config_file={out / 'agent.yaml'}"):
        argv += ["--ak", arg]
    keys = {"MSWEA_API_KEY": "local", "OPENAI_API_KEY": "local", "OPENAI_BASE_URL": agent_url(config, host), "NO_PROXY": host, "no_proxy": host}
    for key, value in keys.items():
        argv += ["--ae", f"{key}={value}"]
    argv += ["--extra-docker-compose", str(out / "compose.yaml")]
    if by_trial:
        argv += ["--plugin", "harbor_side:CloseSessions", "--plugin-kwarg", f"url={server_url(server)}"]
    argv += ["--n-concurrent", str(bench["concurrency"]), "--n-attempts", str(bench["attempts"]), "--max-retries", "0"]
    argv += ["--jobs-dir", str(out), "--job-name", "harbor", "--yes"]
    for task in bench["tasks"]:
        argv += ["--include-task-name", task]
    return argv


def probe_name():
    return f"trajoule-eval-{os.getpid()}"


def probe_argv(config, host):
    """A throw-away container that asks for one completion over the very way that the agent will take."""
    bench = config["terminal_bench"]
    body = {
        "model": config["server"]["model_id"],
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": min(8, bench["max_output_tokens"]),
        "temperature": bench["temperature"],
    }
    gateway = ["--add-host", f"{host}:host-gateway"] if needs_gateway(host) else []
    curl = ["--noproxy", "*", "--silent", "--show-error", "--fail-with-body", "--max-time", str(PROBE_S)]
    curl += ["--header", "Content-Type: application/json", "--data", json.dumps(body), f"{agent_url(config, host)}/chat/completions"]
    return ["docker", "run", "--rm", "--name", probe_name(), *gateway, "--entrypoint", "curl", bench["probe_image"], *curl]


def proxy_argv(config, out):
    server, port = config["server"], config["terminal_bench"]["proxy_port"]
    return [
        sys.executable, str(ROOT / "llm_proxy.py"), "--upstream", server_url(server), "--host", server["host"], "--port", str(port),
        "--log", str(out / "calls.jsonl"),
    ]  # fmt: skip


def sampler_argv(energy, out):
    argv = [sys.executable, str(ROOT / "sampler.py"), "-o", str(out / "samples.csv"), "--hz", str(energy["hz"]), "--gpus", energy["gpus"]]
    return [*argv, "--powercap", energy["powercap"], *(["--cpu-model", energy["cpu_model"]] if energy["cpu_model"] else [])]


# --- what is written down ----------------------------------------------------------------------------------------------------------


def write_json(path, obj):
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tmp.write_text(json.dumps(obj, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def git(*args):
    """Output of a git command on this checkout as bytes; None where this is no checkout or git is missing."""
    try:
        r = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return r.stdout if r.returncode == 0 else None


def digest(path):
    """{path, bytes, sha256} of a file; of a folder the hash over its files' names and hashes. None for what is not there."""
    path = Path(path)
    total, folder = 0, hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        return None
    for p in files:
        one = hashlib.sha256()
        with open(p, "rb") as f:
            for block in iter(lambda: f.read(1 << 20), b""):
                one.update(block)
                total += len(block)
        folder.update(f"{p.relative_to(path)}\0{one.hexdigest()}\n".encode())
    return {"path": str(path), "bytes": total, "sha256": one.hexdigest() if path.is_file() else folder.hexdigest()}


def recorded(server):
    """[server] as it stands in run.json: credentials in its environment are hidden."""
    shown = {k: v for k, v in server.items() if k != "proxied"}
    if "env" in shown:
        shown["env"] = {k: "[hidden]" if re.search(r"TOKEN|KEY|SECRET|PASSWORD", k.upper()) else v for k, v in shown["env"].items()}
    return shown


def hub_revision(name):
    """{hub, revision} of a model in the Hugging Face cache of this machine, None when it is not there."""
    home = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub")
    ref = home / f"models--{name.replace('/', '--')}" / "refs/main"
    return {"hub": name, "revision": ref.read_text().strip()} if ref.is_file() else None


def artifacts(server):
    """What was served, by hash: worker, model, tokenizer; null for what could not be found."""
    found = {}
    for key in (*SERVER_PATHS, "hf_tokenizer"):
        if key in server:
            try:
                found[key] = digest(server[key]) if Path(server[key]).is_absolute() else hub_revision(server[key])
            except OSError as e:
                found[key] = {"path": server[key], "error": e.strerror}
    return found


def server_version(config):
    """The running server's own word about its version, else its package's; None when neither tells."""
    server = config["server"]
    for path, keys in (("/version", ("version",)), ("/props", ("build_info",))):
        status, body = http_json("GET", server_url(server) + path, timeout=5)
        if status == 200 and isinstance(body, dict) and (value := next((body[k] for k in keys if body.get(k)), None)):
            return str(value)
    if "command" in server:
        return None
    package = server["module"].split(".")[0]
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        r = subprocess.run([server["python"], "-c", ask], capture_output=True, text=True, timeout=30)
        return r.stdout.strip() or None if r.returncode == 0 else None
    return None


def docker_version():
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        r = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=20)
        return r.stdout.strip() or None
    return None


def harbor_version():
    """Version of the Harbor that runs, from its environment's metadata."""
    names = [p.name for p in harbor_bin().parent.parent.glob("lib/python*/site-packages/harbor-*.dist-info")]
    return names[0].removeprefix("harbor-").removesuffix(".dist-info") if names else None


# --- HTTP, ports, processes --------------------------------------------------------------------------------------------------------


def http_json(method, url, timeout):
    """(status, parsed JSON or None); (None, None) when nobody answers."""
    try:
        with direct.open(urllib.request.Request(url, method=method), timeout=timeout) as r:
            status, text = r.status, r.read()
    except urllib.error.HTTPError as e:
        status, text = e.code, e.read()
    except (OSError, ValueError, http.client.HTTPException):
        return None, None
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


def healthy(server):
    """True when the server is ready, else None (nobody answers) or the status of its answer.

    ExecuTorch's server and llama.cpp say {"status": "ok"}, vLLM and SGLang an empty 200; MLX's has no /health at all.
    """
    status, body = http_json("GET", f"{server_url(server)}/health", timeout=2)
    if status == 200:
        told = body.get("status") if isinstance(body, dict) else None
        return True if told == "ok" or (told is None and "command" in server) else 200
    if status == 404 and "command" in server and http_json("GET", f"{server_url(server)}/v1/models", timeout=2)[0] == 200:
        return True
    return status


def check_port(host, port, key):
    """Prove that a port is free. Raises OSError that says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((host, port))
        with socket.socket(family) as s:  # macOS lets two sockets bind when one has a narrower address
            s.settimeout(2)
            if s.connect_ex((reach(host).strip("[]"), port)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError as e:
        raise OSError(f"{key} = {port} on {host} cannot be used ({e.strerror or e}): stop what listens there, or choose another {key}") from None


class Process:
    """A command in a group of its own that ends with this run, even by kill -9 (stages/supervise.py)."""

    def __init__(self, argv, log, grace_s, env):
        self.log, self.grace_s = log, grace_s
        command = [sys.executable, str(SUPERVISE), "--grace", str(grace_s), "--log", str(log), "--", *argv]
        # In a session of its own, so that Ctrl-C reaches this program alone, which ends things in their order; and deaf to no SIGINT, which a
        # shell makes what it starts in the background.
        with open(log, "ab") as err:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def code(self):
        return self.process.poll()

    def last_words(self):
        lines = [x for x in self.log.read_bytes()[-4000:].decode(errors="replace").splitlines() if x.strip()]
        return lines[-1].strip()[:300] if lines else "it wrote nothing"

    def stop(self, sig=signal.SIGTERM):
        """End it: `sig`, after the grace period SIGKILL to everything that is left. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(self.grace_s + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel kills the command along with its supervisor
            return self.process.wait()


@contextlib.contextmanager
def ignoring_signals():
    """While things are ended a second Ctrl-C must not leave half of them running; every step has a deadline."""
    kept = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in kept.items():
            signal.signal(s, handler)


def child_env(server=None):
    """Environment of what we start: unbuffered, quiet towards the network, our own ports never through a proxy."""
    env = dict(os.environ)
    env |= {"PYTHONUNBUFFERED": "1", "HARBOR_TELEMETRY": "0", "LITELLM_OFFLINE_MODE": "true"}
    for key in ("NO_PROXY", "no_proxy"):
        env[key] = ",".join(x for x in ("127.0.0.1,localhost", env.get(key)) if x)
    for key in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        env.pop(key, None)
    return env | (server or {}).get("env", {})


# --- the server's log --------------------------------------------------------------------------------------------------------------

TURN = b"llm_turn_stats "
SUMS = ("prompt_tokens", "completion_tokens", "prefilled_prompt_tokens", "reused_prompt_tokens", "prefill_ms", "decode_ms")


def read_turns(path, offset=0):
    """([{session_id, prompt_tokens, ...}], malformed) of the finished turns that the server logged behind `offset`.

    A last line without its end counts when its last field is there: a server that is killed can leave a cut one.
    """
    try:
        with open(path, "rb") as f:
            f.seek(offset)
            data = f.read()
    except OSError:
        return [], 0
    turns, malformed = [], 0
    for line in re.split(rb"(?<=[\r\n])", data):
        at = line.find(TURN)
        if at < 0:
            continue
        ended = line.endswith((b"\n", b"\r"))
        fields = dict(x.split("=", 1) for x in line[at + len(TURN) :].decode(errors="replace").split() if "=" in x)
        if not ended and "finish" not in fields:
            continue
        try:
            turns.append({"session_id": fields["session_id"]} | {k: float(fields[k]) if k.endswith("_ms") else int(fields[k]) for k in SUMS})
        except (KeyError, ValueError):
            malformed += 1
    return turns, malformed


def offset_behind_preflight(log, begin):
    """Where the evaluation's part of server.log begins. The preflight's own line may come after its answer: it is waited for."""
    end = time.monotonic() + TURN_LINE_S
    while True:
        data = log.read_bytes()
        at = data.rfind(TURN, begin)
        if at >= 0 and b"\n" in data[at:]:
            return data.index(b"\n", at) + 1
        if time.monotonic() > end:
            return len(data) if at >= 0 else data.rfind(b"\n", begin) + 1 or begin
        time.sleep(0.05)


def empty_metrics():
    return {**dict.fromkeys(SUMS[:4], 0), "prefill_ms": 0.0, "decode_ms": 0.0, "requests": 0, "peak_prompt_tokens": 0, "context_violations": 0}


def turn_metrics(turns, malformed, config):
    """metrics.json from the server's own turn lines."""
    metrics = empty_metrics() | {"source": "turn_stats", "malformed_turn_lines": malformed, "requests": len(turns)}
    for k in SUMS:
        metrics[k] = sum((t[k] for t in turns), metrics[k])
    return metrics | prompt_metrics([t["prompt_tokens"] for t in turns], config)


def prompt_metrics(prompts, config):
    room = config["server"]["max_context"] - config["terminal_bench"]["max_output_tokens"]
    return {"peak_prompt_tokens": max(prompts, default=0), "context_violations": sum(p > room for p in prompts)}


def read_calls(path, after):
    """Records of model calls in the proxy's log that began after a moment; a torn last line is skipped."""
    calls = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("t_start", 0) > after:
                    calls.append(record)
    return calls


def call_metrics(calls, config):
    """metrics.json from the proxy's records, for servers that log no turns: what no answer told is null, never 0."""
    good = [c for c in calls if c.get("status") == 200 and c.get("prompt_tokens") is not None]

    def total(values):
        values = list(values)
        return sum(values) if all(v is not None for v in values) else None

    def ms(first, last):
        spans = [(c[last] - c[first]) * 1000 if c.get(first) and c.get(last) else None for c in good]
        return None if None in spans else round(sum(spans, 0.0), 3)

    cached = total(c.get("cached_tokens") for c in good)
    prompt = total(c["prompt_tokens"] for c in good)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": total(c.get("completion_tokens") for c in good),
        "prefilled_prompt_tokens": None if cached is None else prompt - cached,
        "reused_prompt_tokens": cached,
        "prefill_ms": ms("t_sent", "t_first"),
        "decode_ms": ms("t_first", "t_end"),
        "requests": len(good),
        **prompt_metrics([c["prompt_tokens"] for c in good], config),
        "source": "calls",
        "failed_requests": len(calls) - len(good),
    }


# --- Harbor's results --------------------------------------------------------------------------------------------------------------


def read_json(path):
    """Parsed JSON of a file that may be missing or torn, else None."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def trial_results(out):
    """[(folder, result.json as a dict)] of the trials that have one."""
    found = [(p.parent, read_json(p)) for p in sorted((out / "harbor").glob("*/result.json"))]
    return [(folder, result) for folder, result in found if isinstance(result, dict)]


def agent_trajectory(folder):
    """(exit status, number of tool calls) of a trial's agent, "unknown" without a trajectory."""
    trajectory = read_json(folder / "agent" / "mini-swe-agent.trajectory.json")
    if not isinstance(trajectory, dict):
        return "unknown", "unknown"
    calls = sum(len(m.get("tool_calls") or []) for m in trajectory.get("messages") or [] if m.get("role") == "assistant")
    return (trajectory.get("info") or {}).get("exit_status") or "unknown", calls


def agent_versions(out):
    """What the agents themselves say about their version, None when none wrote a trajectory."""
    found = {((read_json(p) or {}).get("info") or {}).get("mini_version") for p in out.glob("harbor/*/agent/mini-swe-agent.trajectory.json")}
    return ", ".join(sorted(found - {None})) or None


def summary_line(folder, result):
    exit_status, tool_calls = agent_trajectory(folder)
    exception = (result.get("exception_info") or {}).get("exception_type")
    reward = ((result.get("verifier_result") or {}).get("rewards") or {}).get("reward")
    outcome = f"error={exception}" if exception else f"reward={reward if reward is not None else 'none'}"
    return f"{folder.name}: {outcome}, agent_exit={exit_status}, tool_calls={tool_calls}"


def check_job(out):
    """Raise RuntimeError unless every trial of the job was completed without an error; a reward of 0 is none."""
    job = read_json(out / "harbor" / "result.json")
    if not isinstance(job, dict):
        raise RuntimeError(f"Harbor left no readable {out / 'harbor' / 'result.json'}; see {out / 'harbor.log'}")
    stats, total = job.get("stats") or {}, job.get("n_total_trials") or 0
    done, errored = stats.get("n_completed_trials", 0), stats.get("n_errored_trials", 0)
    if total <= 0:
        raise RuntimeError(f"Harbor ran no trial: does the dataset have these tasks? See {out / 'harbor.log'}")
    if done != total or errored:
        raise RuntimeError(f"{done} of {total} trials completed, {errored} with errors; see the lines above and {out / 'harbor.log'}")


def check_sessions(turns, out):
    """Evaluation sessions must be Harbor's trials, and nobody else's. Raises RuntimeError with both differences."""
    seen = {t["session_id"] for t in turns}
    trials = {str(result.get("id")): folder for folder, result in trial_results(out)}
    foreign = sorted(seen - set(trials))
    silent = sorted(i for i, folder in trials.items() if i not in seen and made_calls(folder))
    if foreign or silent:
        names = ", ".join(f"{trials[i].name} ({i})" for i in silent)
        raise RuntimeError(
            f"session ids in server.log are not Harbor's trial ids: {', '.join(foreign) or 'none'} belong to no trial, "
            f"{names or 'no trial'} made calls under another id; was somebody else using the server?"
        )


def made_calls(folder):
    trajectory = read_json(folder / "agent" / "mini-swe-agent.trajectory.json")
    return isinstance(trajectory, dict) and ((trajectory.get("info") or {}).get("model_stats") or {}).get("api_calls", 0) > 0


def check_callers(calls, out):
    """The same for what went through the proxy, where a trial is known by Harbor's name for its agent's session."""
    trials = {f"{p.name}__agent" for p in (out / "harbor").glob("*") if p.is_dir()}
    foreign = sorted({str(c.get("session")) for c in calls} - trials)
    if foreign:
        raise RuntimeError(f"calls in calls.jsonl under sessions that are no trial's: {', '.join(foreign)}; was somebody else using the port?")


# --- trajectories for align_trial.py -----------------------------------------------------------------------------------------------


def unix(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def rows_between(source, target, t0, t1):
    """Copy a CSV's header and the rows whose first column, a time, lies in [t0, t1]; a torn last row stays behind."""
    with open(source, encoding="utf-8") as f, open(target, "w", encoding="utf-8", newline="") as out:
        out.write(f.readline())
        for line in f:
            with contextlib.suppress(ValueError):
                if line.endswith("\n") and t0 <= float(line.partition(",")[0]) <= t1:
                    out.write(line)


def link(source, target):
    """A second name for the same bytes where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def overlapping(spans):
    """Lists of indices of (begin, end) spans, sorted by begin, that overlap each other directly or through others."""
    groups, reach = [], None
    for i, (t0, t1) in enumerate(spans):
        if reach is not None and t0 < reach:
            groups[-1].append(i)
        else:
            groups.append([i])
            reach = t1
        reach = max(reach, t1)
    return groups


def write_trajectories(out, config, run):
    """One folder per finished trial in OUT/traj, as align_trial.py takes them. Returns the folders.

    Trials that ran at the same time name each other, and have the same samples: from before the first began until after the last ended.
    """
    sys.path.insert(0, str(ROOT))
    import energylib

    server = config["server"]
    meta = read_json(out / "samples.meta.json") or {}
    calls = read_calls(out / "calls.jsonl", run["preflight_end"] or 0)
    trials, reps = [], {}
    for source, result in sorted(trial_results(out), key=lambda x: x[1].get("started_at") or ""):
        t0, t1 = unix(result.get("started_at")), unix(result.get("finished_at"))
        if t0 is not None and t1 is not None:
            task = result.get("task_name", source.name.rpartition("__")[0]).rpartition("/")[2]
            reps[task] = reps.get(task, 0) + 1
            trials.append({"source": source, "result": result, "t0": t0, "t1": t1, "task": task, "rep": reps[task],
                           "name": f"{task}__mini-swe-agent__r{reps[task]}"})  # fmt: skip
    folders = []
    for number, group in enumerate(overlapping([(t["t0"], t["t1"]) for t in trials]), 1):
        members = [trials[i] for i in group]
        names = [t["name"] for t in members]
        for t in members:
            folder, source, result = out / "traj" / t["name"], t["source"], t["result"]
            (folder / "harbor").mkdir(parents=True)
            shutil.copytree(source, folder / "harbor" / source.name, copy_function=link, symlinks=True)
            for csv in ("samples.csv", "state.csv"):
                first = out / "traj" / names[0] / csv
                if first.exists():
                    link(first, folder / csv)
                elif (out / csv).exists():
                    rows_between(out / csv, first, members[0]["t0"] - 3, max(m["t1"] for m in members) + 3)
            write_json(folder / "samples.meta.json", meta)
            own = [c for c in calls if c.get("session") == f"{source.name}__agent"]
            (folder / "calls.jsonl").write_text("".join(json.dumps(c) + "\n" for c in own), encoding="utf-8")
            exception = (result.get("exception_info") or {}).get("exception_type")
            trial = {
                "schema": 1, "trajectory": t["name"], "task": t["task"], "policy": "mini-swe-agent", "rep": t["rep"], "mode": "live",
                "recording": None, "model": server["model_id"], "agent": "mini-swe-agent", "harbor_version": run["versions"]["harbor"],
                "profile": "terminal-bench", "hardware": energylib.hardware_name(meta), "environment": "docker",
                "server": {"kind": "command" if "command" in server else server["module"], "version": run["versions"]["server"],
                           "max_context": server["max_context"]},
                "context_limit": server["max_context"], "t_begin": t["t0"], "t_end": t["t1"], "harbor_exit": run["harbor_exit"],
                "ended": "interrupted" if exception == "CancelledError" else "finished", "reason": exception, "exception": exception,
                "reward": ((result.get("verifier_result") or {}).get("rewards") or {}).get("reward"), "concurrency": len(members),
                **({"shared": {"group": f"g{number:03d}", "members": names}} if len(members) > 1 else {}),
                "calib_sha256": None, "versions": run["versions"],
            }  # fmt: skip
            write_json(folder / "trial.json", trial)
            folders.append(folder)
    return folders


# --- the run -----------------------------------------------------------------------------------------------------------------------


class Run:
    """One run from the first byte to the last; `close` ends everything that `go` started, whatever became of it."""

    def __init__(self, config, out):
        self.config, self.out = config, out
        self.server, self.bench, self.energy = config["server"], config["terminal_bench"], config["energy"]
        self.started = []  # processes in order of start
        self.harbor = self.server_process = None
        self.offset = None  # of the evaluation in server.log; None until the preflight passed
        self.sessions = None
        self.lock = None
        self.hashes = None
        self.record = None

    def prepare(self):
        """Resolve every command and write it down; nothing is started but `docker context show`."""
        self.out.mkdir(parents=True)
        host = agent_host(self.bench)
        write_json(self.out / "agent.yaml", agent_config(self.config))
        write_json(self.out / "compose.yaml", compose_overlay(self.out, host))
        (self.out / "source.diff").write_bytes(git("diff", "HEAD") or b"")
        revision = git("rev-parse", "HEAD")
        self.record = {
            "config": {**self.config, "server": recorded(self.server)},
            "revision": revision.decode().strip() if revision else None,
            "server": server_argv(self.server),
            "harbor": harbor_argv(self.config, self.out, host),
            "probe": probe_argv(self.config, host),
            "proxy": proxy_argv(self.config, self.out) if self.bench["proxy"] else None,
            "sampler": sampler_argv(self.energy, self.out) if self.energy["enabled"] else None,
            "versions": {"harbor": harbor_version(), "mini-swe-agent": None if self.bench["agent_preinstalled"] else AGENT_VERSION,
                         "python": platform.python_version(), "platform": platform.platform(), "docker": None, "server": None},
            "artifacts": None,
            "sessions": None,
            "preflight_end": None,
            "harbor_exit": None,
        }  # fmt: skip
        self.write_record()

    def write_record(self):
        write_json(self.out / "run.json", self.record)

    def start(self, name, argv, grace_s, env=None):
        process = Process(argv, self.out / f"{name}.log", grace_s, env or child_env())
        self.started.append(process)
        return process

    def go(self):
        if not harbor_bin().exists():
            raise RuntimeError(f"{harbor_bin()} is missing: run setup.sh first (EXECUTORCH_EVAL_CACHE says where)")
        for name in ("server", "harbor"):
            (self.out / f"{name}.log").touch()
        check_port(server_host(self.server), self.server["port"], "[server] port")
        if self.bench["proxy"]:
            check_port(self.server["host"], self.bench["proxy_port"], "[terminal_bench] proxy_port")
        if self.energy["enabled"]:
            self.measure()
        self.hash_in_background()
        self.server_process = self.start("server", self.record["server"], self.bench["server_stop_s"], child_env(self.server))
        self.await_ready()
        if self.bench["proxy"]:
            self.start_proxy()
        self.sessions = self.choose_sessions()
        self.finish_record()
        begin = (self.out / "server.log").stat().st_size
        self.preflight()
        self.record["preflight_end"] = time.time()
        self.offset = offset_behind_preflight(self.out / "server.log", begin)
        self.write_record()
        print(f"preflight passed: a container reaches {self.server['model_id']} ({self.sessions} sessions)", flush=True)
        self.run_harbor()

    def measure(self):
        folder = os.environ.get("TRAJOULE_LOCK_DIR") or os.environ.get("TRAJOULE_RUN_DIR") or "/tmp"  # as measuring_lock of common.sh
        path = Path(folder, "trajoule-measuring.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            path.chmod(0o666)
        self.lock = open(path)  # noqa: SIM115 - held until the run ends; read only: the file may be another user's
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"something else is measuring on this machine (it holds {path}): wait for it, or stop it") from None
        sampler = self.start("sampler", self.record["sampler"], 15)
        samples = self.out / "samples.csv"
        self.wait_for(lambda: samples.exists() and samples.read_bytes()[:8192].count(b"\n") >= 2, sampler, 30, "the sampler gave no row")

    def wait_for(self, ready, process, limit_s, what, every_s=0.1):
        end = time.monotonic() + limit_s
        while not ready():
            if process.code() is not None:
                raise RuntimeError(f"{what}: {process.last_words()} (exit {process.code()}; log: {process.log})")
            if time.monotonic() > end:
                raise TimeoutError(f"{what} within {limit_s:g} s; log: {process.log}")
            time.sleep(every_s)

    def hash_in_background(self):
        """While the server loads its weights; done before anything is measured."""
        self.hashes = {}

        def work():
            self.hashes.update(artifacts(self.server))

        self.hasher = threading.Thread(target=work, daemon=True)
        self.hasher.start()

    def await_ready(self):
        seen = "nobody answered"

        def ready():
            nonlocal seen
            state = healthy(self.server)
            seen = seen if state is None else f"/health answered {state}, not yet ok"
            return state is True

        try:
            self.wait_for(ready, self.server_process, self.bench["server_ready_s"], "the server was not ready", 0.25)
        except TimeoutError as e:
            raise TimeoutError(f"{e} ({seen}); [terminal_bench] server_ready_s allows more") from None

    def start_proxy(self):
        port = self.bench["proxy_port"]
        proxy = self.start("proxy", self.record["proxy"], 15)
        url = f"http://{reach(self.server['host'])}:{port}/trajoule/health"
        self.wait_for(lambda: http_json("GET", url, 2)[0] == 200, proxy, 30, "the proxy did not start")

    def choose_sessions(self):
        """trial: a session per trial; affinity: one for all; none: the server's scratch session. Raises RuntimeError."""
        if self.bench["session_affinity"] is not None:
            return "affinity"
        if self.bench["sessions"] is False:
            return "none"
        status, body = http_json("DELETE", f"{server_url(self.server)}/v1/sessions/trajoule-preflight", timeout=10)
        if status == 200 and isinstance(body, dict) and body.get("closed") is True:
            return "trial"
        if self.bench["sessions"] or (self.bench["concurrency"] > 1 and "command" not in self.server):
            wanted = "sessions = true" if self.bench["sessions"] else f"concurrency = {self.bench['concurrency']}"
            raise RuntimeError(
                f"[terminal_bench] {wanted} needs named sessions, but DELETE /v1/sessions/… answered {status}: "
                f"take a server that has them, or set sessions = false and concurrency = 1"
            )
        return "none"

    def finish_record(self):
        self.hasher.join()
        self.record |= {"artifacts": self.hashes, "sessions": self.sessions}
        self.record["versions"] |= {"docker": docker_version(), "server": server_version(self.config)}
        self.write_record()

    def preflight(self):
        answer, log = self.out / "connection.json", self.out / "connection.log"
        why = None
        try:
            with open(answer, "wb") as out, open(log, "wb") as err:
                code = subprocess.run(self.record["probe"], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=PROBE_LIMIT_S).returncode
            body = read_json(answer)
            if code:
                why = f"curl in the container ended with {code}: {log.read_text(errors='replace').strip()[-200:]}"
            elif not isinstance(body, dict):
                why = "the answer is no JSON object"
            else:
                why = why_no_completion(body)
        except subprocess.TimeoutExpired:
            why = f"no answer within {PROBE_LIMIT_S} s"
        except OSError as e:
            why = f"docker could not be run: {e.strerror}"
        finally:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["docker", "rm", "--force", probe_name()], capture_output=True, timeout=20)
        if why:
            raise RuntimeError(f"preflight: a container got no completion from the server: {why}; see {answer}, {log} and {self.out / 'server.log'}")

    def run_harbor(self):
        env = child_env() | {"TRAJOULE_SESSIONS": self.sessions}
        env["PYTHONPATH"] = os.pathsep.join(x for x in (str(HERE), env.get("PYTHONPATH")) if x)
        guard = [sys.executable, str(HERE / "contain.py"), "--label", f"{LABEL}={self.out}", "--grace", str(HARBOR_STOP_S), "--"]
        self.harbor = self.start("harbor", [*guard, *self.record["harbor"]], HARBOR_STOP_S + 40, env)
        checked, dead = time.monotonic(), 0
        while self.harbor.code() is None:
            time.sleep(0.2)
            if self.server_process.code() is not None:
                raise RuntimeError(f"the server ended while Harbor ran (exit {self.server_process.code()}): {self.server_process.last_words()}; see server.log")
            if time.monotonic() - checked > HEALTH_EVERY_S:
                checked = time.monotonic()
                dead = dead + 1 if healthy(self.server) == 503 else 0
                if dead >= DEAD_AFTER:
                    raise RuntimeError(f"the server's worker is dead: /health answered 503 {dead} times in a row; see {self.out / 'server.log'}")
        self.record["harbor_exit"] = self.harbor.code()
        if self.harbor.code():
            raise RuntimeError(f"Harbor ended with {self.harbor.code()}: {self.harbor.last_words()}; see {self.out / 'harbor.log'}")
        check_job(self.out)

    def close(self):
        """End what runs: Harbor first, since it still needs the server to close its sessions; then write what there is to say."""
        if self.harbor:
            self.record["harbor_exit"] = self.harbor.stop(signal.SIGINT)
        for process in reversed(self.started):
            process.stop()
        if self.lock:
            self.lock.close()
        for folder, result in trial_results(self.out):
            print(summary_line(folder, result), flush=True)
        metrics = self.metrics()
        write_json(self.out / "metrics.json", metrics)
        if told := agent_versions(self.out):
            self.record["versions"]["mini-swe-agent"] = told
        self.write_record()
        if self.energy["enabled"] and self.offset is not None:
            folders = write_trajectories(self.out, self.config, self.record)
            if folders:
                print(f"{len(folders)} trajectories for align_trial.py: {self.out / 'traj'}", flush=True)
        return metrics

    def turns(self):
        return read_turns(self.out / "server.log", self.offset)

    def calls(self):
        return read_calls(self.out / "calls.jsonl", self.record["preflight_end"])

    def metrics(self):
        if self.offset is None:
            return empty_metrics()
        turns, malformed = self.turns()
        if not turns and self.bench["proxy"]:
            return call_metrics(self.calls(), self.config)
        return turn_metrics(turns, malformed, self.config)

    def verdict(self, metrics):
        """What can only be judged once everything has ended. Raises RuntimeError."""
        if metrics["requests"] == 0:
            raise RuntimeError(
                f"no model request was counted: neither `llm_turn_stats` lines in server.log nor calls in a proxy's log; "
                f"for a server without such lines set [terminal_bench] proxy = true ({self.out / 'metrics.json'})"
            )
        if self.sessions == "trial" and metrics["source"] == "turn_stats":
            check_sessions(self.turns()[0], self.out)
        if self.bench["proxy"]:
            check_callers(self.calls(), self.out)
        if metrics["context_violations"]:
            raise RuntimeError(
                f"{metrics['context_violations']} of {metrics['requests']} requests had no room for max_output_tokens in max_context "
                f"(longest prompt {metrics['peak_prompt_tokens']} tokens): raise [server] max_context, or lower max_output_tokens or step_limit"
            )


def why_no_completion(body):
    """Why a body is no chat completion with at least one token, None when it is one."""
    choices = body.get("choices")
    message = choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    if body.get("object") != "chat.completion":
        return f"object is {body.get('object')!r}, expected 'chat.completion'"
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return "choices[0].message is no assistant's"
    if not whole(usage.get("completion_tokens")) or usage["completion_tokens"] < 1:
        return f"usage.completion_tokens is {usage.get('completion_tokens')!r}, expected 1 or more"
    return None


def interrupt(*_):
    raise KeyboardInterrupt


def main(argv=None):
    p = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", required=True, type=Path, metavar="PATH", help="TOML file; start from ../configs/terminal-bench.example.toml")
    p.add_argument("--task", action="append", metavar="NAME", help="task name or glob, instead of the file's `tasks`; may be repeated")
    p.add_argument("--output", type=Path, metavar="DIR", help="new folder for the results (default: one in the cache, named by the time)")
    p.add_argument("--dry-run", action="store_true", help="write the resolved commands and start nothing")
    args = p.parse_args(argv)
    if sys.platform not in ("linux", "darwin"):
        p.error(f"this runs on Linux and macOS, not on {sys.platform}")
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:  # nohup's choice stands
            signal.signal(s, interrupt)
    run = None
    try:
        config = load_config(args.config, args.task)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        out = (args.output or cache_root() / "terminal-bench" / "runs" / stamp).expanduser().absolute()
        if out.exists():
            raise FileExistsError(f"--output {out}: exists already, and a run never mixes with another one: name a new folder")
        run = Run(config, out)
        run.prepare()
        print(f"Results: {out}", flush=True)
        if args.dry_run:
            for line in missing_files(config["server"]):
                print(f"run.sh: a run would fail: {line}", file=sys.stderr)
            return 0
        try:
            run.go()
        finally:
            with ignoring_signals():
                metrics = run.close()
        run.verdict(metrics)
        return 0
    except KeyboardInterrupt:
        print("run.sh: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, KeyError, RuntimeError, subprocess.SubprocessError) as e:
        text = e.args[0] if isinstance(e, KeyError) and e.args else e
        print(f"run.sh: {' '.join(str(text).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
