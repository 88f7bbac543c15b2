"""Facts about calibrate.py: on a real H200 run, and on simulated machines whose call model is known."""

import csv
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from fakes.calibration_run import IDLE_W, TERMS, TRUTH, cost, make_run

import calibrate
import energylib

DRAWS = 60  # bootstrap draws: enough to see that intervals are there


def run(folder, draws=DRAWS, figures=False, **settings):
    """(params, folder of the results) of a simulated run."""
    made = make_run(folder, **settings)
    return calibrate.calibrate(**made.paths, out_dir=folder / "out", draws=draws, figures=figures), folder / "out"


def texts(params, *levels):
    return " | ".join(c["text"] for c in params["checks"] if not levels or c["level"] in levels)


def rows_of(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def value(params, quantity, term):
    return (params["time"] if quantity == "time" else params["energy"][quantity])["terms"][term]["value"]


# ---- least squares ----


def test_nnls_finds_the_best_of_all_active_sets():
    rng = np.random.default_rng(0)
    for _ in range(40):
        x, y = rng.standard_normal((20, 5)), rng.standard_normal(20)
        gram, moment = x.T @ x, x.T @ y
        best = y @ y
        for size in range(1, 6):
            for chosen in itertools.combinations(range(5), size):
                b = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
                if (b >= 0).all():
                    best = min(best, ((y - x[:, chosen] @ b) ** 2).sum())
        found = calibrate.nnls(gram, moment)
        assert (found >= 0).all()
        assert ((y - x @ found) ** 2).sum() == pytest.approx(best, rel=1e-9)


def test_nnls_leaves_one_coefficient_free():
    x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    y = x @ np.array([2.0, -0.5])
    assert calibrate.nnls(x.T @ x, x.T @ y, free=1) == pytest.approx([2.0, -0.5])
    assert calibrate.nnls(x.T @ x, x.T @ y)[1] == 0


def test_nnls_survives_columns_of_very_different_size_and_collinear_ones():
    u = np.array([1e3, 4e3, 3e4])
    x = np.column_stack([np.ones(3), u, u * u, 2 * u])
    y = 0.02 + 1e-5 * u + 1e-9 * u * u
    assert x @ calibrate.nnls(x.T @ x, x.T @ y) == pytest.approx(y, rel=1e-4)


# ---- the H200 run ----


@pytest.fixture(scope="module")
def h200(tmp_path_factory, repo):
    data, out = repo / "tests" / "data" / "h200_qwen3_30b_a3b", tmp_path_factory.mktemp("h200")
    paths = {"samples_path": data / "samples.csv", "calls_path": data / "calls.jsonl", "idle_loaded": data / "idle_loaded.csv",
             "idle_bare": data / "idle_bare.csv"}  # fmt: skip
    return calibrate.calibrate(**paths, out_dir=out, draws=DRAWS), out, paths


@pytest.mark.parametrize(
    "quantity, kind, limit, noise",
    [
        ("total", "cell", 0.010, 0.0066), ("above_idle", "cell", 0.015, 0.0101), ("time", "cell", 0.010, 0.0072),
        ("total", "context", 0.016, 0.0066), ("above_idle", "context", 0.016, 0.0101), ("time", "context", 0.012, 0.0072),
    ],
)  # fmt: skip
def test_h200_held_out_errors(h200, quantity, kind, limit, noise):
    params = h200[0]
    fit = params["time"] if quantity == "time" else params["energy"]["gpu"]
    found = fit["held_out"][f"leave_one_{kind}_out"][quantity]
    assert found["mape"] <= limit
    assert found["worst_cell_mape"] < 0.05
    assert fit["noise_floor"][quantity] == pytest.approx(noise, abs=0.0012)


def test_h200_idle_powers(h200):
    idle = h200[0]["idle"]
    assert idle["loaded"]["gpu0"]["power_w"] == pytest.approx(124.9, abs=0.1)
    assert idle["bare"]["gpu0"]["power_w"] == pytest.approx(80.9, abs=0.1)
    assert 0 < idle["loaded"]["gpu0"]["se_w"] < 0.5
    assert idle["loaded"]["gpu0"]["between_calls_w"] == pytest.approx(126.5, abs=0.4)
    assert [r["from_s"] for r in idle["loaded"]["gpu0"]["by_time_since_call"]] == [0, 0.25]
    assert calibrate.idle_power(h200[0]) == {"gpu0": idle["loaded"]["gpu0"]["between_calls_w"]}
    assert calibrate.idle_power(h200[0], "rested") == {"gpu0": idle["loaded"]["gpu0"]["power_w"]}
    assert calibrate.idle_power(h200[0], "bare") == {"gpu0": idle["bare"]["gpu0"]["power_w"]}


def test_h200_terms_have_the_size_that_physics_says(h200):
    params = h200[0]
    assert value(params, "gpu", "output") == pytest.approx(0.49, abs=0.02)
    assert value(params, "time", "output") == pytest.approx(4.44e-3, abs=0.05e-3)
    assert value(params, "time", "prefill_floor") == pytest.approx(0.077, abs=0.005)
    assert params["time_parts"]["first_token"]["terms"]["cached"]["value"] == pytest.approx(1.83e-6, abs=0.1e-6)
    for fit in (params["energy"]["gpu"], params["time"]):
        for term in fit["terms"].values():
            assert term["value"] >= 0
            assert term["hi"] >= term["value"] >= term["lo"] or term["bound"] == "upper"


def test_h200_cached_energy_is_a_bound_not_a_point(h200):
    term = h200[0]["energy"]["gpu"]["terms"]["cached"]
    assert (term["lo"], term["bound"]) == (0.0, "upper")
    assert 0 < term["hi"] < 2e-4  # an uncached token costs at least 8e-3 J


def test_h200_first_call_follows_a_warm_up_that_no_record_tells_of(h200):
    first = rows_of(h200[1] / "calls_energy.csv")[0]
    assert first["gpu_above_idle_j"] == ""
    assert first["gpu_unused"] == "the time beside it is not quiet"
    assert h200[0]["energy"]["gpu"]["n"] == 149 and h200[0]["time"]["n"] == 150


def test_h200_counter_is_linear_in_busy_time(h200):
    found = next(c for c in h200[0]["checks"] if c["check"] == "linearity")
    assert found["level"] == "ok"
    assert found["slope"] == pytest.approx(1, abs=0.1)


def test_h200_models_of_the_literature_are_worse(h200):
    rows = [r for r in rows_of(h200[1] / "models.csv") if r["quantity"] == "total_j" and r["calls"] == "all"]
    error = {r["model"]: float(r["leave_one_cell_out_mape"]) for r in rows}
    assert error["linear in tokens"] == pytest.approx(0.10, abs=0.02)
    assert error["tokens x context"] == pytest.approx(0.05, abs=0.01)
    assert min(error, key=error.get) == "this one"
    own = h200[0]["energy"]["gpu"]["held_out"]["leave_one_cell_out"]["total"]["mape"]
    assert error["this one"] == pytest.approx(own, rel=1e-4)


def test_h200_prediction_is_the_table(h200):
    params, out, _ = h200
    rows = rows_of(out / "calls_energy.csv")
    got = calibrate.predict(
        params, *(np.array([float(r[k]) for r in rows]) for k in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    )
    assert got["gpu_above_idle_j"] == pytest.approx([float(r["est_gpu_above_idle_j"]) for r in rows], rel=1e-6)
    assert got["time_s"] == pytest.approx([float(r["est_s"]) for r in rows], rel=1e-6)
    assert got["cpu_above_idle_j"] is None and got["dram_above_idle_j"] is None


def test_h200_same_input_same_output(h200, tmp_path):
    params, out, paths = h200
    calibrate.calibrate(**paths, out_dir=tmp_path, draws=DRAWS)
    names = sorted(p.name for p in out.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    for name in names:
        ours, theirs = (out / name).read_bytes(), (tmp_path / name).read_bytes()
        if name == "params.json":
            ours, theirs = (b"\n".join(line for line in text.split(b"\n") if b'"created"' not in line) for text in (ours, theirs))
        assert ours == theirs, name


def test_h200_figures_and_their_numbers(h200):
    out = h200[1]
    for name in ("energy_model_gpu", "energy_per_token_gpu", "residuals_gpu", "repeatability"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    kinds = {r["kind"]: r for r in rows_of(out / "energy_per_token.csv")}
    assert float(kinds["output"]["total_j"]) > 10 * float(kinds["uncached"]["total_j"]) > 10 * float(kinds["cached"]["total_hi_j"])
    assert len(rows_of(out / "repeatability.csv")) == 30 + 2 * 30


def test_h200_params_are_strict_json_with_their_inputs(h200):
    params, out, paths = h200
    read = json.loads((out / "params.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in params.json"))
    assert read == params
    assert read["inputs"]["calls"]["sha256"] == energylib.sha256(paths["calls_path"])
    assert read["hardware"] == "1x NVIDIA H200; 16 vCPU Intel Xeon, virtual machine without powercap"


# ---- known truth ----


def test_truth_is_recovered(tmp_path):
    truth = {**TRUTH, "time": {**TRUTH["time"], "prefill_floor": 0.08}}
    params, _ = run(tmp_path, contexts=(1024, 4096, 8192, 16384, 30000), reps=4, truth=truth, draws=200)
    tolerance = {"output": 0.03, "uncached": 0.08, "decode_attention": 0.1, "prefill_attention": 0.08}
    for term, limit in tolerance.items():
        assert value(params, "gpu", term) == pytest.approx(TRUTH["gpu"][term], rel=limit), term
    inside = 0
    for quantity, truths in (("gpu", truth["gpu"]), ("time", truth["time"])):
        for name, true in truths.items():
            t = (params["time"] if quantity == "time" else params["energy"][quantity])["terms"][name]
            inside += t["lo"] <= true <= t["hi"]
    assert inside >= 11  # of 14 intervals of 95 %; chance alone gives fewer in 1 of 1000
    assert value(params, "time", "prefill_floor") == pytest.approx(0.08, rel=0.15)
    assert params["time_parts"]["first_token"]["terms"]["cached"]["value"] == pytest.approx(2e-6, rel=0.05)
    for entry, key in ((params["energy"]["gpu"], "above_idle"), (params["energy"]["gpu"], "total"), (params["time"], "time")):
        assert entry["held_out"]["leave_one_cell_out"][key]["mape"] < 1.7 * entry["noise_floor"][key]


def test_truth_is_recovered_at_single_calls(tmp_path):
    """Whole steps have no smearing: the energy of a call of 0.3 s is right to a percent, on average and without noise in the calls."""
    made = make_run(tmp_path, noise=0.0)
    samples, calls = energylib.read_samples(made.paths["samples_path"]), calibrate.read_calls(made.paths["calls_path"])
    measured, _ = calibrate.measure_calls(samples, calls)
    true = [sum(cost(TRUTH["gpu"], r["prompt_tokens"], r["cached_tokens"], r["completion_tokens"])) for r in made.calls]
    ratio = measured["gpu0"]["above_idle_j"] / true
    assert np.mean(ratio) == pytest.approx(1, abs=0.002)
    assert np.std(ratio) < 0.01


def test_fit_uses_measured_tokens_not_planned_ones(tmp_path):
    params, _ = run(tmp_path, reps=2, tokens=lambda rng, c: int(c * rng.uniform(0.7, 1.3)), noise=0.002)
    assert value(params, "gpu", "output") == pytest.approx(TRUTH["gpu"]["output"], rel=0.02)
    assert value(params, "gpu", "uncached") == pytest.approx(TRUTH["gpu"]["uncached"], rel=0.05)


# ---- what the data cannot say ----

PROPORTIONAL = [(1024, 64), (4096, 256), (8192, 512), (16384, 1024)]


@pytest.mark.parametrize(
    "settings, missing, words",
    [
        ({"states": ("miss",)}, {"cached"}, "no call has cached tokens"),
        ({"contexts": (4096,)}, {"cached", "prefill_attention", "prefill_floor"}, "only one context length"),
        ({"outputs": (64,)}, {"call", "cached"}, "only one output length"),
        ({"contexts": (4096,), "outputs": (64,), "states": ("miss",)}, set(TERMS) - {"output"}, "only one"),
        ({"cached": lambda context, state: None}, {"cached"}, "does not report cached tokens"),
        ({"pairs": PROPORTIONAL, "states": ("miss",)}, {"cached", "uncached", "prefill_attention"}, "vary contexts and outputs"),
    ],
    ids=["no hits", "one context", "one output", "constant cells", "cached unknown", "output proportional to prompt"],
)  # fmt: skip
def test_what_is_not_identified_is_said_and_the_rest_fitted(tmp_path, settings, missing, words):
    params, out = run(tmp_path, **settings)
    for fit in (params["energy"]["gpu"], params["time"]):
        assert set(fit["not_identified"]) - {"prefill_floor"} == missing - {"prefill_floor"}
        for term in missing & set(fit["terms"]):
            assert fit["terms"][term]["value"] is None and fit["terms"][term]["note"]
        assert all((t["value"] or 0) >= 0 for t in fit["terms"].values())
    assert words in texts(params)
    for r in rows_of(out / "calls_energy.csv"):
        if r["unused"] == "":
            assert float(r["est_gpu_above_idle_j"]) == pytest.approx(float(r["gpu_above_idle_j"]), rel=0.2)
    assert "not identified" in "\n".join(calibrate.summary(params, out))


def test_calls_without_cached_counts_are_misses_only_when_they_were_made_so(tmp_path):
    params, out = run(tmp_path, cached=lambda context, state: None, contexts=(1024, 4096, 8192), reps=2)
    assert {(r["state"], r["unused"]) for r in rows_of(out / "calls_energy.csv")} == {("miss", ""), ("hit", "cached tokens not reported")}


def test_a_miss_with_cached_tokens_is_told(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096, 8192), reps=2, cached=lambda context, state: context - 16)
    assert "planned as a miss had some cached tokens" in texts(params, "warning")


def test_few_noisy_cells_get_few_terms_and_honest_errors(tmp_path):
    params, out = run(tmp_path, domains=("cpu0",), sources={"cpu0": "model"}, contexts=(256, 1024, 2048), outputs=(16, 64), reps=2,
                      noise=0.12, first_token=False, block=1)  # fmt: skip
    fit = params["energy"]["cpu"]
    assert len(fit["form"]) <= 5
    held = fit["held_out"]["leave_one_cell_out"]["above_idle"]["mape"]
    assert fit["noise_floor"]["above_idle"] < held < 0.25
    assert value(params, "cpu", "output") == pytest.approx(TRUTH["cpu"]["output"], rel=0.2)
    assert params["time_parts"] is None


def test_loud_machine_is_told(tmp_path):
    params, _ = run(tmp_path, contexts=(256, 1024), outputs=(16, 64), noise=0.4, seed=3)
    assert "something else ran on this machine" in texts(params, "warning")
    assert "no basis for estimates" in texts(params, "warning")


# ---- idle ----


def test_idle_file_with_a_trend_is_refused_and_the_quiet_between_calls_stands_in(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096), outputs=(64, 192), reps=2, idle_drift=0.1)
    idle = params["idle"]["loaded"]["gpu0"]
    assert idle["power_w"] is None and "power moves by" in idle["refused"]
    assert "is not idle" in texts(params, "refused")
    assert calibrate.idle_power(params)["gpu0"] == pytest.approx(IDLE_W["gpu"], rel=0.01)
    assert calibrate.idle_power(params, "rested") == {}


def test_idle_file_with_bursts_is_refused(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096), outputs=(64, 192), reps=2, idle_burst=100.0)
    assert "bursts" in params["idle"]["loaded"]["gpu0"]["refused"]
    assert params["idle"]["bare"]["gpu0"]["refused"] is None


def test_short_idle_file_is_refused(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096), outputs=(64, 192), reps=2, idle_s=3.0)
    assert "at least 5 s" in params["idle"]["loaded"]["gpu0"]["refused"]


