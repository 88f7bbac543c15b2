"""The commands that the README gives for the included data, run as they stand there, reproduce what is committed."""

import json
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from stages import compare


def readme_command(repo, program):
    """Arguments of the README's command line for a program, continuation lines joined."""
    text = (repo / "README.md").read_text().replace("\\\n", " ")
    return re.search(rf"^python {program} (.*)$", text, re.M)[1].split()


def test_the_calibration_is_reproduced_by_the_readmes_command(repo, tmp_path):
    args = readme_command(repo, "calibrate.py")
    assert args[-2:] == ["--out-dir", "results/calib_rerun"]
    r = subprocess.run([sys.executable, "calibrate.py", *args[:-1], str(tmp_path)], cwd=repo, capture_output=True, text=True, timeout=280)
    assert r.returncode == 0, r.stderr
    found = compare.compare(repo / "results" / "calib", tmp_path)
    assert [d for d in found if d[1]] == [] and "params.json" in dict(found)


def test_the_table_of_trajectories_is_reproduced_from_their_counters_and_logs(repo, tmp_path):
    with tarfile.open(repo / "data" / "trajectories.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "out").mkdir()
    folders = sorted(str(p.parent) for p in (tmp_path / "traj").glob("*/trial.json"))
    command = [sys.executable, "align_trial.py", *folders, "--calib", "results/calib", "--out", str(tmp_path / "out/trials_formal.csv")]
    r = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    (tmp_path / "committed").mkdir()
    shutil.copy(repo / "results" / "trials_formal.csv", tmp_path / "committed")
    assert compare.compare(tmp_path / "committed", tmp_path / "out") == [("trials_formal.csv", None)]


def test_the_evaluation_is_reproduced_by_the_readmes_command(repo, tmp_path):
    args = readme_command(repo, "evaluate.py")
    if not (repo / args[args.index("--trials") + 1]).exists():
        pytest.skip("SKIPPED: no trajectories are included yet, so the README's evaluation cannot be compared")
    assert args[-2:] == ["--out", "results/eval_rerun"]
    r = subprocess.run([sys.executable, "evaluate.py", *args[:-1], str(tmp_path)], cwd=repo, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert [d for d in compare.compare(repo / "results" / "eval", tmp_path) if d[1]] == []


def test_the_readmes_accuracy_table_is_that_of_params_json(repo):
    params = json.loads((repo / "results" / "calib" / "params.json").read_text())
    text = (repo / "README.md").read_text()
    cell = params["energy"]["gpu"]["held_out"]["leave_one_cell_out"]
    for name, value in (("GPU energy of a call", cell["total"]["mape"]), ("GPU energy above idle", cell["above_idle"]["mape"])):
        stated = float(re.search(rf"\| {name} \| ([\d.]+) %", text)[1])
        assert abs(stated - 100 * value) < 0.06 or abs(stated - value) < 0.06
    assert params["hardware"].startswith("1x NVIDIA H200")
