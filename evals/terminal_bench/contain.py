"""Run Harbor and remove its containers afterwards, however it ended.

    python contain.py --label KEY=VALUE --grace 20 -- harbor run ...

Harbor takes its containers down itself, unless it is killed or hangs: containers belong to the engine, not to a process group. Here a signal
(TERM, INT, HUP) lets Harbor end by itself; after --grace seconds it is killed. Then whatever carries the label, with its whole compose
project, is removed. Exit code: Harbor's (128 + N for signal N).
"""

import argparse
import signal
import subprocess
import sys
import time

PROJECT = "com.docker.compose.project"


def docker(*args):
    """Words of docker's output; nothing when it fails or does not answer."""
    try:
        return subprocess.run(["docker", *args], capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def remove(label):
    """Force-remove the labelled containers, the rest of their compose projects, and those projects' networks and volumes."""
    ids = docker("ps", "--all", "--quiet", "--filter", f"label={label}")
    if not ids:
        return
    projects = set(docker("inspect", "--format", f'{{{{index .Config.Labels "{PROJECT}"}}}}', *ids))
    for project in projects:
        ids += docker("ps", "--all", "--quiet", "--filter", f"label={PROJECT}={project}")
    print(f"contain: removing {len(set(ids))} container(s) that Harbor left", file=sys.stderr, flush=True)
    docker("rm", "--force", "--volumes", *sorted(set(ids)))
    for project in projects:
        for kind in ("network", "volume"):
            if left := docker(kind, "ls", "--quiet", "--filter", f"label={PROJECT}={project}"):
                docker(kind, "rm", *left)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--label", required=True, metavar="KEY=VALUE", help="label of the containers")
    p.add_argument("--grace", type=float, default=20.0, metavar="S", help="seconds that Harbor has after a signal")
    p.add_argument("command", nargs="+", help="-- COMMAND [ARG ...]")
    a = p.parse_args()
    got = []
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, lambda n, _: got.append(n))
    # The same group: whoever signals the group reaches Harbor too. In a child, handlers become the default again.
    try:
        harbor = subprocess.Popen(a.command)
    except OSError as e:
        print(f"contain: {a.command[0]}: {e.strerror}", file=sys.stderr)
        sys.exit(125)
    deadline = None
    while True:
        try:
            code = harbor.wait(0.1)
            break
        except subprocess.TimeoutExpired:
            pass
        if got and deadline is None:
            deadline = time.monotonic() + a.grace
        if deadline and time.monotonic() > deadline:
            harbor.kill()
    remove(a.label)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
