"""Facts about energylib: given these counters, these joules."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import energylib
from energylib import DataError, group, read_jsonl, read_samples, write_json_atomic

T0 = 1_796_000_000.0
H200 = "tests/data/h200_qwen3_30b_a3b"


def write(folder, header, rows, meta=None, name="samples", end="\n"):
    text = "\n".join([header, *(",".join("" if c is None else str(c) for c in row) for row in rows)]) + end
    (folder / f"{name}.csv").write_text(text)
    if meta is not None:
        (folder / f"{name}.meta.json").write_text(json.dumps({"counters": meta}))
    return folder / f"{name}.csv"


def rapl(folder, values, span=262143328850, dt=0.1, times=None, limit=250):
    """A file with one package; `values` in microjoules, None for an empty cell."""
    times = times or [100 + dt * i for i in range(len(values))]
    rows = [[f"{T0 + t:.6f}", f"{t:.6f}", v] for t, v in zip(times, values, strict=True)]
    return read_samples(
        write(folder, "t,mono,cpu0_uj", rows, {"cpu0_uj": {"source": "rapl", "max_range_uj": span, "power_limit_w": limit}})
    )


def nvml(folder, power, seconds=10, period=0.1, edges=True, half=0.001, tweak=lambda rows: rows, meta=None):
    """A file with one GPU whose counter steps every `period` s (phase 0.03 s) and follows power(t)."""
    steps = np.arange(0.03, seconds + period, period)
    fine = np.linspace(0, seconds + 1, round((seconds + 1) * 10_000) + 1)
    watts = np.array([power(t) for t in (fine[1:] + fine[:-1]) / 2])
    total = np.r_[0, np.cumsum(watts * np.diff(fine))]
    rows = []
    for t in np.arange(0.1, seconds, 0.1):
        edge = steps[np.searchsorted(steps, t - 0.001) - 1]
        value = round(np.interp(edge, fine, total) * 1e3) + 5_000_000
        rows.append([f"{T0 + t:.6f}", f"{50 + t:.6f}", value, *([f"{T0 + edge:.6f}", f"{half:.6f}"] if edges else [])])
    header = "t,mono,gpu0_mj" + (",gpu0_edge,gpu0_edge_err" if edges else "")
    return read_samples(write(folder, header, tweak(rows), meta))


def box(begin, end, idle=125.0, busy=525.0):
    return lambda t: busy if begin <= t < end else idle


def whole(samples, domain):
    """Joules between first and last known step."""
    s = samples.steps(domain)
    return samples.energy(s.t[0], s.t[-1], clock="mono").joules[domain][0]


# --- RAPL: unwrap (S1, S2, S3, S9, S11) -----------------------------------------------------------------------------------------


def test_s1_a_backward_step_adds_one_range(tmp_path):
    samples = rapl(tmp_path, [262143000000, 500000])
    assert whole(samples, "cpu0") == pytest.approx(0.828850, abs=1e-9)
    assert "cpu0:wrapped" in samples.flags


def test_s1_two_wraps_add_two_ranges(tmp_path):
    samples = rapl(tmp_path, [900, 100, 950, 50, 500], span=1000)
    assert whole(samples, "cpu0") == pytest.approx((200 + 850 + 100 + 450) * 1e-6)


def test_s2_a_backward_step_without_a_range_is_unknown_not_zero(tmp_path):
    samples = rapl(tmp_path, [3999000000, 4000000000, 10000, 1010000], span=None)
    e = samples.energy([T0 + 100, T0 + 100.1, T0 + 100.2], [T0 + 100.1, T0 + 100.2, T0 + 100.3]).joules["cpu0"]
    assert e[0] == pytest.approx(1.0) and np.isnan(e[1]) and e[2] == pytest.approx(1.0)
    assert "cpu0:wrap_unknown_range" in samples.flags


def test_s3_a_gap_that_may_hold_several_wraps_is_flagged(tmp_path):
    samples = rapl(tmp_path, [0, 10_000_000, 20_000_000, 30_000_000], times=[100, 100.1, 100.2, 100.2 + 2400])
    samples.steps("cpu0")
    assert "cpu0:wrap_ambiguous" in samples.flags and "gaps" in samples.flags
    joules = samples.energy([T0 + 100, T0 + 1000], [T0 + 100.19, T0 + 1100]).joules["cpu0"]
    assert joules[0] == pytest.approx(19, rel=1e-3) and np.isnan(joules[1])


def test_s9_s11_domains_of_two_sockets_stay_apart_and_dram_is_never_subtracted(tmp_path):
    rows = [[T0 + t, t, 100e6 * t, 7e6 * t, 20e6 * t, 3e6 * t] for t in range(5)]
    samples = read_samples(write(tmp_path, "t,mono,cpu0_uj,cpu1_uj,dram0_uj,dram1_uj", rows))
    assert [round(whole(samples, d), 6) for d in ("cpu0", "cpu1", "dram0", "dram1")] == [400, 28, 80, 12]
    assert samples.domains == ["cpu0", "cpu1", "dram0", "dram1"] and samples.total_domains == samples.domains


def test_a_package_counter_that_stands_still_is_unknown_not_zero_joules(tmp_path):
    samples = rapl(tmp_path, [1000000] * 50)
    e = samples.energy([T0 + 101], [T0 + 103])
    assert np.isnan(e.joules["cpu0"][0]) and "cpu0:counter_stuck" in samples.flags


def test_a_single_wrong_reading_is_left_out(tmp_path):
    for wrong in (0, 200_000_000_000):
        samples = rapl(tmp_path, [10_000_000, 13_000_000, wrong, 19_000_000, 22_000_000], span=None)
        assert whole(samples, "cpu0") == pytest.approx(12.0)
        assert "cpu0:counter_glitch" in samples.flags


# --- NVML: resets, glitches, gaps (S12, S13, S15, S23) --------------------------------------------------------------------------


def test_constant_power_is_found_in_any_interval(tmp_path):
    samples = nvml(tmp_path, lambda t: 300.0)
    t0 = T0 + np.array([1.0, 2.345, 5.0])
    e = samples.energy(t0, t0 + np.array([0.01, 1.0, 3.3]))
    assert e.joules["gpu0"] == pytest.approx([3, 300, 990], rel=1e-3)
    assert e.method["gpu0"] == "edges" and (e.covered == 1).all()


def test_a_backward_step_of_a_gpu_is_a_reset_and_never_a_wrap(tmp_path):
    def reset(rows):
        return [[t, m, v - 5_400_000 if i >= 50 else v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    samples = nvml(tmp_path, lambda t: 100.0, tweak=reset)
    e = samples.energy(T0 + np.array([1, 4, 6]), T0 + np.array([3, 6, 8]))
    assert e.joules["gpu0"][[0, 2]] == pytest.approx([200, 200], rel=1e-3) and np.isnan(e.joules["gpu0"][1])
    assert "gpu0:counter_reset" in samples.flags
    assert np.isnan(samples.whole_steps("gpu0", T0 + 4, T0 + 6)[0, 2])


def test_an_impossible_jump_is_unknown(tmp_path):
    def jump(rows):
        return [[t, m, v + 10**10 if i >= 50 else v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    samples = nvml(tmp_path, lambda t: 100.0, tweak=jump)
    assert np.isnan(samples.energy(T0 + 4, T0 + 6).joules["gpu0"][0]) and "gpu0:counter_jump" in samples.flags


@pytest.mark.parametrize("joules", [760, 900, 1500, 2000])
def test_a_counter_that_jumps_and_stays_up_is_no_glitch(tmp_path, joules):
    def jump(rows):
        return [[t, m, v + 1000 * joules if i >= 50 else v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    samples = nvml(tmp_path, lambda t: 125.0, tweak=jump, meta={"gpu0_mj": {"source": "nvml", "power_limit_w": 700}})
    e = samples.energy(T0 + np.array([1, 6, 1]), T0 + np.array([4, 9, 9])).joules["gpu0"]
    assert e[:2] == pytest.approx([375, 375], rel=1e-3) and np.isnan(e[2]) and "gpu0:counter_jump" in samples.flags


def test_a_burst_inside_a_gap_is_uncertain_although_its_neighbours_are_alike(tmp_path):
    samples = nvml(tmp_path, box(4, 5), tweak=lambda rows: rows[:36] + rows[56:])
    e = samples.energy(T0 + 4.0, T0 + 4.5)
    assert abs(e.joules["gpu0"][0] - 262.5) < 3 * e.err["gpu0"][0]


def test_a_call_inside_one_step_is_uncertain_where_it_is_spread_evenly(tmp_path):
    samples = nvml(tmp_path, box(5.02, 5.07))
    e = samples.energy(T0 + 5.02, T0 + 5.07)
    assert abs(e.joules["gpu0"][0] - 26.25) < 4 * e.err["gpu0"][0]


def test_cells_that_are_missing_for_long_are_told_from_single_ones(tmp_path):
    def holes(k):
        return lambda rows: [[t, m, None, None, None] if 30 <= i < 30 + k else [t, m, v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    for k, flags in ((1, {"gpu0:missing_cells"}), (30, {"gpu0:missing_cells", "gpu0:counter_gap"})):
        samples = nvml(tmp_path, box(4, 5), tweak=holes(k))
        e = samples.energy(T0 + 4, T0 + 4.5)
        assert set(samples.flags) - {"no_sidecar"} == flags and abs(e.joules["gpu0"][0] - 262.5) < 3 * e.err["gpu0"][0]


@pytest.mark.parametrize("empty", [True, False])
def test_power_that_was_not_read_is_unknown_not_what_lies_on_both_sides(tmp_path, empty):
    rows = [[T0 + t, t, None if empty and 20 < t < 80 else 125.0] for t in np.round(np.arange(0, 100, 0.1), 1) if empty or not 20 < t < 80]
    samples = read_samples(write(tmp_path, "t,mono,gpu0_w", rows, {"gpu0_w": {"source": "nvml-power"}}))
    e = samples.energy(T0 + np.array([1, 1, 85]), T0 + np.array([19, 95, 95])).joules["gpu0"]
    assert e[[0, 2]] == pytest.approx([18 * 125, 1250]) and np.isnan(e[1])
    rows[5][2] = None
    samples = read_samples(write(tmp_path, "t,mono,gpu0_w", rows, {"gpu0_w": {"source": "nvml-power"}}))
    assert samples.energy(T0, T0 + 10).joules["gpu0"][0] == pytest.approx(1250), "a reading that failed leaves no hole"


def test_a_package_counter_that_stops_for_a_while_is_unknown_there(tmp_path):
    values = np.cumsum([0 if 50 <= i < 150 else 6_000_000 for i in range(200)])
    samples = rapl(tmp_path, [int(v) for v in values])
    e = samples.energy(T0 + np.array([101, 107, 116]), T0 + np.array([104, 113, 119])).joules["cpu0"]
    assert e[[0, 2]] == pytest.approx([180, 180]) and np.isnan(e[1]) and "cpu0:counter_stuck" in samples.flags


def test_a_gap_leaves_the_total_right_and_says_so(tmp_path):
    samples = nvml(tmp_path, box(4, 6), tweak=lambda rows: rows[:35] + rows[55:])
    e = samples.energy(T0 + np.array([1.0, 1.0, 4.5]), T0 + np.array([9.0, 3.0, 5.0]))
    assert e.joules["gpu0"][0] == pytest.approx(8 * 125 + 2 * 400, rel=1e-3)
    assert e.covered[0] == pytest.approx(0.74, abs=0.02) and e.covered[1] == 1 and e.covered[2] == 0
    assert "gaps" in samples.flags and e.err["gpu0"][2] > 10 * e.err["gpu0"][1]


def test_empty_cells_are_missing_not_zero(tmp_path):
    def holes(rows):
        return [[t, m, None, None, None] if 30 <= i < 40 else [t, m, v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    samples = nvml(tmp_path, lambda t: 200.0, tweak=holes)
    assert samples.energy(T0 + 1, T0 + 8).joules["gpu0"][0] == pytest.approx(1400, rel=1e-3)
    assert "gpu0:missing_cells" in samples.flags


def test_a_counter_that_stops_while_power_flows_is_unknown(tmp_path):
    rows = [[T0 + t, t, min(t, 3) * 100_000, T0 + min(t, 3) - 0.01, 0.001, 100.0] for t in np.arange(0, 10, 0.1)]
    rows += [[T0 + t, t, 310_000, T0 + 9.99, 0.001, 100.0] for t in np.arange(10, 11, 0.1)]
    samples = read_samples(write(tmp_path, "t,mono,gpu0_mj,gpu0_edge,gpu0_edge_err,gpu0_w", rows))
    assert np.isnan(samples.energy(T0 + 2, T0 + 8).joules["gpu0"][0]) and "gpu0:counter_stuck" in samples.flags


def test_nothing_is_known_before_the_first_and_long_after_the_last_step(tmp_path):
    samples = nvml(tmp_path, lambda t: 100.0)
    e = samples.energy(T0 + np.array([-5, 9.5, 9.5, 3]), T0 + np.array([1, 9.95, 12, 2])).joules["gpu0"]
    assert np.isnan(e[[0, 2, 3]]).all() and e[1] == pytest.approx(45, rel=1e-2)


def test_s12_power_readings_are_integrated_and_labelled(tmp_path):
    rows = [[T0 + t, t, 100 + 10 * t] for t in np.arange(0, 10, 0.1)]
    samples = read_samples(write(tmp_path, "t,mono,gpu0_w", rows, {"gpu0_w": {"source": "nvml-power"}}))
    e = samples.energy(T0 + 2, T0 + 6)
    assert samples.source["gpu0"] == "nvml-power" and e.method["gpu0"] == "linear"
    assert e.joules["gpu0"][0] == pytest.approx(560, rel=1e-6)


def test_s13_an_interval_shorter_than_the_period_has_energy_and_an_uncertainty(tmp_path):
    samples = nvml(tmp_path, box(5, 6))
    e = samples.energy(T0 + 5.01, T0 + 5.04)
    assert e.joules["gpu0"][0] > 0 and e.err["gpu0"][0] > 0.5


def test_s15_a_module_counter_is_not_added_to_the_cpu(tmp_path):
    rows = [[T0 + t, t, 500_000 * t, T0 + t, 0.001, 100e6 * t] for t in range(5)]
    meta = {"gpu0_mj": {"source": "nvml", "scope": "module"}, "cpu0_uj": {"source": "rapl"}}
    samples = read_samples(write(tmp_path, "t,mono,gpu0_mj,gpu0_edge,gpu0_edge_err,cpu0_uj", rows, meta))
    assert samples.domains == ["gpu0", "cpu0"] and samples.total_domains == ["gpu0"]


def test_s23_bursts_between_the_rows_are_counted(tmp_path):
    samples = nvml(tmp_path, lambda t: 1000.0 if (t * 7) % 1 < 0.02 else 50.0)
    assert samples.energy(T0 + 1, T0 + 9).joules["gpu0"][0] == pytest.approx(8 * (50 + 950 * 0.02), rel=0.02)


def test_the_model_source_is_labelled_and_may_be_zero(tmp_path):
    rows = [[T0 + t, t, 3_000_000 * max(0, t - 5)] for t in range(11)]
    samples = read_samples(write(tmp_path, "t,mono,cpu0_est_uj", rows))
    assert samples.source["cpu0"] == "model" and samples.domains == ["cpu0"]
    assert samples.energy(T0 + np.array([0, 5]), T0 + np.array([5, 10])).joules["cpu0"] == pytest.approx([0, 15])


# --- phase-aware energy ---------------------------------------------------------------------------------------------------------


def test_a_straddling_step_gives_the_idle_side_idle_power_and_the_call_the_rest(tmp_path):
    samples = nvml(tmp_path, box(4.06, 5.51))
    call = T0 + np.array([[4.06, 5.51]])
    phase = samples.energy(call[:, 0], call[:, 1], calls=call, idle_w={"gpu0": 125.0})
    even = samples.energy(call[:, 0], call[:, 1])
    assert phase.joules["gpu0"][0] == pytest.approx(1.45 * 525, abs=0.2) and phase.method["gpu0"] == "phase"
    # spread evenly each edge loses f (1 - f) x period x (busy - idle) joules, f the part of the step before the edge
    lost = (0.3 * 0.7 + 0.8 * 0.2) * 0.1 * 400
    assert even.joules["gpu0"][0] == pytest.approx(1.45 * 525 - lost, abs=0.2)
    assert even.err["gpu0"][0] == pytest.approx(np.hypot(0.21, 0.16) * 0.1 * 400, rel=0.1)  # and the uncertainty says so
    assert phase.err["gpu0"][0] < 0.3


def test_several_calls_in_one_step_share_what_idle_time_leaves(tmp_path):
    calls = np.array([[5.035, 5.045], [5.055, 5.075], [5.1, 5.12]])
    samples = nvml(tmp_path, lambda t: 525.0 if any(a <= t < b for a, b in calls) else 125.0)
    calls = T0 + calls
    e = samples.energy(calls[:, 0], calls[:, 1], calls=calls, idle_w={"gpu0": 125.0}).joules["gpu0"]
    assert e == pytest.approx([5.25, 10.5, 10.5], abs=0.1)
    twice = samples.energy(calls[:, 0], calls[:, 1], calls=calls, idle_w={"gpu0": 125.0}, call_power_w=[2, 1, 1]).joules["gpu0"]
    assert twice.sum() == pytest.approx(e.sum(), abs=1e-6) and twice[0] == pytest.approx(2 * twice[1] / 2, rel=1e-2)


def test_a_step_with_less_than_idle_energy_falls_back_to_an_even_spread(tmp_path):
    samples = nvml(tmp_path, lambda t: 100.0)
    call = T0 + np.array([[4.06, 4.08]])  # wholly inside a step: idle power alone would take more than the step holds
    e = samples.energy(call[:, 0], call[:, 1], calls=call, idle_w={"gpu0": 130.0})
    assert e.joules["gpu0"][0] == pytest.approx(2.0, rel=1e-3)


def test_idle_time_next_to_a_call_takes_idle_power(tmp_path):
    samples = nvml(tmp_path, box(4.06, 5.51))
    call = T0 + np.array([[4.06, 5.51]])
    e = samples.energy(T0 + 4.035, T0 + 4.06, calls=call, idle_w={"gpu0": 125.0})
    assert e.joules["gpu0"][0] == pytest.approx(0.025 * 125, abs=0.05)


def test_without_edges_the_method_is_linear_and_its_error_larger(tmp_path):
    power = box(4.06, 5.51)
    with_edges, without = nvml(tmp_path, power), nvml(tmp_path, power, edges=False)
    call = T0 + np.array([[4.06, 5.51]])
    a, b = (s.energy(call[:, 0], call[:, 1], calls=call, idle_w={"gpu0": 125.0}) for s in (with_edges, without))
    assert b.method["gpu0"] == "linear" and b.err["gpu0"][0] > 5 * a.err["gpu0"][0]


def test_calls_without_an_end_are_ignored(tmp_path):
    samples = nvml(tmp_path, lambda t: 100.0)
    e = samples.energy([T0 + 2, np.nan], [T0 + 3, T0 + 4], calls=[[T0 + 2, T0 + 3], [T0 + 3, np.nan]], idle_w={"gpu0": 100.0})
    assert e.joules["gpu0"][0] == pytest.approx(100, rel=1e-3) and np.isnan(e.joules["gpu0"][1])


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.floats(0.2, 9.7), min_size=2, max_size=40, unique=True),
    calls=st.lists(st.tuples(st.floats(0.2, 9.5), st.floats(0.0, 2.0)), max_size=12),
    idle=st.floats(0, 700),
    weights=st.booleans(),
    power=st.integers(0, 3),
)
def test_parts_add_up_to_the_whole(tmp_path_factory, cuts, calls, idle, weights, power):
    shapes = (lambda t: 125.0, box(3, 5), lambda t: 100 + 50 * t, lambda t: 700.0 if int(t * 13) % 3 == 0 else 80.0)
    samples = nvml(tmp_path_factory.mktemp("s"), shapes[power])
    cuts = T0 + np.sort(np.array(cuts))
    calls = T0 + np.array([[a, a + d] for a, d in calls]).reshape(-1, 2)
    kw = {"calls": calls, "idle_w": {"gpu0": idle}, "call_power_w": np.arange(1.0, len(calls) + 1) if weights else None}
    parts = samples.energy(cuts[:-1], cuts[1:], **kw).joules["gpu0"]
    total = samples.energy(cuts[0], cuts[-1], **kw).joules["gpu0"][0]
    assert parts.sum() == pytest.approx(total, abs=1e-6) and (parts > -1e-6).all()


@settings(max_examples=60, deadline=None)
@given(rises=st.lists(st.integers(1, 90_000_000), min_size=2, max_size=60), start=st.integers(0, 10**9 - 1))
def test_unwrapping_gives_back_every_rise(tmp_path_factory, rises, start):
    span = 10**9  # microjoules; rises stay below a range, as they do when sampled often enough
    values = (start + np.r_[0, np.cumsum(rises)]) % span
    samples = rapl(tmp_path_factory.mktemp("s"), [int(v) for v in values], span=span, limit=400)
    assert whole(samples, "cpu0") == pytest.approx(sum(rises) * 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(st.floats(0, 100), min_size=2, max_size=50, unique=True).map(sorted),
    t=st.lists(st.floats(-10, 110), min_size=1, max_size=30),
    guess=st.integers(-60, 60),
)
def test_a_wrong_guess_finds_the_same_step(table, t, guess):
    table, t = np.array(table), np.array(t)
    i, lo, hi = energylib._find(table, t, np.full(len(t), guess))
    true = np.clip(np.searchsorted(table, t, "right") - 1, 0, len(table) - 2)
    assert (i == true).all() and (lo == table[i]).all() and (hi == table[i + 1]).all()


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(5, 90), max_size=70))
def test_gaps_never_change_the_total(tmp_path_factory, lost):
    samples = nvml(tmp_path_factory.mktemp("s"), box(3, 6), tweak=lambda rows: [r for i, r in enumerate(rows) if i not in lost])
    assert samples.energy(T0 + 0.3, T0 + 9.5).joules["gpu0"][0] == pytest.approx(9.2 * 125 + 3 * 400, rel=2e-3)


# --- clocks and files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 2.0, -2.0])
def test_a_step_of_the_clock_moves_no_energy(tmp_path, jump):
    def step(rows):  # the edge column is relative to the row's own time
        return [
            [f"{float(t) + jump:.6f}", m, v, f"{float(e) + jump:.6f}", h] if i >= 50 else [t, m, v, e, h]
            for i, (t, m, v, e, h) in enumerate(rows)
        ]

    samples = nvml(tmp_path, box(2, 3), tweak=step)
    assert "clock_step" in samples.flags
    assert samples.energy(50 + 1.5, 50 + 9, clock="mono").joules["gpu0"][0] == pytest.approx(7.5 * 125 + 400, rel=1e-3)
    before, after = samples.energy([T0 + 1.5, T0 + jump + 7.2], [T0 + 2.5, T0 + jump + 9.2]).joules["gpu0"]
    assert before == pytest.approx(125 + 200, rel=1e-2) and after == pytest.approx(250, rel=1e-2)


def test_edges_that_kept_the_clock_of_the_first_row_are_understood(tmp_path):
    def step(rows):
        return [[f"{float(t) + 500:.6f}", m, v, e, h] if i >= 50 else [t, m, v, e, h] for i, (t, m, v, e, h) in enumerate(rows)]

    samples = nvml(tmp_path, lambda t: 100.0, tweak=step)
    assert samples.energy(52, 58, clock="mono").joules["gpu0"][0] == pytest.approx(600, rel=1e-3)


def test_duplicate_and_disordered_rows_change_nothing(tmp_path):
    clean = nvml(tmp_path, box(3, 5))
    mixed = nvml(tmp_path, box(3, 5), tweak=lambda rows: rows[:20] + rows[25:30] + rows[20:25] + rows[28:])
    assert {"duplicate_rows", "rows_out_of_order"} <= set(mixed.flags)
    assert mixed.energy(T0 + 1, T0 + 9).joules["gpu0"][0] == clean.energy(T0 + 1, T0 + 9).joules["gpu0"][0]


def test_bom_crlf_and_a_torn_last_line(tmp_path):
    path = write(tmp_path, "t,mono,cpu0_uj", [[T0 + t, t, 5_000_000 * t] for t in range(9)])
    plain = whole(read_samples(path), "cpu0")
    text = path.read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text + b"1796000009.0,9,45")
    samples = read_samples(path)
    assert whole(samples, "cpu0") == plain and set(samples.flags) == {"no_sidecar", "torn_last_line"}


def test_compressed_files_and_odd_numbers(tmp_path):
    import gzip

    rows = ["t,mono,cpu0_uj", "1796000000,0,1e6", '"1796000001",1,2000000.0', "1796000002.0,2,+3000000", "1796000003.00,3,nan"]
    with gzip.open(tmp_path / "x.csv.gz", "wt") as f:
        f.write("\n".join(rows) + "\n")
    samples = read_samples(tmp_path / "x.csv.gz")
    assert whole(samples, "cpu0") == pytest.approx(2.0) and len(samples.t) == 4


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e15, 1e15, allow_nan=False) | st.integers(0, 2**60) | st.none(), min_size=1, max_size=30),
    decimals=st.integers(0, 9),
)
def test_numbers_are_read_as_python_reads_them(tmp_path_factory, values, decimals):
    texts = ["" if v is None else f"{v:.{decimals}f}" if isinstance(v, float) else str(v) for v in values]
    path = write(tmp_path_factory.mktemp("s"), "t,mono,cpu0_uj", [[T0 + i, i, text] for i, text in enumerate(texts)])
    read = read_samples(path).columns["cpu0_uj"]
    assert np.array_equal(read, [float(t) if t else np.nan for t in texts], equal_nan=True)


def test_chunks_do_not_cut_numbers(tmp_path, monkeypatch):
    path = write(tmp_path, "t,mono,cpu0_uj", [[f"{T0 + i / 10:.6f}", f"{i / 10:.6f}", 12345 * i] for i in range(200)])
    monkeypatch.setattr(energylib, "CHUNK_BYTES", 101)
    assert (read_samples(path).columns["cpu0_uj"] == 12345 * np.arange(200)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line"),
        ("t,mono,cpu0_uj\n", "found no row"),
        ("mono,cpu0_uj\n1,2\n", "found no column t"),
        ("t,mono,watts\n1,2,3\n", "no counter column"),
        ("t,mono,cpu0_uj\n1,2,3\n1,2\n3,4,5\n", "line 3: found 2 cells, expected 3"),
        ("t,mono,cpu0_uj\n1,2,3\n1,2,abc\n", "line 3, column cpu0_uj: found 'abc'"),
    ],
)
def test_bad_files_say_file_line_found_and_expected(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(DataError, match=message) as e:
        read_samples(tmp_path / "bad.csv")
    assert str(tmp_path / "bad.csv") in str(e.value)


def test_jsonl_takes_a_torn_last_line_only(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text('{"id": 1}\n\n{"id": 2}\n{"id": 3, "t_st')
    assert read_jsonl(path) == [{"id": 1}, {"id": 2}]
    path.write_text('{"id": 1}\n{"id"\n{"id": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(path)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    write_json_atomic(tmp_path / "a.json", {"x": None})
    with pytest.raises(ValueError):
        write_json_atomic(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_groups():
    assert [group(d) for d in ("gpu0", "gpu11", "cpu1", "dram0")] == ["gpu", "gpu", "cpu", "dram"]


@pytest.mark.parametrize(
    "given, words",
    [
        (["--from", "5", "--to", "3"], "expected a begin before the end"),
        (["--from", "5", "--to", "8"], "covers "),
        (["--to", "0"], "expected a begin before the end"),
        (["--from=1e10"], "expected a begin before the end"),
        *[([f"{option}={text}"], f"found '{text}', expected a Unix time") for option in ("--from", "--to") for text in ("nan", "inf", "-1e300", "noon", "")],
    ],
)  # fmt: skip
def test_an_interval_that_cannot_be_meant_is_one_line_and_exit_code_2(repo, capsys, given, words):
    try:
        code = energylib.main([str(repo / H200 / "idle_bare.csv"), *given])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and words in err.splitlines()[-1]


def test_the_examples_of_the_help_text_work(repo, capsys, monkeypatch):
    monkeypatch.chdir(repo)
    examples = re.findall(r"^ +python3 energylib.py ([^#\n]*)", energylib.__doc__, re.M)
    assert len(examples) == 2 and all(energylib.main(line.split()) == 0 for line in examples)
    assert "covered 1.000" in capsys.readouterr().out.split("data/calib/samples.csv:")[2]


def test_the_program_prints_the_energy_of_an_interval(repo, capsys):
    assert energylib.main([str(repo / H200 / "idle_bare.csv")]) == 0
    said = capsys.readouterr().out
    assert "gpu0: " in said and " W (nvml, edges)" in said


def test_state_is_read_beside_the_samples(tmp_path):
    assert energylib.state_path("a/samples.csv") == Path("a/state.csv") and energylib.state_path("idle.csv.gz") == Path("idle.state.csv")
    path = tmp_path / "state.csv"
    path.write_bytes(b"\xef\xbb\xbft,mono,gpu0_throttle_reasons,gpu0_util_pct\r\n2,1,4,\r\n1,0,1,97.5\r\n3,2,0,1")
    state = energylib.read_state(path)
    assert list(state["t"]) == [1, 2] and list(state["gpu0_throttle_reasons"]) == [1, 4], "in order, the torn last line left out"
    assert state["gpu0_util_pct"][0] == 97.5 and np.isnan(state["gpu0_util_pct"][1])
    path.write_text("mono\n1\n")
    with pytest.raises(DataError, match="found no column t"):
        energylib.read_state(path)


# --- the recorded H200 run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h200(repo):
    samples = read_samples(repo / H200 / "samples.csv")
    calls = np.array([[c["t_start"], c["t_end"]] for c in read_jsonl(repo / H200 / "calls.jsonl")])
    return samples, calls


def test_h200_mono_and_unix_give_the_same_joules(h200, repo):
    samples, calls = h200
    mono = np.array([[c["mono_start"], c["mono_end"]] for c in read_jsonl(repo / H200 / "calls.jsonl")])
    a = samples.energy(calls[:, 0], calls[:, 1]).joules["gpu0"]
    b = samples.energy(mono[:, 0], mono[:, 1], clock="mono").joules["gpu0"]
    assert a == pytest.approx(b, abs=0.05)


def test_h200_phase_aware_equals_whole_steps_minus_idle(h200):
    samples, calls = h200
    idle = 126.3
    phase = samples.energy(calls[:, 0], calls[:, 1], calls=calls, idle_w={"gpu0": idle}).joules["gpu0"] - idle * np.diff(calls)[:, 0]
    steps = samples.whole_steps("gpu0", calls[:, 0], calls[:, 1])
    assert phase == pytest.approx(steps[:, 2] - idle * (steps[:, 1] - steps[:, 0]), abs=0.1)


def test_h200_even_spreading_loses_three_to_thirteen_joules_a_call(h200):
    samples, calls = h200
    phase = samples.energy(calls[:, 0], calls[:, 1], calls=calls, idle_w={"gpu0": 126.3}).joules["gpu0"]
    lost = phase - samples.energy(calls[:, 0], calls[:, 1]).joules["gpu0"]
    assert 3 < np.median(lost) < 13


def test_h200_the_run_is_the_sum_of_calls_and_pauses(h200):
    samples, calls = h200
    cuts = np.r_[samples.t_begin, calls.ravel(), samples.t_end]
    kw = {"calls": calls, "idle_w": {"gpu0": 126.3}}
    parts = samples.energy(cuts[:-1], cuts[1:], **kw).joules["gpu0"]
    assert parts.sum() == pytest.approx(samples.energy(cuts[0], cuts[-1], **kw).joules["gpu0"][0], abs=1e-6)
