"""Facts about calibrate.py: on a real H200 run, and on simulated machines whose call model is known."""

import csv
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fakes.calibration_run import IDLE_W, TERMS, TRUTH, cost, make_run

import calibrate
import energylib
from bench import gpu_pairs
from stages import csvfiles

DRAWS = 60  # bootstrap draws: enough to see that intervals are there


def run(folder, draws=DRAWS, figures=False, **settings):
    """(params, folder of the results) of a simulated run."""
    made = make_run(folder, **settings)
    return calibrate.calibrate(**made.paths, out_dir=folder / "out", draws=draws, figures=figures), folder / "out"


def texts(params, *levels):
    return " | ".join(c["text"] for c in params["checks"] if not levels or c["severity"] in levels)


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


def test_a_result_is_whole_or_the_earlier_one(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("as it was")

    def full(beside):
        beside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        csvfiles.put_whole(path, full)
    assert path.read_text() == "as it was" and [p.name for p in tmp_path.iterdir()] == ["t.csv"]
    csvfiles.put_whole(path, lambda beside: beside.write_text("new"))
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_idle_powers_of_another_run_go_by_name_or_by_order():
    loaded = {"gpu0": {"power_w": 120.0}, "gpu1": {"power_w": 130.0}, "cpu0": {"power_w": 40.0}}
    params = {"idle": {"loaded": loaded, "bare": {}}}
    assert calibrate.idle_like(params, ["gpu1", "cpu0"]) == {"gpu1": 130.0, "cpu0": 40.0}
    assert calibrate.idle_like(params, ["gpu2", "gpu3"]) == {"gpu2": 120.0, "gpu3": 130.0}
    assert calibrate.idle_like(params, ["gpu2", "dram0"]) == {}  # which of the two would it be?


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


def test_h200_every_check_has_a_code_a_severity_and_a_text(h200):
    assert {c["code"] for c in h200[0]["checks"]} >= {"linearity"}
    for c in h200[0]["checks"]:
        assert c["code"].replace("_", "").isalpha() and c["severity"] in ("refused", "warning", "note", "ok") and c["text"]


def test_h200_counter_is_linear_in_busy_time(h200):
    found = next(c for c in h200[0]["checks"] if c["code"] == "linearity")
    assert found["severity"] == "ok"
    assert found["slope"] == pytest.approx(1, abs=0.1)


def test_h200_models_of_the_literature_are_worse(h200):
    rows = [r for r in rows_of(h200[1] / "models.csv") if r["quantity"] == "total_j" and r["calls"] == "all"]
    error = {r["model"]: float(r["leave_one_cell_out_mape"]) for r in rows}
    assert error["linear in tokens"] == pytest.approx(0.10, abs=0.02)
    assert error["tokens x context"] == pytest.approx(0.05, abs=0.01)
    assert min(error, key=error.get) == "this one"
    own = h200[0]["energy"]["gpu"]["held_out"]["leave_one_cell_out"]["total"]["mape"]
    assert error["this one"] == pytest.approx(own, rel=1e-4)


def test_h200_own_terms_are_those_of_each_quantity(h200):
    """Energy and time have forms of their own, and every model's total is made of both."""
    params, out, _ = h200
    rows = {(r["model"], r["quantity"], r["calls"]): r for r in rows_of(out / "models.csv")}
    forms = {"above_idle_j": params["energy"]["gpu"]["form"], "time_s": params["time"]["form"]}
    assert forms["above_idle_j"] != forms["time_s"]
    for calls in ("all", "misses"):
        for quantity, form in forms.items():
            row = rows["this one", quantity, calls]
            assert (row["terms"], int(row["parameters"])) == (", ".join(form), len(form))
        total = rows["this one", "total_j", calls]
        assert total["terms"] == f"energy: {', '.join(forms['above_idle_j'])}; time: {', '.join(forms['time_s'])}"
        for model in {key[0] for key in rows}:
            n = {q: int(rows[model, q, calls]["parameters"]) for q in ("above_idle_j", "time_s", "total_j")}
            assert n["total_j"] == n["above_idle_j"] + n["time_s"]


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


def test_errors_above_idle_are_told_where_idle_power_hides_them_in_the_total(tmp_path):
    truth = {**TRUTH, "gpu": {**dict.fromkeys(TERMS, 0.0), "call": 2.0, "output": 0.02}}  # of some 100 J in total
    params, _ = run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2, draws=0, truth=truth, energy_noise=0.6)
    held = params["energy"]["gpu"]["held_out"]["leave_one_cell_out"]
    assert held["above_idle"]["mape"] > 0.2 > held["total"]["mape"]
    found = [c["text"] for c in params["checks"] if c["code"] == "accuracy" and c["quantity"] == "gpu"]
    above, total = held["above_idle"]["mape"], held["total"]["mape"]
    assert len(found) == 1 and found[0].startswith(f"gpu: held-out error {above:.0%} above idle ({total:.0%} in total, ")
    assert "no basis for estimates above idle" in found[0]


