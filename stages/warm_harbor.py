"""Harbor from a process that has its imports behind it: they take longer than a short trial (8 s of CPU on a slow core), so a batch pays them once.

    python stages/warm_harbor.py serve .cache/run/harbor.sock                       # imports, then answers until it is ended
    HARBOR_SOCKET=.cache/run/harbor.sock python stages/warm_harbor.py run -c job.json -y     # what `harbor run -c job.json -y` does

Every run is a fork of the server, with the caller's arguments, environment, folder and output, and its exit code comes back. A signal to
the caller goes to the run; when the caller is gone, the run is terminated, and killed with all that it started should it not end within
10 s; when the server dies, the kernel kills its runs. Without HARBOR_SOCKET, or when nobody answers there, Harbor is started as usual.
"""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import supervise  # noqa: E402

GRACE_S = 10.0


def address(path):
    """A name of the socket `path` that fits into the 108 bytes of a socket address, however deep the checkout lies."""
    return f"/proc/self/fd/{os.open(path.parent, os.O_PATH | os.O_CLOEXEC)}/{path.name}"


def serve(path):
    """Answer on the socket `path` until a signal ends this. It appears once the imports are done."""
    import gc
    import importlib

    # What a trial needs; litellm alone is most of it.
    for module in ("harbor.cli.main", "litellm", "harbor.agents.terminus_2.terminus_2", "harbor.environments.docker.docker", "local_env"):
        importlib.import_module(module)
    if threading.active_count() > 1:
        sys.exit(f"warm_harbor: {threading.active_count() - 1} thread(s) run after the imports, a fork would lose them; is LITELLM_OFFLINE_MODE set?")
    gc.freeze()  # the collector would touch, and so copy, every page that the runs share
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, lambda n, _: sys.exit(128 + n))
    signal.signal(signal.SIGCHLD, lambda *_: supervise.reap())
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address(path))
    server.listen()
    me = os.getpid()
    try:
        while True:
            caller, _ = server.accept()
            if os.fork() == 0:
                server.close()
                become(caller, me)
            caller.close()
    finally:
        if os.getpid() == me:
            path.unlink(missing_ok=True)


def become(caller, server_pid):
    """In the fork: do what the caller would have done, to the end. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # TERM and HUP raise SystemExit, as in the server, until Harbor sets its own handler
        os.setsid()
        supervise.prctl(supervise.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(125)
        supervise.prctl(supervise.PR_SET_CHILD_SUBREAPER, 1)
        length, fds, _, _ = socket.recv_fds(caller, 8, 3)
        asked = json.loads(caller.recv(int.from_bytes(length), socket.MSG_WAITALL))
        for fd, to in zip(fds, (0, 1, 2), strict=True):
            os.dup2(fd, to)
            os.close(fd)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        random.seed()
        threading.Thread(target=watch, args=(caller,), daemon=True).start()
        sys.argv = ["harbor", *asked["argv"]]
        from harbor.cli.main import app

        code = app()
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
    try:
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(s, signal.SIG_IGN)
        code = code if isinstance(code, int) else 0 if code is None else 1
        sys.stdout.flush()
        sys.stderr.flush()
        supervise.end_descendants(GRACE_S)
        caller.send(bytes([code % 256]))
    finally:
        os._exit(code % 256 if isinstance(code, int) else 1)


def watch(caller):
    """Signals of the caller reach the run; without a caller it ends."""
    main = threading.main_thread().ident
    with contextlib.suppress(OSError):
        while number := caller.recv(1):
            signal.pthread_kill(main, number[0])
    signal.pthread_kill(main, signal.SIGTERM)
    time.sleep(GRACE_S)
    supervise.end_descendants(0)
    os.kill(os.getpid(), signal.SIGKILL)


def run(argv):
    """`harbor ARGV`: by the server where one answers, and returns its exit code; in this process's place otherwise."""
    caller = socket.socket(socket.AF_UNIX)
    try:
        caller.connect(address(Path(os.environ["HARBOR_SOCKET"])))
    except (KeyError, OSError):
        os.execv(Path(sys.executable).with_name("harbor"), ["harbor", *argv])
    asked = json.dumps({"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    socket.send_fds(caller, [len(asked).to_bytes(8)], [0, 1, 2])
    caller.sendall(asked)

    def pass_on(number, _):
        with contextlib.suppress(OSError):
            caller.send(bytes([number]))

    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, pass_on)
    try:
        code = caller.recv(1)
    except OSError:
        code = b""
    return code[0] if code else 128 + signal.SIGKILL


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    elif len(sys.argv) > 1 and sys.argv[1] == "run":
        sys.exit(run(sys.argv[1:]))
    else:
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)


if __name__ == "__main__":
    main()