def test_idle_standard_error_is_that_of_repeated_files(tmp_path):
    found = []
    for seed in range(12):
        made = make_run(tmp_path / str(seed), contexts=(1024,), outputs=(64,), reps=1, seed=seed)
        found.append(calibrate.idle_of_file(energylib.read_samples(made.paths["idle_loaded"]), "gpu0"))
    spread = np.std([f["power_w"] for f in found], ddof=1)
    assert 0.4 * spread < np.mean([f["se_w"] for f in found]) < 2.5 * spread


# ---- machines ----


def test_several_gpus_are_summed_and_fitted_one_by_one(tmp_path):
    params, out = run(tmp_path, domains=("gpu0", "gpu1"), contexts=(1024, 4096, 8192), reps=2)
    assert list(params["energy"]) == ["gpu", "gpu0", "gpu1"]
    assert params["energy"]["gpu"]["domains"] == ["gpu0", "gpu1"]
    for row in rows_of(out / "calls_energy.csv"):
        parts = float(row["gpu0_above_idle_j"]) + float(row["gpu1_above_idle_j"])
        assert float(row["gpu_above_idle_j"]) == pytest.approx(parts, rel=1e-6)
    assert value(params, "gpu", "output") == pytest.approx(TRUTH["gpu"]["output"], rel=0.03)
    assert value(params, "gpu1", "output") == pytest.approx(TRUTH["gpu"]["output"] / 2, rel=0.05)
    assert params["hardware"].startswith("2x Synthetic GPU")