def test_cells_that_do_not_rise_above_idle_are_counted():
    values, truth = np.array([1.0, 1.0, 2.0, 2.0, 1.0]), np.array([1.0, 1.0, 2.0, 2.0, -3.0])
    cells = [(1024.0, 64.0, "miss")] * 2 + [(1024.0, 64.0, "hit")] * 2 + [(4096.0, 64.0, "miss")]
    cells = np.array([*cells, None], object)[:-1]  # of tuples, not of their parts
    assert calibrate.errors(values, truth, cells)["left_out"] == 1
    assert "left_out" not in calibrate.errors(values[:4], truth[:4], cells[:4])


def test_cells_that_are_not_in_the_errors_are_told(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2, append=APPEND)
    silent = [json.loads(line) for line in made.paths["append"].read_text().splitlines()][:2]
    quiet = [r for r in made.calls if (r["cell"]["context"], r["cell"]["output"], r["cell"]["state"]) == (4096, 64, "hit")]
    path, rows = made.paths["samples_path"], rows_of(made.paths["samples_path"])
    joules, t = (np.array([float(r[name]) for r in rows]) for name in ("gpu0_mj", "gpu0_edge"))
    for r in silent + quiet:  # these calls draw less than idle power
        inside = (t > r["t_start"]) & (t <= r["t_end"] + 0.1)
        rise = np.diff(joules, prepend=joules[0])
        joules = joules[0] + np.cumsum(np.where(inside & (rise > 0), 0.7 * 12.5e3 / 1.0, rise))
    for row, j in zip(rows, joules, strict=True):
        row["gpu0_mj"] = f"{j:.0f}"
    path.write_text("\n".join([",".join(rows[0]), *(",".join(r.values()) for r in rows)]) + "\n")
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    said = texts(params, "warning")
    assert "gpu: 1 of 12 cells do not rise above idle: they are neither fitted nor in its errors: 4096/64 hit" in said
    above = next(c["text"] for c in params["checks"] if c["code"] == "append" and c["quantity"] == "gpu_above_idle_j")
    assert ", without 2 cells that do not rise above 0" in above


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


def idle_under(folder, domain, load, **settings):
    """What idle_of_file says of the loaded idle file, 300 s, of a machine that draws `load` (function of seconds) more."""
    settings = {"contexts": (1024,), "outputs": (64,), "reps": 1, "idle_s": 300.0} | settings
    made = make_run(folder, domains=(domain,), idle_load=load, **settings)
    return calibrate.idle_of_file(energylib.read_samples(made.paths["idle_loaded"]), domain)


@pytest.mark.parametrize(
    "domain, watts, share, words",
    [("gpu0", 175, s, "W in its quiet seconds") for s in (0.5, 0.6, 0.7, 0.9)]
    + [("gpu0", 10, 0.5, "W in its quiet seconds"), ("gpu0", 175, 0.3, "bursts"), ("cpu0", 60, 0.55, "W in its quiet seconds")],
)
def test_idle_file_of_a_machine_that_was_busy_most_of_the_time_is_refused(tmp_path, domain, watts, share, words):
    found = idle_under(tmp_path, domain, lambda t: watts * (t % 10 < 10 * share))
    assert found["power_w"] is None and words in found["refused"]


@pytest.mark.parametrize(
    "load, words",
    [
        (lambda t: 30.0 * ((t > 100) & (t < 200)), "the highest is no. "),
        (lambda t: 25.0 * np.sin(np.pi * t / 300) ** 2, "the highest is no. "),
        (lambda t: -25.0 * ((t > 120) & (t < 180)), "power moves between 1"),
    ],
)
def test_idle_file_with_a_hump_is_refused(tmp_path, load, words):
    found = idle_under(tmp_path, "gpu0", load)
    assert found["power_w"] is None and "means of 10 parts of the file" in found["refused"] and words in found["refused"]


