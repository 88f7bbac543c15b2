"""What every test may use: the repository on sys.path, free ports, and the flag that keeps slow tests apart."""

import signal
import socket
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
