"""Stands in for `docker` where no engine is under test: `docker run … --entrypoint curl IMAGE ARGS` runs the machine's own curl.

Every command line is appended to DOCKER_FAKE_LOG; DOCKER_FAKE=hang makes `run` hang, DOCKER_FAKE=colima names that context.
"""

import json
import os
import subprocess
import sys
import time

with open(os.environ["DOCKER_FAKE_LOG"], "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\n")
how, words = os.environ.get("DOCKER_FAKE"), sys.argv[1:]
if words[:2] == ["context", "show"]:
    print("colima" if how == "colima" else "default")
elif words[:1] == ["version"]:
    print("0.0-fake")
elif words[:1] == ["run"]:
    if how == "hang":
        time.sleep(600)
    sys.exit(subprocess.run(["curl", *words[words.index("--entrypoint") + 3 :]]).returncode)