@pytest.mark.parametrize(
    "domain, load",
    [
        ("gpu0", lambda t: 100.0 * (abs(t - 50) < 1)), ("gpu0", lambda t: 2.0 * (t > 150)), ("cpu0", lambda t: 100.0 * (t % 50 < 2)),
        ("cpu0", lambda t: 6.0 * np.random.default_rng(0).standard_normal(len(t))), ("cpu0", lambda t: 12.0 * ((t > 30) & (t < 60))),
    ],
)  # fmt: skip
def test_idle_file_with_rare_bursts_or_noise_is_taken(tmp_path, domain, load):
    found = idle_under(tmp_path, domain, load)
    assert found["refused"] is None and found["power_w"] == pytest.approx(IDLE_W[domain[:-1]], rel=0.08)


@pytest.mark.parametrize("domain, watts", [("gpu0", 175.0), ("gpu0", 10.0), ("cpu0", 12.0)])
def test_an_idle_file_that_was_busy_from_end_to_end_is_refused_by_the_power_between_calls(tmp_path, domain, watts):
    settings = {"contexts": (1024, 4096), "outputs": (64, 192), "reps": 2, "draws": 0, "domains": (domain,)}
    params, _ = run(tmp_path, idle_load=lambda t: watts + 0 * t, **settings)
    idle = params["idle"]["loaded"][domain]
    assert idle["power_w"] is None and "more than the" in idle["refused"] and "something else ran all the time" in idle["refused"]
    assert "idle_loaded.csv: " in texts(params, "refused") and "`bash 03_calibrate.sh --idle-loaded`" in texts(params, "refused")
    assert calibrate.idle_power(params, "rested") == {}
    assert calibrate.idle_power(params)[domain] == pytest.approx(IDLE_W[domain[:-1]], rel=0.01)


def test_a_machine_that_rests_a_little_higher_than_between_calls_is_idle(tmp_path):
    params, _ = run(tmp_path, idle_load=lambda t: 4.0 + 0 * t, contexts=(1024, 4096), outputs=(64, 192), reps=2, draws=0)
    assert params["idle"]["loaded"]["gpu0"]["power_w"] == pytest.approx(IDLE_W["gpu"] + 4, rel=0.01)


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


@pytest.mark.parametrize("harm", ["empty", "no column", "frozen"])
def test_the_sum_of_gpus_is_not_fitted_when_one_has_no_readings(tmp_path, harm):
    made = make_run(tmp_path, domains=("gpu0", "gpu1", "gpu2"), contexts=(1024, 4096, 8192), reps=2)
    path = made.paths["samples_path"]
    rows = rows_of(path)
    mine = [name for name in rows[0] if name.startswith("gpu1")]
    for row in rows:
        row |= {"gpu1_mj": rows[0]["gpu1_mj"]} if harm == "frozen" else dict.fromkeys(mine, "")
    header = [name for name in rows[0] if harm != "no column" or name not in mine]
    path.write_text("\n".join([",".join(header), *(",".join(r[name] for name in header) for r in rows)]) + "\n")
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert list(params["energy"]) == ["gpu0", "gpu2"]
    assert value(params, "gpu0", "output") == pytest.approx(TRUTH["gpu"]["output"] / 3, rel=0.05)
    (found,) = [c for c in params["checks"] if c["code"] == "incomplete"]
    assert (found["severity"], found["group"], found["missing"]) == ("refused", "gpu", ["gpu1"])
    assert f"gpu: gpu1 of 3 has no readings for any call in {path}: no sum is fitted, only gpu0, gpu2" in found["text"]
    assert "gpu_total_j" not in rows_of(tmp_path / "out" / "calls_energy.csv")[0]
    assert "gpu1 of 3 has no readings" in "\n".join(calibrate.summary(params, tmp_path / "out"))


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
    found = next(c for c in params["checks"] if c["code"] == "linearity")
    assert found["severity"] == "warning" and found["slope"] < 0.85
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
    assert {c["severity"] for c in with_append["checks"] if c["code"] == "append"} == {"ok"}
    assert len(rows_of(tmp_path / "a" / "append_energy.csv")) == len(APPEND)
    assert without["validation"] is None