def test_gpu_cpu_and_dram_together_with_a_wrap(tmp_path):
    params, _ = run(tmp_path, domains=("gpu0", "cpu0", "cpu1", "dram0"), contexts=(1024, 4096, 8192), reps=2)
    assert list(params["energy"]) == ["gpu", "cpu", "dram"]
    for group in ("gpu", "cpu", "dram"):
        assert value(params, group, "output") == pytest.approx(TRUTH[group]["output"], rel=0.05)
        assert params["energy"][group]["held_out"]["leave_one_cell_out"]["total"]["mape"] < 0.02
    assert params["energy"]["cpu"]["idle_w"] == pytest.approx(IDLE_W["cpu"], rel=0.01)
    got = calibrate.predict(params, [4096], [0], [64])
    assert got["cpu_above_idle_j"][0] == pytest.approx(sum(cost(TRUTH["cpu"], 4096, 0, 64)), rel=0.05)


def test_model_source_is_labelled_estimated_everywhere(tmp_path):
    params, out = run(
        tmp_path, domains=("cpu0",), sources={"cpu0": "model"}, contexts=(256, 1024, 2048), outputs=(16, 64), reps=2, figures=True
    )
    assert params["energy"]["cpu"]["estimated"] is True and params["energy"]["cpu"]["source"] == "model"
    assert params["idle"]["loaded"]["cpu0"]["source"] == "model"
    text = "\n".join(calibrate.summary(params, out))
    assert "cpu energy (estimated)" in text and text.count("(estimated)") == 4
    assert {r["estimated"] for r in rows_of(out / "models.csv")} == {"True"}
    assert {r["estimated"] for r in rows_of(out / "energy_per_token.csv")} == {"True"}
    assert not list(out.glob("*gpu*"))


