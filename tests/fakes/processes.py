"""What lives on this machine, for tests that show that nothing is left."""

import os
import time
from pathlib import Path


def mentioning(*words):
    """Command lines of living processes that contain one of the words (a port, a folder), this one left out."""
    found = []
    for p in Path("/proc").iterdir():
        if p.name.isdigit() and int(p.name) != os.getpid():
            try:
                line = (p / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (p / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and any(w in line for w in words):
                found.append(line)
    return found


def left_of(*words, seconds=20):
    """The same once they are gone, or after so many seconds."""
    end = time.monotonic() + seconds
    while (found := mentioning(*words)) and time.monotonic() < end:
        time.sleep(0.2)
    return found