def test_append_cells_outside_the_model_say_where_and_why(tmp_path):
    truth = {**TRUTH, "time": {**TRUTH["time"], "prefill_floor": 0.2}}  # truth: above 512 uncached tokens; the grid knows 16 and 1024
    made = make_run(tmp_path, contexts=(1024, 4096, 16384), outputs=(64, 256), truth=truth, append=APPEND)
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False, floor_above=32)
    text = next(c["text"] for c in params["checks"] if c["code"] == "append" and c["quantity"] == "time_s")
    assert "By uncached tokens: 64: +" in text and "whether the prefill floor applies is not known there" in text
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False, floor_above=512)
    assert params["validation"]["append"]["time_s"]["mape"] < 0.05


def test_append_cells_that_the_floor_of_every_call_misses_are_named_with_the_reason():
    def fit(begin):
        return {"form": ["call", "prefill_floor"], "floor_above_uncached_tokens": begin}

    append = {"n": 9, "time_s": {"worst_cell": "4096+64/64 append", "worst_cell_mape": 0.14},
              "gpu_total_j": {"worst_cell": "4096+2048/64 append", "worst_cell_mape": 0.09}}  # fmt: skip
    params = {"floor_bracket_uncached_tokens": [16.0, 1024.0], "time": fit(0.0), "energy": {}, "validation": {"append": append}}
    (line,) = calibrate.floor_end(params)
    assert line.startswith("append, 4096+64/64 append: the grid has no call between 16 and 1024 uncached tokens: ")
    assert calibrate.floor_end(params | {"validation": None}) == [] == calibrate.floor_end(params | {"time": fit(520.0)})


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
    params["checks"] = [c for c in params["checks"] if c["code"] != "transports"]
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
    assert "--append-samples data/calib/append_samples.csv" in text and "results/calib\n" not in text


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