def test_figures_of_estimated_energy_say_so(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    said = {}
    original = Figure.savefig

    def savefig(self, path, **kwargs):
        said[path.name] = " ".join(t.get_text() for t in self.findobj(matplotlib.text.Text))
        return original(self, path, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    run(tmp_path, domains=("cpu0",), sources={"cpu0": "model"}, contexts=(256, 1024, 2048), outputs=(16, 64), reps=2, figures=True)
    assert len(said) == 4
    for name, text in said.items():
        assert "(est" in text, name


def test_counter_that_looks_at_a_quarter_of_each_step_is_found_out(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096), outputs=(192, 512), reps=6, duty=0.25)
    found = next(c for c in params["checks"] if c["check"] == "linearity")
    assert found["level"] == "warning" and found["slope"] < 0.85
    assert "only part of the time" in found["text"]


# ---- append cells ----

APPEND = [(4096, 64, 64), (4096, 1024, 64), (8192, 256, 256), (8192, 2048, 64), (16384, 1024, 256)]


def test_append_cells_validate_and_are_never_fitted(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 16384), outputs=(64, 256), append=APPEND)
    with_append = calibrate.calibrate(**made.paths, out_dir=tmp_path / "a", draws=0, figures=False)
    del made.paths["append"]
    without = calibrate.calibrate(**made.paths, out_dir=tmp_path / "b", draws=0, figures=False)
    assert with_append["time"] == without["time"]
    assert with_append["validation"]["append"]["n"] == len(APPEND)
    for quantity in ("gpu_total_j", "gpu_above_idle_j", "time_s"):
        assert with_append["validation"]["append"][quantity]["mape"] < 0.05
    assert {c["level"] for c in with_append["checks"] if c["check"] == "append"} == {"ok"}
    assert len(rows_of(tmp_path / "a" / "append_energy.csv")) == len(APPEND)
    assert without["validation"] is None


