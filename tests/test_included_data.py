"""The commands that the README gives for the included data, run as they stand there, reproduce what is committed."""

import json
import math
import re
import subprocess
import sys


def close(a, b, where=""):
    """None, or the first place where two JSON values differ by more than rounding of other processors' arithmetic."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(a.keys() ^ b.keys())}"
        return next((d for k in a if (d := close(a[k], b[k], f"{where}.{k}"))), None)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{where}: length"
        return next((d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := close(x, y, f"{where}[{i}]"))), None)
    if isinstance(a, float) or isinstance(b, float):
        both = isinstance(a, int | float) and isinstance(b, int | float)
        return None if both and math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9) else f"{where}: {a} {b}"
    return None if a == b else f"{where}: {a!r} {b!r}"


def readme_command(repo, program):
    """Arguments of the README's command line for a program, continuation lines joined."""
    text = (repo / "README.md").read_text().replace("\\\n", " ")
    return re.search(rf"^python {program} (.*)$", text, re.M)[1].split()


def test_the_calibration_is_reproduced_by_the_readmes_command(repo, tmp_path):
    args = readme_command(repo, "calibrate.py")
    assert args[-2:] == ["--out-dir", "results/calib_rerun"]
    r = subprocess.run([sys.executable, "calibrate.py", *args[:-1], str(tmp_path)], cwd=repo, capture_output=True, text=True, timeout=280)
    assert r.returncode == 0, r.stderr
    new, committed = (json.loads((p / "params.json").read_text()) for p in (tmp_path, repo / "results" / "calib"))
    for p in (new, committed):
        p.pop("created", None)
    assert close(committed, new) is None


def test_the_readmes_accuracy_table_is_that_of_params_json(repo):
    params = json.loads((repo / "results" / "calib" / "params.json").read_text())
    text = (repo / "README.md").read_text()
    cell = params["energy"]["gpu"]["held_out"]["leave_one_cell_out"]
    for name, value in (("GPU energy of a call", cell["total"]["mape"]), ("GPU energy above idle", cell["above_idle"]["mape"])):
        stated = float(re.search(rf"\| {name} \| ([\d.]+) %", text)[1])
        assert abs(stated - 100 * value) < 0.06 or abs(stated - value) < 0.06
    assert params["hardware"].startswith("1x NVIDIA H200")