@pytest.mark.parametrize(
    "option, found",
    [(o, v) for o in ("--bootstrap", "--floor-above") for v in ("-5", "nan", "inf", "1e300", "many", "")] + [("--bootstrap", "1.5")],
)
def test_numbers_that_cannot_be_meant_are_one_line(capsys, option, found):
    with pytest.raises(SystemExit) as stop:
        calibrate.main(["--samples", "s.csv", "--calls", "c.jsonl", "--out-dir", "o", f"{option}={found}"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and f"argument {option}: found {found!r}, expected" in said


@pytest.mark.parametrize("name", ["numpy", "pandas", "matplotlib"])
def test_a_missing_package_is_one_line_before_anything_is_computed(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    done = subprocess.run([sys.executable, calibrate.__file__, "--samples", "s", "--calls", "c", "--out-dir", "o"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.returncode == 2 and done.stderr == f"calibrate.py: {name} is missing: pip install numpy pandas matplotlib\n"


def test_results_of_other_measurements_are_not_overwritten(tmp_path, capsys):
    made, other = make_run(tmp_path / "a", **SMALL), make_run(tmp_path / "b", seed=2, **SMALL)

    def main(run, *more):
        names = {"--samples": "samples_path", "--calls": "calls_path"}
        given = [x for option, name in names.items() for x in (option, str(run.paths[name]))]
        return calibrate.main([*given, "--out-dir", str(tmp_path / "out"), "--bootstrap", "0", "--no-figures", *more])

    assert main(made) == 0
    assert main(made) == 0, "the same ones may be computed again"
    before = (tmp_path / "out" / "params.json").read_bytes()
    assert main(other) == 2
    said = capsys.readouterr().err
    assert "was computed from other measurements (samples, calls); give another --out-dir, or --force" in said and len(said.splitlines()) == 1
    assert (tmp_path / "out" / "params.json").read_bytes() == before
    assert main(other, "--force") == 0
    (tmp_path / "out" / "params.json").write_text("[]")
    assert main(other) == 2 and "not written by calibrate.py" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(energylib.DataError, match="is a file, expected a folder"):
        calibrate.check_out_dir(tmp_path / "file", {})


def test_a_folder_of_others_is_refused(repo, tmp_path):
    """An evaluation's folder has no params.json and must not become a calibration's; what an interrupted run left may be completed."""
    with pytest.raises(energylib.DataError, match="found .* and no params.json, expected an empty folder"):
        calibrate.check_out_dir(repo / "results" / "eval", {})
    (tmp_path / "empty").mkdir()
    calibrate.check_out_dir(tmp_path / "empty", {})
    _, out = run(tmp_path, draws=0, figures=True, append=[(4096, 256, 64)], **SMALL)
    (out / "params.json").rename(out / "params.json.tmp123")
    calibrate.check_out_dir(out, {})
    (out / "summary.json").write_text("{}")
    given = ["--samples", "s.csv", "--calls", "c.jsonl", "--out-dir", str(out)]
    done = command(*given)
    assert done.returncode == 2 and "found summary.json and no params.json" in done.stderr and len(done.stderr.splitlines()) == 1
    assert "found summary.json" not in command(*given, "--force").stderr


def found_by_check_complete(path):
    checks = []
    calibrate.check_complete(calibrate.read_calls(path), path, lambda code, severity, text, **values: checks.append((code, severity, text, values)))
    return checks


def plan_of(path, **settings):
    settings = {"mode": "grid", "reps": 2, "seed": 0, "contexts": [1024, 4096], "outputs": [64, 192], "reference": None} | settings
    path.with_name(f"{path.name}.plan.json").write_text(json.dumps({"schema": 1, "plan": settings, "runs": [{"max_context": 32768}]}))


def test_a_torn_calls_file_and_calls_that_the_plan_has_are_told(tmp_path):
    path = make_run(tmp_path, **SMALL).paths["calls_path"]
    assert found_by_check_complete(path) == []
    plan_of(path)
    assert found_by_check_complete(path) == []
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:9]) + lines[9][:100])
    torn, complete = found_by_check_complete(path)
    assert torn[:2] == ("torn", "warning") and "last line is torn (100 bytes" in torn[2]
    assert complete[:2] == ("complete", "warning") and complete[3] == {"n": 7, "of": 16}
    assert "7 of the 16 calls of its plan are missing or not valid: measure the rest" in complete[2]
    path.write_text("".join(lines[:9]).rstrip("\n"))
    assert [c[0] for c in found_by_check_complete(path)] == ["complete"], "a whole last line without its end is not torn"
    path.write_text("".join(line for line in lines if '"context": 1024, "output": 64, "state": "miss"' not in line))
    assert "among them all of 1024/64 miss" in found_by_check_complete(path)[0][2]
    path.write_text("".join(lines).replace('"valid": true', '"valid": false', 1))
    assert found_by_check_complete(path)[0][3] == {"n": 1, "of": 16}
    path.with_name("calls.jsonl.plan.json").write_text("[]")
    assert "not a plan of microbench.py" in found_by_check_complete(path)[0][2]


def test_a_run_that_ended_early_is_told_in_the_results(tmp_path):
    made = make_run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2)
    lines = made.paths["calls_path"].read_text().splitlines(keepends=True)
    made.paths["calls_path"].write_text("".join(lines[:18]) + lines[18][:50])  # without a plan: cells of 2 and of 1 repetition
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    said = texts(params, "warning")
    assert "the last line is torn" in said and "6 of the 24 calls that its cells have where each is repeated as often as the others" in said
    assert "the last line is torn" in "\n".join(calibrate.summary(params, tmp_path / "out"))


def test_the_included_calls_are_complete_and_append_cells_are_compared_with_their_plan(repo, tmp_path):
    for name, n in (("calls.jsonl", 156), ("append_calls.jsonl", 24)):
        assert found_by_check_complete(repo / "data/calib" / name) == []
        lines = (repo / "data/calib" / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[: len(lines) // 2]))
        (tmp_path / f"{name}.plan.json").write_bytes((repo / f"data/calib/{name}.plan.json").read_bytes())
        ((code, severity, _, values),) = found_by_check_complete(tmp_path / name)
        assert (code, severity, values["of"]) == ("complete", "warning", n) and 0 < values["n"] < n


def test_a_counter_that_its_sidecar_names_and_the_file_lacks_is_told(tmp_path):
    made = make_run(tmp_path, quiet_s=2.0, **SMALL)
    path = made.paths["samples_path"]
    rows = rows_of(path)
    joules, t = (np.array([float(r[name]) for r in rows]) for name in ("gpu0_mj", "t"))
    watts = np.gradient(joules / 1e3, t)
    path.write_text("t,mono,gpu0_w\n" + "".join(f"{r['t']},{r['mono']},{w:.3f}\n" for r, w in zip(rows, watts, strict=True)))
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert "no energy counter" in texts(params, "warning")
    assert f"{path} has no column gpu0_mj, though its sidecar names it" in texts(params, "warning")


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


def test_a_context_that_the_others_do_not_foretell_is_told(tmp_path):
    """Two long contexts say nothing about the floor that a short prefill stands on."""
    truth = {**TRUTH, "gpu": {**TRUTH["gpu"], "prefill_floor": 40.0}}
    params, _ = run(tmp_path, contexts=(1024, 8192, 16384), outputs=(64, 192), reps=2, truth=truth, draws=0)
    found = next(c for c in params["checks"] if c["code"] == "extrapolation")
    assert found["severity"] == "warning" and found["worst_cell"] == "1024/64 miss" and found["worst_cell_mape"] > 0.2
    assert found["text"].endswith("do not use the model beyond the contexts measured")


@pytest.mark.parametrize("above, begin", [(0, 0), (512, 520)])
def test_a_floor_of_every_call_is_told_from_one_of_misses(above, begin):
    truth = {**TRUTH["time"], "prefill_floor": 0.08, "floor_above": above}
    cells = list(itertools.product((1024, 4096, 8192, 16384, 30000), (64, 256), (False, True)))
    tokens = np.array([(p, p - 16 if hit else 0, n) for p, n, hit in cells])
    noise = 1 + 0.003 * np.random.default_rng(0).standard_normal(len(cells))
    seconds = np.array([sum(cost(truth, *t)) for t in tokens.tolist()]) * noise
    design = calibrate.Design(tokens.T, seconds, np.arange(len(cells)), np.arange(len(cells)) // 4, floor_above=(520, 0))
    whole = np.ones(len(cells))
    coef = design.fit(whole, design.choose(whole > 0))
    assert coef[calibrate.BEGIN] == begin
    assert coef[calibrate.FLOOR] == pytest.approx(0.08, rel=0.15)
    assert np.abs(design.value(coef) / seconds - 1).max() < 0.015


# ---- the state of the hardware ----


def write_state(path, rows, columns="gpu0_throttle_reasons,gpu0_util_pct,cpu_util_pct"):
    path.write_text(f"t,mono,{columns}\n" + "".join(",".join(map(str, (t, 0, *cells))) + "\n" for t, *cells in rows))


SMALL = {"contexts": (1024, 4096), "outputs": (64, 192), "reps": 2}


@pytest.mark.parametrize("name", ["state.csv", "elsewhere.csv"])
def test_calls_that_met_a_throttled_gpu_are_counted_by_reason(tmp_path, name):
    made = make_run(tmp_path, **SMALL)
    masks = [0x4, 0x4 | 0x20, 0x1 | 0x2 | 0x100, 0x80, "", 0] + [0] * 9  # one row in the middle of each call but the last
    write_state(tmp_path / name, [((r["t_start"] + r["t_end"]) / 2, m, 90, 5) for r, m in zip(made.calls, masks, strict=False)])
    extra = {} if name == "state.csv" else {"state": tmp_path / name}
    params = calibrate.calibrate(**made.paths, **extra, out_dir=tmp_path / "out", draws=0, figures=False)
    found = next(c for c in params["checks"] if c["code"] == "throttling")
    assert found["severity"] == "warning" and (found["n"], found["of"], found["unseen"], found["rows"]) == (3, 16, 1, 3)
    assert found["reasons"] == {"software power cap": 2, "software thermal": 1, "power brake": 1}
    assert set(found["residuals"]) == {"gpu_above_idle_j", "duration_s"}
    assert "3 of 16 calls met a throttled GPU (software power cap: 2, " in "\n".join(calibrate.summary(params, tmp_path / "out"))
    assert params["inputs"]["state"]["sha256"] == energylib.sha256(tmp_path / name)


def test_throttling_is_told_where_nothing_can_be_held_out(tmp_path):
    made = make_run(tmp_path, contexts=(1024,), outputs=(64,), reps=2)
    write_state(tmp_path / "state.csv", [(r["t_start"] + 0.1, 4, 90, 5) for r in made.calls[:2]])
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    found = next(c for c in params["checks"] if c["code"] == "throttling")
    assert found["n"] == 2 and found["residuals"] == {}


def test_calls_that_a_throttled_gpu_slows_deviate_from_the_others(tmp_path):
    made = make_run(tmp_path, **(SMALL | {"reps": 4}), noise=0.002)
    slow = [r for r in made.calls if r["cell"]["rep"] == 3]
    for r in slow:
        r["mono_end"] += 0.1 * (r["mono_end"] - r["mono_start"])
    made.paths["calls_path"].write_text("".join(json.dumps(r) + "\n" for r in made.calls))
    write_state(tmp_path / "state.csv", [(r["t_start"] + 0.1, 0x40 * (r in slow), 90, 5) for r in made.calls])
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    found = next(c for c in params["checks"] if c["code"] == "throttling")["residuals"]["duration_s"]
    assert found["difference"] == pytest.approx(-0.09, abs=0.03) and found["difference"] < -4 * found["se"]


@pytest.mark.parametrize(
    "rows, severity, words",
    [
        (None, "note", "found no "),
        ([(1_796_000_000, "", 90, 5)], "note", "has no throttle reasons"),
        ([(0, 4, 90, 5)], "note", "covers no call"),
        ([(1_796_000_000 + k / 10, 0x2, 90, 5) for k in range(300)], "ok", "no call met a throttled GPU (0 of 300 rows of "),
    ],
)
def test_what_is_known_of_throttling_is_said(tmp_path, rows, severity, words):
    made = make_run(tmp_path, **SMALL)
    if rows:
        write_state(tmp_path / "state.csv", rows)
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    found = next(c for c in params["checks"] if c["code"] == "throttling")
    assert found["severity"] == severity and words in found["text"]


def test_idle_file_of_a_busy_gpu_is_refused_and_of_a_busy_cpu_told(tmp_path):
    made = make_run(tmp_path, **SMALL)
    write_state(tmp_path / "idle_loaded.state.csv", [(k, 0, 97, 3) for k in range(30)])
    write_state(tmp_path / "idle_bare.state.csv", [(k, 1, 0, 99) for k in range(30)])
    params = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert params["idle"]["loaded"]["gpu0"]["power_w"] is None and params["idle"]["bare"]["gpu0"]["power_w"] > 0
    loaded, bare = texts(params, "refused"), texts(params, "warning")
    assert "gpu0 is not idle: the GPU was busy, utilisation 97 % on average; take it again: `bash 03_calibrate.sh --idle-loaded`" in loaded
    assert "idle_bare.csv: taken while the CPUs were busy (99 % on average)" in bare
    assert "`FORCE=1 bash 03_calibrate.sh --idle-bare`" in bare
    assert calibrate.idle_power(params)["gpu0"] == pytest.approx(IDLE_W["gpu"], rel=0.01), "the quiet between calls stands in"


def test_a_machine_that_draws_more_without_a_server_was_not_idle(tmp_path):
    made = make_run(tmp_path, **SMALL)
    swapped = made.paths | {"idle_loaded": made.paths["idle_bare"], "idle_bare": made.paths["idle_loaded"]}
    params = calibrate.calibrate(**swapped, out_dir=tmp_path / "out", draws=0, figures=False)
    found = next(c for c in params["checks"] if c["code"] == "idle_order")
    assert found["severity"] == "warning" and found["bare_w"] > found["loaded_w"]
    assert "`FORCE=1 bash 03_calibrate.sh --idle-bare`" in found["text"]
    right = calibrate.calibrate(**made.paths, out_dir=tmp_path / "out", draws=0, figures=False)
    assert not [c for c in right["checks"] if c["code"] == "idle_order"]


def test_predict_takes_unknown_counts_and_old_ones(tmp_path):
    params, _ = run(tmp_path, contexts=(1024, 4096, 8192), outputs=(64, 192), reps=2, draws=0)
    got = calibrate.predict(params, [4096, 4096], [np.nan, 4080], [64, 64])
    assert np.isnan(got["gpu_above_idle_j"][0]) and got["gpu_above_idle_j"][1] > 0
    assert got["time_s"].shape == (2,)
    assert calibrate.predict(params, 4096, 0, 64)["time_s"].shape == (1,)
    with pytest.raises(ValueError, match="expected loaded, rested or bare"):
        calibrate.idle_power(params, "asleep")


# ---- what the README says of the included data ----


def test_the_readmes_numbers_are_those_of_the_included_files(repo):
    text, params = (repo / "README.md").read_text(), json.loads((repo / "results/calib/params.json").read_text())
    gpu, rounding = params["energy"]["gpu"], 0.051
    for name, fit, key, append in (("GPU energy of a call", gpu, "total", "gpu_total_j"), ("GPU energy above idle", gpu, "above_idle", "gpu_above_idle_j"),
                                   ("time of a call", params["time"], "time", "time_s")):  # fmt: skip
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        stated = [float(cell.strip().removesuffix(" %")) for cell in row.split("|")[2:-1]]
        assert f"| {100 * fit['noise_floor'][key]:.2f} % |" in row, "as the terminal prints it"
        found = [fit["held_out"][f"leave_one_{kind}_out"][key]["mape"] for kind in ("cell", "context")]
        found += [params["validation"]["append"][append]["mape"], fit["noise_floor"][key]]
        assert stated == pytest.approx([100 * x for x in found], abs=rounding), name
    throttling = next(c for c in params["checks"] if c["code"] == "throttling")
    assert f"{throttling['rows']} of the {throttling['of_rows']} rows" in text and f"{throttling['n']} of the {throttling['of']} calls met it" in text
    assert f"{params['idle']['loaded']['gpu0']['between_calls_w']:.2f} W between calls" in text

    windows = rows_of(repo / "bench/h200_windows.csv")
    for name, column in (("counter read at both ends", "zeus"), ("10 Hz rows, interpolated", "naive"), ("Trajoule (agrees", "phase")):
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
        for cell, size in zip(row.split("|")[2:-1], ("45", "112", "225", "450"), strict=True):
            of = [{k: float(v) for k, v in r.items()} for r in windows if r["tokens"] == size]
            errors = np.array([(r[column] - r["idle_w"] * r["seconds"]) / r["reference_above_idle_j"] - 1 for r in of]) * 100
            mean, se = (float(x) for x in cell.removesuffix(" % ").split("+-"))
            assert mean == pytest.approx(errors.mean(), abs=0.51) and se == pytest.approx(errors.std(ddof=1) / np.sqrt(11), rel=0.4, abs=0.006)
    append = params["validation"]["append"]["gpu_total_j"]
    assert f"against {100 * append['mape']:.1f} %, bias -0.3 against {100 * append['bias']:+.1f} %)" in text
    floor = params["time"]["terms"]["prefill_floor"]
    assert f"at least the {1e3 * floor['value']:.0f} ms (95 % interval {1e3 * floor['lo']:.0f} to {1e3 * floor['hi']:.0f})" in text

    def prefill(fit, tokens):  # without the call's overhead and the floor
        return fit["terms"]["uncached"]["value"] + fit["terms"]["prefill_attention"]["value"] * tokens / 2

    watts = [prefill(gpu, u) / prefill(params["time"], u) + gpu["idle_w"] for u in (4096, 16384)]
    assert f"{watts[0]:.0f} W at 4,096 tokens and {watts[1]:.0f} W at 16,384" in text


def test_the_readmes_costs_of_measuring_are_those_of_the_included_pairs(repo):
    text = " ".join((repo / "README.md").read_text().split())
    e = {(what, quantity): gpu_pairs.effect(rows_of(repo / f"bench/h200_pairs_{what}.csv"), f"time_{quantity}_ms")
         for what in ("sampler", "words", "force") for quantity in ("per_token", "to_first_token")}  # fmt: skip

    def stated(what, quantity, digits):
        return f"{e[what, quantity]['change_pct']:+.{digits}f} % (+-{e[what, quantity]['half_pct']:.{digits}f} %"

    assert f"time per token by {e['sampler', 'per_token']['change_pct']:+.3f} % (95 % interval +-{e['sampler', 'per_token']['half_pct']:.3f} %)" in text
    assert f"its time to first token by {stated('sampler', 'to_first_token', 1)}" in text
    with_it, without = sorted(e["sampler", "to_first_token"]["scatter_pct"])
    assert f"single ones scatter by {with_it:.0f} to {without:.0f} %" in text
    assert f"{stated('words', 'per_token', 2)}) of the time per token and {stated('words', 'to_first_token', 0)}" in text
    assert f"{stated('force', 'per_token', 0)}) of the time per token" in text
    assert [e[what, "per_token"]["pairs"] for what in ("sampler", "words", "force")] == [50, 12, 15]
    assert all(f"{n} pairs" in text for n in (12, 15)) and "50 interleaved pairs" in text


def test_the_mean_difference_of_pairs_has_no_bias_where_single_calls_scatter():
    rng = np.random.default_rng(0)
    found, ratios, inside = [], [], 0
    for _ in range(400):
        off, on = 100 * np.exp(0.18 * rng.standard_normal((2, 50)))
        rows = [{"pair": i, "on": side, "ms": x[i]} for i in range(50) for side, x in ((0, off), (1, on))]
        e = gpu_pairs.effect(rows, "ms")
        found.append(e["change_pct"])
        inside += abs(e["change_pct"]) <= e["half_pct"]
        ratios.append(100 * (on / off - 1).mean())
    assert abs(np.mean(found)) < 0.6 < 2.5 < np.mean(ratios)
    assert 0.92 < inside / 400 < 0.98