def test_append_cells_outside_the_model_say_where_and_why(tmp_path):
    truth = {**TRUTH, "time": {**TRUTH["time"], "prefill_floor": 0.2}}  # truth: above 512 uncached tokens; the grid knows 16 and 1024
    made = make_run(tmp_path, contexts=(1024, 4096, 16384), outputs=(64, 256), truth=truth, append=APPEND)
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False, floor_above=32)
    text = next(c["text"] for c in params["checks"] if c["check"] == "append" and c["quantity"] == "time_s")
    assert "By uncached tokens: 64: +" in text and "whether the prefill floor applies is not known there" in text
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False, floor_above=512)
    assert params["validation"]["append"]["time_s"]["mape"] < 0.05


def test_append_cells_in_the_grid_s_file_are_not_fitted(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 16384), outputs=(64, 256), append=APPEND)
    both = made.paths["calls_path"].read_text() + made.paths.pop("append").read_text()
    made.paths["calls_path"].write_text(both)
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert params["time"]["n"] == len(made.calls)
    assert f"{len(APPEND)} calls are not fitted: append cells" in texts(params, "note")


# ---- two transports ----


def slower_run(folder, factor, seed=2, **settings):
    """Another run of the grid on a machine that takes `factor` of the energy above idle, and of the time, of the first."""
    truth = {name: {term: v * factor for term, v in terms.items()} for name, terms in TRUTH.items()}
    return make_run(folder, truth=truth, seed=seed, **settings)


