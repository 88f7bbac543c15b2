"""stages/compare.py: what counts as the same result, and what does not."""

import json

import pytest

from stages import compare


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.csv").write_text("task,joules\nx,1000.0\ny,\n")
        (tmp_path / name / "p.json").write_text(json.dumps({"created": name, "fit": [1.0, None, True], "words": "w"}))
        (tmp_path / name / "f.png").write_bytes(name.encode())
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("t.csv", "task,joules\nx,1000.01\ny,\n", None),
        ("t.csv", "task,joules\nx,1000.2\ny,\n", "[0].joules: '1000.0' against '1000.2'"),
        ("t.csv", "task,joules\nx,1000.0\ny,0\n", "[1].joules: '' against '0'"),
        ("t.csv", "task,joules\nx,1000.0\n", "2 entries against 1"),
        ("t.csv", "task,watts\nx,1000.0\ny,\n", "only in one of them: joules, watts"),
        ("p.json", '{"created": "c", "fit": [1.00001, null, true], "words": "w"}', None),
        ("p.json", '{"fit": [1.0, 0, true], "words": "w"}', "fit[1]: None against 0"),
        ("p.json", '{"fit": [1.0, null, 1], "words": "v"}', "words: 'w' against 'v'"),
        ("q.json", "{}", "not in"),
    ],
)
def test_what_is_the_same(folders, capsys, file, text, said):
    a, b = folders
    (b / file).write_text(text)
    code, out = compare.main([str(a), str(b)]), capsys.readouterr().out
    assert code == (said is not None) and (said or "2 of 2 files are the same") in out


def test_two_files_are_compared_too(folders, capsys):
    a, b = folders
    assert compare.main([str(a / "t.csv"), str(b / "t.csv")]) == 0 and "t.csv: the same" in capsys.readouterr().out
    (b / "u.csv").write_text("task,joules\nx,900\ny,\n")
    assert compare.main([str(a / "t.csv"), str(b / "u.csv")]) == 1
    assert "t.csv, u.csv: [0].joules: '1000.0' against '900'" in capsys.readouterr().out
    for pair, said in (
        ((a, b / "t.csv"), "found a folder and .csv"),
        ((a / "t.csv", b / "p.json"), "found .csv and .json"),
        ((a / "f.png", b / "f.png"), "found .png and .png"),
        ((a / "t.csv", b / "none.csv"), "none.csv: No such file"),
    ):
        assert compare.main([str(x) for x in pair]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_nothing_to_compare_is_an_error_of_one_line(tmp_path, folders, capsys):
    (tmp_path / "c").mkdir()
    (folders[1] / "p.json").write_text("{")
    for other in (tmp_path / "none", folders[1]):
        assert compare.main([str(folders[0]), str(other)]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert compare.main([str(tmp_path / "c"), str(tmp_path / "c")]) == 2


@pytest.mark.parametrize("name", ["t.csv", "p.json"])
def test_a_file_that_is_not_utf_8_is_named(folders, capsys, name):
    (folders[1] / name).write_bytes(b"task\n\xe9\n")
    assert compare.main([str(f) for f in folders]) == 2
    err = capsys.readouterr().err
    assert f"{folders[1] / name}: " in err and err.count("\n") == 1


def test_a_row_with_a_cell_too_many_is_a_difference(folders, capsys):
    (folders[1] / "t.csv").write_text("task,joules\nx,1000.0,7\ny,\n")
    assert compare.main([str(f) for f in folders]) == 1 and "only in one of them: None" in capsys.readouterr().out
