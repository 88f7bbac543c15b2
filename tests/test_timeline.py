"""stages/timeline.py: what the figure of a trajectory shows, beside what test_align_trial.py says of whole folders."""

import numpy as np
import pytest

from stages import timeline


def view(name):
    """A call of 2 s, a command of 1 s, a wait of 1 s, on a GPU and a CPU."""
    pieces = {"a": np.array([0.0, 2, 3]), "b": np.array([2.0, 3, 4]), "model": np.array([1, 0, 0], bool), "command": np.array([0, 1, 0], bool)}
    row = {"trajectory": name, "mode": "replay", "recording_source": "authored", "outcome": "success", "total_j": 5000.0, "attribution": "shared"}
    row |= {"total_domains": "gpu+cpu", "gpu_source": "nvml", "cpu_source": "estimated", "gpu_err_j": 3.0}
    row |= {f"{g}_{p}_j": j for g in ("gpu", "cpu") for p, j in (("model", 900.0), ("command", 300.0), ("waiting", 100.0))}
    return {
        "row": row,
        "seen": {"t0": 0.0, "t1": 4.0},
        "pieces": pieces,
        "domains": {"gpu": ["gpu0"], "cpu": ["cpu0"]},
        "idle_w": {"gpu0": 75.0, "cpu0": 30.0},
        "energy_between": lambda edges: {"gpu0": 200 * np.diff(edges), "cpu0": 50 * np.diff(edges)},
    }


def test_help_says_who_draws(capsys):
    with pytest.raises(SystemExit) as e:
        timeline.main(["--help"])
    assert e.value.code == 0 and "python align_trial.py data/traj/" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        timeline.main([])
    assert e.value.code == 2 and "align_trial.py --trace" in capsys.readouterr().err


def test_title_and_legend_have_room_of_their_own_whatever_the_name(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    timeline.write_timeline(tmp_path / "t", view("a-task-with-a-rather-long-name-from-somewhere__summarize-16k__r3"))
    (fig,) = drawn
    monkeypatch.undo()
    fig.canvas.draw()  # the file was drawn at another resolution
    title, legend = fig._suptitle.get_window_extent(), fig.legends[0].get_window_extent()
    others = [ax.get_tightbbox() for ax in fig.axes]
    assert title.x1 <= fig.bbox.x1 and legend.x1 <= fig.bbox.x1 and legend.x0 >= 0
    assert not title.overlaps(legend) and not any(b.overlaps(title) or b.overlaps(legend) for b in others)
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["model", "command", "waiting", "idle power subtracted"]
    assert (tmp_path / "t.png").stat().st_size > 10_000
    plt.close(fig)