GRID = {"contexts": (1024, 4096, 16384), "outputs": (64, 256), "reps": 4}


@pytest.mark.parametrize("factor", [1.0, 1.04, 0.9])
def test_a_known_difference_between_transports_is_found_in_every_cell(tmp_path, factor):
    here, there = make_run(tmp_path / "here", **GRID), slower_run(tmp_path / "there", factor, **GRID)
    calls = [r | {"transport": "completions"} for r in there.calls]
    there.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in calls))
    compared = {"compare": there.paths["calls_path"], "compare_samples": there.paths["samples_path"]}
    params = calibrate.calibrate(**here.paths, **compared, out_dir=tmp_path / "out", draws=0, figures=False)
    found = params["validation"]["transports"]
    assert (found["transport"], found["compare_transport"], found["cells"], found["not_compared"]) == ("chat", "completions", 12, [])
    for quantity in ("time_s", "gpu_above_idle_j", "gpu_total_j"):
        q = found[quantity]
        assert q["lo"] < q["ratio"] < q["hi"] and q["cells"] == 12
        assert q["ratio"] == pytest.approx(factor, abs=0.008)
        if factor != 1:
            assert not q["lo"] <= 1 <= q["hi"]
    rows = rows_of(tmp_path / "out" / "transports.csv")
    assert len(rows) == 12 * 3
    inside = sum(float(r["ratio_lo"]) <= factor <= float(r["ratio_hi"]) for r in rows)
    assert inside >= 30  # of 36 intervals of 95 %, three of each cell not independent
    for r in rows:
        assert float(r["difference"]) == pytest.approx(float(r["compare_mean"]) - float(r["mean"]), abs=1e-6)
        assert (r["n"], r["compare_n"]) == ("4", "4")
    assert params["inputs"]["compare"]["sha256"] == energylib.sha256(there.paths["calls_path"])
    line = [text for text in calibrate.summary(params, tmp_path) if "completions against chat" in text]
    assert len(line) == 1 and "mean of 12 cells" in line[0]


def test_a_comparison_changes_nothing_that_is_fitted(tmp_path):
    here, there = make_run(tmp_path / "here", append=APPEND, **GRID), slower_run(tmp_path / "there", 1.1, **GRID)
    plain = calibrate.calibrate(**here.paths, out_dir=tmp_path / "a", draws=20, figures=False)
    compared = {"compare": there.paths["calls_path"], "compare_samples": there.paths["samples_path"]}
    params = calibrate.calibrate(**here.paths, **compared, out_dir=tmp_path / "b", draws=20, figures=False)
    assert set(params["validation"]) == {"append", "transports"} and set(plain["validation"]) == {"append"}
    params["validation"].pop("transports")
    for name in ("compare", "compare_samples"):
        params["inputs"].pop(name)
    params["checks"] = [c for c in params["checks"] if c["check"] != "transports"]
    assert params | {"created": ""} == plain | {"created": ""}
    assert not (tmp_path / "a" / "transports.csv").exists()


def test_cells_of_other_work_or_of_one_side_are_not_compared(tmp_path):
    here = make_run(tmp_path / "here", **GRID)
    there = slower_run(tmp_path / "there", 1.0, **(GRID | {"contexts": (1024, 4096)}))
    calls = [r | {"completion_tokens": 60} if r["cell"]["output"] == 64 and r["cell"]["context"] == 1024 else r for r in there.calls]
    there.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in calls))
    compared = {"compare": there.paths["calls_path"], "compare_samples": there.paths["samples_path"]}
    params = calibrate.calibrate(**here.paths, **compared, out_dir=tmp_path / "out", draws=0, figures=False)
    found = params["validation"]["transports"]
    assert found["cells"] == 6 and len(found["not_compared"]) == 2 + 4
    assert "2 cells are not compared, their token counts differ: 1024/64 hit, 1024/64 miss" in texts(params, "warning")


