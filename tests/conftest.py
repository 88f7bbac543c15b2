"""What every test may use: the repository on sys.path, free ports, and the flag that keeps slow tests apart."""

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a shell: what tests start would be deaf to SIGINT, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
sys.path.insert(0, str(REPO / "tests"))


@pytest.fixture(scope="session")
def repo():
    """Root folder of the repository."""
    return REPO


@pytest.fixture
def free_port():
    """A function that returns a TCP port of 127.0.0.1 that nothing listens on now."""

    def find():
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return s.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def nvml_dir(repo, tmp_path_factory):
    """Folder with the fake libnvidia-ml.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the fake NVML")
    folder = tmp_path_factory.mktemp("nvml")
    source = repo / "tests/fakes/nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "libnvidia-ml.so.1", source, "-lpthread"], check=True)
    return folder


@pytest.fixture(scope="module")
def llamacpp_server(repo, tmp_path_factory):
    """URL of a real llama.cpp server with the bundled model, two slots of 512 tokens."""
    pytest.importorskip("xllamacpp")
    from servers.adapter import get

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    p = subprocess.Popen([sys.executable, str(repo / "servers" / "llamacpp.py"), "--port", str(port), "--ctx", "512", "--parallel", "2",
                          "--cache-dir", str(tmp_path_factory.mktemp("models"))], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        get("llamacpp", f"http://127.0.0.1:{port}").wait_ready(60, alive=lambda: p.poll() is None)
        yield f"http://127.0.0.1:{port}"
    finally:
        p.terminate()
        p.wait(20)
