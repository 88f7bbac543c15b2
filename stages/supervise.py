"""Run one command in a process group of its own and leave nothing behind, however this ends.

    python stages/supervise.py --name server --log logs/server.log -- python servers/llamacpp.py --port 8000
    python stages/supervise.py --deadline 900 -- harbor run -c job.json

A signal to the supervisor (TERM, INT, HUP) goes to the command; what is left of its descendants after --grace seconds is killed, also
processes that made a session of their own (a tmux server, an engine's workers). When whoever started the supervisor dies, even by
kill -9, the supervisor ends as if it had been terminated; when the supervisor itself is killed, the kernel kills the command. With
--name the group is noted under .cache/run, and a leftover of the same name (its supervisor was killed) is ended before the start.

With --needs PID the command is ended when that process has: what it does would be for nothing without its sampler or proxy.

Exit code: the command's (128 + N for signal N), 124 when the deadline ended it, 123 when a process that it needs was gone, 125 when it
could not be started or its group not be noted.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
RUN_DIR = Path(os.environ.get("TRAJOULE_RUN_DIR") or Path(__file__).resolve().parent.parent / ".cache" / "run")


def prctl(option, value):
    """prctl(2) where the system has it; elsewhere (macOS) process groups alone must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def stat_fields(pid):
    """(state, parent pid, process group, start time in clock ticks) of a process, None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[2]), int(fields[19])


def start_of(pid):
    """Start time of a living process, None when it has ended (a zombie too)."""
    s = stat_fields(pid)
    return s[3] if s and s[0] != "Z" else None


def descendants(root):
    """Pids below `root`, zombies left out."""
    parents = {}
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            s = stat_fields(entry.name)
            if s and s[0] != "Z":
                parents[int(entry.name)] = s[1]
    found, todo = [], [root]
    while todo:
        parent = todo.pop()
        children = [pid for pid, pp in parents.items() if pp == parent]
        found += children
        todo += children
    return found


def signal_group(pgid, sig):
    try:
        os.killpg(pgid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_leftover(name, grace_s):
    """End the process group that an earlier supervisor of this name noted and could not end itself."""
    note = RUN_DIR / f"{name}.json"
    try:
        old = json.loads(note.read_text())
        if lacking := [k for k in ("pid", "start", "supervisor", "supervisor_start") if not isinstance(old[k], int)]:
            raise TypeError(lacking[0])
    except OSError:
        return
    except (ValueError, KeyError, TypeError):
        print(f"supervise: {note}: found no note of a process group, expected one as this program writes it; it counts for none", file=sys.stderr)
        return
    s = stat_fields(old["pid"])
    supervisor = stat_fields(old["supervisor"])
    if supervisor and supervisor[3] == old["supervisor_start"]:
        sys.exit(f"supervise: '{name}' already runs (supervisor pid {old['supervisor']}, started by {old.get('command')}): stop it first")
    # The leader may be dead while its group lives on; a group id is not given out again as long as a member exists.
    members = [
        p.name for p in Path("/proc").iterdir() if p.name.isdigit() and (f := stat_fields(p.name)) and f[2] == old["pid"] and f[0] != "Z"
    ]
    if not members or (s and s[3] != old["start"]):
        note.unlink(missing_ok=True)
        return
    print(f"supervise: ending {len(members)} process(es) left over from an earlier '{name}'", file=sys.stderr)
    signal_group(old["pid"], signal.SIGTERM)
    end = time.monotonic() + grace_s
    while time.monotonic() < end and any(stat_fields(m) for m in members):
        time.sleep(0.1)
    signal_group(old["pid"], signal.SIGKILL)
    note.unlink(missing_ok=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--name", help="note the group under this name and end a leftover of the same name first")
    p.add_argument("--log", type=Path, help="append the command's output to this file")
    p.add_argument("--grace", type=float, default=15.0, help="seconds between TERM and KILL")
    p.add_argument("--detachable", action="store_true", help="do not end with whoever started this: for a server that is started with nohup")
    p.add_argument("--parent", type=int, help="who started this; without it, a starter that dies before Python is up is not noticed")
    p.add_argument("--deadline", type=float, help="seconds after which the command is ended")
    p.add_argument("--needs", type=int, action="append", default=[], metavar="PID", help="end the command when this process ends")
    p.add_argument("command", nargs="+", help="-- COMMAND [ARG ...]")
    a = p.parse_args()
    parent = a.parent or os.getppid()
    if not a.detachable:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(0)  # it died before we could ask to be told
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    needed = {pid: start_of(pid) for pid in a.needs} if sys.platform == "linux" else {}
    if a.name:
        end_leftover(a.name, a.grace)

    wanted = []
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(s) != signal.SIG_IGN:  # nohup's choice stands
            signal.signal(s, lambda n, _: wanted.append(n))
    me = os.getpid()

    def in_child():
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(125)

    try:
        out = open(a.log, "ab", buffering=0) if a.log else None  # noqa: SIM115 - lives as long as the command
    except OSError as e:
        print(f"supervise: --log {a.log}: {e.strerror}; without its log {a.command[0]} is not run", file=sys.stderr)
        sys.exit(125)
    try:
        child = subprocess.Popen(a.command, preexec_fn=in_child, stdin=subprocess.DEVNULL if out else None, stdout=out, stderr=out)  # noqa: PLW1509
    except OSError as e:
        print(f"supervise: {a.command[0]}: {e.strerror}", file=sys.stderr)
        sys.exit(125)
    if a.name:
        note = {
            "pid": child.pid,
            "start": (stat_fields(child.pid) or (0, 0, 0, 0))[3],
            "supervisor": me,
            "supervisor_start": (stat_fields(me) or (0, 0, 0, 0))[3],
            "command": " ".join(a.command),
        }
        tmp = RUN_DIR / f"{a.name}.json.tmp{me}"
        try:
            RUN_DIR.mkdir(parents=True, exist_ok=True)
            tmp.write_text(json.dumps(note))
            os.replace(tmp, RUN_DIR / f"{a.name}.json")
        except OSError as e:
            with contextlib.suppress(OSError):
                tmp.unlink(missing_ok=True)
            child.kill()
            print(f"supervise: {RUN_DIR}/{a.name}.json: {e.strerror}; without this note {a.command[0]} is not run", file=sys.stderr)
            sys.exit(125)

    end = time.monotonic() + a.deadline if a.deadline else None
    late = gone = False
    kill_at = None
    while True:
        try:
            code = child.wait(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            pass
        if end and time.monotonic() > end and not late:
            late = True
            wanted.append(signal.SIGTERM)
        if not gone and any(start is None or start_of(pid) != start for pid, start in needed.items()):
            gone = True
            wanted.append(signal.SIGTERM)
        if not a.detachable and not kill_at and os.getppid() != parent:  # for systems that do not signal it
            wanted.append(signal.SIGTERM)
        while wanted:
            signal_group(child.pid, wanted.pop(0))
            kill_at = kill_at or time.monotonic() + a.grace
        if kill_at and time.monotonic() > kill_at:
            signal_group(child.pid, signal.SIGKILL)

    # What the command left running: adopted by us as subreaper, whatever its group or session.
    if sys.platform != "linux":
        signal_group(child.pid, signal.SIGTERM)
    end_descendants(min(a.grace, 5.0))
    if a.name:
        (RUN_DIR / f"{a.name}.json").unlink(missing_ok=True)
    sys.exit(124 if late else 123 if gone else code if code >= 0 else 128 - code)


def end_descendants(grace_s):
    """Terminate every process below this one, and kill what is left after `grace_s` seconds."""
    me = os.getpid()
    for pid in descendants(me):
        with_signal(pid, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while descendants(me) and time.monotonic() < end:
        reap()
        time.sleep(0.05)
    while left := descendants(me):
        for pid in left:
            with_signal(pid, signal.SIGKILL)
        reap()
        time.sleep(0.02)


def with_signal(pid, sig):
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        return


def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