def test_comparison_in_the_same_samples_counts_as_activity(tmp_path):
    """Both transports in turns, under one sampler: the calls of one are not taken for the quiet of the other."""
    made = make_run(tmp_path, noise=0.002, quiet_s=0.6, **GRID)
    files = [tmp_path / "even.jsonl", tmp_path / "odd.jsonl"]
    for k, path in enumerate(files):
        path.write_text("".join(json.dumps(r) + "\n" for r in made.calls if r["cell"]["rep"] % 2 == k))
    made.paths["calls_path"] = files[0]
    params = calibrate.calibrate(**made.paths, compare=files[1], out_dir=tmp_path / "out", draws=0, figures=False)
    found = params["validation"]["transports"]
    assert found["cells"] == 12 and found["gpu_above_idle_j"]["ratio"] == pytest.approx(1, abs=0.01)
    assert "not quiet" not in texts(params)


def test_another_machine_or_no_common_cell_is_told(tmp_path):
    here, there = make_run(tmp_path / "here", **GRID), make_run(tmp_path / "there", **(GRID | {"contexts": (2048, 8192)}))
    meta = tmp_path / "there" / "samples.meta.json"
    meta.write_text(meta.read_text().replace("Synthetic CPU", "Other CPU"))
    compared = {"compare": there.paths["calls_path"], "compare_samples": there.paths["samples_path"]}
    params = calibrate.calibrate(**here.paths, **compared, out_dir=tmp_path / "out", draws=0, figures=False)
    said = texts(params, "warning")
    assert "hardware: found 1x Synthetic GPU; Other CPU" in said and "no cell in common" in said
    assert params["validation"]["transports"]["cells"] == 0


def test_h200_energy_above_idle_does_not_depend_on_the_transport(repo, tmp_path):
    """Two runs of one grid on the same kind of machine, one as non-streamed chat through the proxy, one as streamed token ids without it."""
    data, other = repo / "data" / "calib", repo / "tests" / "data" / "h200_qwen3_30b_a3b"
    params = calibrate.calibrate(data / "samples.csv", data / "calls.jsonl", data / "idle_loaded.csv", out_dir=tmp_path, draws=0, figures=False,
                                 compare=other / "calls.jsonl", compare_samples=other / "samples.csv")  # fmt: skip
    found = params["validation"]["transports"]
    assert found["cells"] == 30
    assert found["gpu_above_idle_j"]["ratio"] == pytest.approx(1, abs=0.01)
    assert found["time_s"]["hi"] < 1, "chat takes longer: rendering and tokenizing the prompt, at idle power"


def test_intervals_of_ratios_hold_what_they_promise():
    rng, inside, overall = np.random.default_rng(0), [], []
    for _ in range(300):
        row = calibrate.ratio_of(*(1 + 0.02 * rng.standard_normal((2, 4))))
        inside.append(row["ratio_lo"] <= 1 <= row["ratio_hi"])
        found = calibrate.overall_ratio(np.exp(0.02 * rng.standard_normal(8)), list("abcdefgh"))
        overall.append(found["lo"] <= 1 <= found["hi"])
    for share in (np.mean(inside), np.mean(overall)):
        assert 0.91 <= share <= 0.985


def test_a_ratio_of_single_calls_has_no_interval():
    row = calibrate.ratio_of(np.array([2.0]), np.array([3.0, 3.1]))
    assert row["ratio"] == pytest.approx(1.525) and np.isnan(row["ratio_lo"]) and np.isnan(row["sd"])
    assert np.isnan(calibrate.ratio_of(np.array([-0.1, 0.05]), np.array([1.0, 1.1]))["ratio"]), "a cell that does not rise above idle has none"


@pytest.mark.parametrize("free, expected", [(1, 12.706), (2, 4.303), (4.5, 2.659), (10, 2.228), (29, 2.045)])
def test_quantile_of_students_t(free, expected):
    assert calibrate.t_quantile(free) == pytest.approx(expected, rel=5e-4)


# ---- the program ----


ELSEWHERE = '{"t_start": 10, "t_end": 11, "prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 3}\n'


