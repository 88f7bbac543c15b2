"""What the nodes of a cluster leave, put together. Slurm itself: `bash slurm/test.sh`, against a real one."""

import csv
import hashlib
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("nodes", REPO / "slurm/nodes.py")
nodes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nodes)


def table(path, names, columns=("trajectory", "total_j")):
    with open(path, "w") as f:
        w = csv.writer(f, lineterminator="\n")
        w.writerow(columns)
        w.writerows((n, 1.5) for n in names)
    return path


def test_a_trajectory_is_aligned_with_the_calibration_of_the_node_it_ran_on(tmp_path):
    for node in ("n1", "n2"):
        (tmp_path / f"calib.{node}").mkdir()
        (tmp_path / f"calib.{node}/params.json").write_text(node)
    for name, sha in (("a", hashlib.sha256(b"n1").hexdigest()), ("b", hashlib.sha256(b"n2").hexdigest()), ("c", None)):
        (tmp_path / "traj" / name).mkdir(parents=True)
        (tmp_path / "traj" / name / "trial.json").write_text(json.dumps({"calib_sha256": sha}))
    (tmp_path / "traj/unfinished").mkdir()
    assert [p.name for p in nodes.folders(tmp_path / "traj", tmp_path / "calib.n1")] == ["a"]
    assert [p.name for p in nodes.folders(tmp_path / "traj", tmp_path / "calib.n2")] == ["b"]


def test_tables_of_nodes_become_one(tmp_path):
    tables = [table(tmp_path / "1.csv", ["a", "b"]), table(tmp_path / "2.csv", ["c"])]
    assert nodes.merge(tables, tmp_path / "all.csv") == 3
    assert (tmp_path / "all.csv").read_text() == "trajectory,total_j\na,1.5\nb,1.5\nc,1.5\n"


@pytest.mark.parametrize(
    ("names", "columns", "says"),
    [(["b"], ("trajectory", "total_j"), "b stands in .*1.csv too"), (["c"], ("trajectory", "joules"), "columns differ")],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, names, columns, says):
    first, second = table(tmp_path / "1.csv", ["a", "b"]), table(tmp_path / "2.csv", names, columns)
    with pytest.raises(ValueError, match=says):
        nodes.merge([first, second], tmp_path / "all.csv")
    assert not (tmp_path / "all.csv").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "2.csv: found no columns, expected a column trajectory"),
        (b"task,total_j\nc,1\n", "2.csv: found the columns task,total_j, expected a column trajectory"),
        (b"trajectory,total_j\n\xe9,1\n", "2.csv: not a CSV file in UTF-8"),
        (b"trajectory,total_j\nc\n", "2.csv: row 1: found more or fewer cells"),
        (b"trajectory,total_j\nc,1,2\n", "2.csv: row 1: found more or fewer cells"),
        (None, "2.csv: No such file"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys, data, says):
    first = table(tmp_path / "1.csv", ["a", "b"])
    if data is not None:
        (tmp_path / "2.csv").write_bytes(data)
    for order in ([first, tmp_path / "2.csv"], [tmp_path / "2.csv", first]):
        monkeypatch.setattr("sys.argv", ["nodes.py", "merge", *map(str, order), "--out", str(tmp_path / "all.csv")])
        with pytest.raises(SystemExit) as e:
            nodes.main()
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "all.csv").exists()


def test_a_trial_that_cannot_be_read_is_named_and_left_out(tmp_path, capsys):
    (tmp_path / "params.json").write_text("n1")
    for name, data in (("a", b"[]"), ("b", b"{"), ("c", b"\xe9"), ("d", json.dumps({"calib_sha256": hashlib.sha256(b"n1").hexdigest()}).encode())):
        (tmp_path / "traj" / name).mkdir(parents=True)
        (tmp_path / "traj" / name / "trial.json").write_bytes(data)
    assert [p.name for p in nodes.folders(tmp_path / "traj", tmp_path)] == ["d"]
    assert [line.rpartition("/trial.json ")[::2] for line in capsys.readouterr().err.splitlines()] == [
        (f"nodes: {tmp_path}/traj/{name}", "is no JSON object; left out") for name in "abc"
    ]


@pytest.mark.parametrize(("args", "says"), [("", "got 0 argument"), ("l p 1 --nodes x", "--nodes 'x'"), ("l p 1 --fast", "unknown option '--fast'")])
def test_a_wrong_call_is_refused_before_anything_is_submitted(args, says):
    r = subprocess.run(["bash", "slurm/run.sh", *args.split()], cwd=REPO, capture_output=True, text=True, timeout=30)
    assert r.returncode == 2 and says in r.stderr