def command(*arguments):
    return subprocess.run([sys.executable, calibrate.__file__, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_help_explains_the_method_in_five_lines_with_an_example():
    text = command("--help").stdout
    assert all(f"\n{i}. " in text for i in range(1, 6)) and "\n6. " not in text
    assert "python3 calibrate.py --samples data/calib/samples.csv" in text


def test_program_ends_with_a_table_and_the_next_command(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2)
    p = made.paths
    done = command("--samples", p["samples_path"], "--calls", p["calls_path"], "--idle-loaded", p["idle_loaded"],
                   "--out-dir", tmp_path / "o", "--bootstrap", 20, "--no-figures", "--model", "m", "--hardware", "h")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("h, m\n")
    assert "leave one cell out" in done.stdout and "next: trajectories (06_run_batch.sh)" in done.stdout.splitlines()[-1]
    assert "no bare idle file" in done.stdout


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda p: p["calls_path"].write_text(""), "found no call"),
        (lambda p: p["calls_path"].write_text("{]\n{}\n"), "line 1"),
        (lambda p: p["calls_path"].write_text('{"t_start": "noon", "t_end": null}\n'), "expected two Unix times"),
        (lambda p: p["calls_path"].unlink(), "calls.jsonl"),
        (lambda p: p["calls_path"].write_text(ELSEWHERE), "give the samples of the same run"),
        (lambda p: p["calls_path"].write_text('{"t_start": 10, "t_end": 11, "valid": false, "reason": "warm-up"}\n'), "1 x warm-up"),
        (lambda p: p["samples_path"].write_text("t,mono\n1,1\n"), "found no counter column"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, harm, words):
    made = make_run(tmp_path, contexts=(1024,), outputs=(64,), reps=1)
    harm(made.paths)
    done = command(
        "--samples", made.paths["samples_path"], "--calls", made.paths["calls_path"], "--out-dir", tmp_path / "o", "--no-figures"
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr
    assert not (tmp_path / "o" / "params.json").exists()


def test_calls_that_must_not_be_fitted_are_counted_by_reason(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2)
    records = [dict(r) for r in made.calls]
    records[3] |= {"valid": False, "reason": "output of 60 tokens, expected 64"}
    records[5] |= {"error": "upstream gone", "complete": False}
    records[7] |= {"completion_tokens": None}
    made.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in records))
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert params["time"]["n"] == len(records) - 3
    for words in ("output of 60 tokens", "upstream gone", "token counts not reported"):
        assert words in texts(params, "note")


def test_overlapping_calls_are_not_charged_to_each_other(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2)
    records = [dict(r) for r in made.calls]
    records[4] |= {k: records[5][k] - 0.01 for k in ("t_end", "mono_end")}  # ends inside the step in which the next one begins
    records[4]["t_end"] = records[5]["t_start"] - 0.01
    made.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in records))
    calls = calibrate.read_calls(made.paths["calls_path"])
    measured, _ = calibrate.measure_calls(energylib.read_samples(made.paths["samples_path"]), calls)
    assert list(measured["gpu0"]["why"][[4, 5]]) == ["shares a counter step with another call"] * 2
    assert set(measured["gpu0"]["why"][6:]) == {""}


def test_drift_of_the_reference_cell_is_told(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2, noise=0.001)
    records = [dict(r) for r in made.calls]
    same = [r for r in records if (r["cell"]["context"], r["cell"]["output"], r["cell"]["state"]) == (4096, 64, "miss")]
    same[0]["cell"] |= {"reference": "start"}
    same[1]["cell"] |= {"reference": "end"}
    same[1] |= {"mono_end": same[1]["mono_end"] + 0.1}
    made.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in records))
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert "reference cell, miss: time at the end +" in texts(params, "warning")


def test_a_context_that_the_others_do_not_foretell_is_told(repo):
    """The included run: four contexts of 4,096 tokens and more say nothing about a prefill of 1,024."""
    params = json.loads((repo / "results/calib/params.json").read_text())
    assert "gpu: with a context left out, its cells are predicted up to 77% off (1024/64 miss): do not use" in texts(params, "warning")


def test_predict_takes_unknown_counts_and_old_ones(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2, draws=0)
    got = calibrate.predict(params, [4096, 4096], [np.nan, 4080], [64, 64])
    assert np.isnan(got["gpu_above_idle_j"][0]) and got["gpu_above_idle_j"][1] > 0
    assert got["time_s"].shape == (2,)
    assert calibrate.predict(params, 4096, 0, 64)["time_s"].shape == (1,)
    with pytest.raises(ValueError, match="expected loaded, rested or bare"):
        calibrate.idle_power(params, "asleep")
