"""evaluate.py: the statistics against independent values and by simulation, honest denominators, odd tables, and the page in a browser."""

import csv
import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from fakes import browser
from fakes import trials_table as fake

import evaluate as ev


def run(tmp_path, table, *more, name="trials.csv"):
    """Exit code, folder of results."""
    path = fake.write(tmp_path / name, table) if isinstance(table, list) else table
    out = tmp_path / f"out_{name}"
    return ev.main(["--trials", str(path), "--out", str(out), *map(str, more)]), out


def read(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def attempt(task, success, joules, policy="summarize-off", rep=1, **more):
    """A trajectory with a chosen outcome and energy (its parts scaled with it)."""
    r = fake.row(np.random.default_rng(7), task, policy, rep, 6, success)
    factor = joules / r["total_j"]
    for c in r:
        if c.endswith("_j") and isinstance(r[c], float):
            r[c] *= factor
    return r | {"total_j": joules, **more}


# ---------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("p", "df", "value"), [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.975, 9, 2.26216), (0.95, 19, 1.72913), (0.995, 30, 2.75000)]
)
def test_t_quantiles_are_those_of_the_tables(p, df, value):
    assert ev.t_quantile(p, df) == pytest.approx(value, abs=5e-5)
    assert ev.t_quantile(1 - p, df) == pytest.approx(-value, abs=5e-5)


@pytest.mark.parametrize(
    ("successes", "n", "upper"), [(0, 5, 1 - 0.05 ** (1 / 5)), (0, 20, 1 - 0.05 ** (1 / 20)), (1, 10, 0.39416), (8, 10, 0.96323), (5, 5, 1.0)]
)
def test_clopper_pearson_upper_limits(successes, n, upper):
    assert ev.clopper_pearson_upper(successes, n) == pytest.approx(upper, abs=5e-6)
    assert ev.clopper_pearson_lower(n - successes, n) == pytest.approx(1 - upper, abs=5e-6)


# -------------------------------------------------------------------------------------------------- intervals


def test_the_number_of_tasks_decides_the_interval():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 1, 30)
    one = np.ones(30)
    assert ev.ratio_interval(values[:4], one[:4]).lo is None
    t = ev.ratio_interval(values[:7], one[:7])
    assert t.method == "t" and t.hi - t.value == pytest.approx(ev.t_quantile(0.975, 6) * values[:7].std(ddof=1) / math.sqrt(7))
    assert ev.ratio_interval(values, one).method == "bootstrap"


def coverage(draw, truth, estimate, tasks=20, rounds=250):
    rng = np.random.default_rng(11)
    hits = total = 0
    for _ in range(rounds):
        e = estimate(*draw(rng, tasks))
        if e is not None and e.value is not None:
            total += 1
            hits += (e.lo is None or e.lo <= truth) and (e.hi is None or truth <= e.hi)
    return hits / total


def simulated(rng, tasks, reps=3, p=0.4):
    """Attempts of a task resemble each other, hard tasks cost more: (energy, successes, model energy) per task."""
    size = rng.lognormal(0, 0.6, tasks)[:, None]
    success = rng.random((tasks, reps)) < rng.beta(1.5 * p, 1.5 * (1 - p), tasks)[:, None]
    energy = size * rng.lognormal(0, 0.3, (tasks, reps)) * np.where(success, 0.7, 1.3)
    share = rng.beta(8, 2, tasks)[:, None]
    return energy.sum(1), success.sum(1).astype(float), (energy * share).sum(1)


def test_intervals_cover_the_truth_at_20_tasks():
    e, s, m = simulated(np.random.default_rng(5), 400_000)
    n = np.full(20, 3.0)
    energy = coverage(simulated, e.mean() / 3, lambda e, s, m: ev.ratio_interval(e, n))
    rate = coverage(simulated, s.mean() / 3, lambda e, s, m: ev.rate_interval(s, n))
    share = coverage(simulated, m.sum() / e.sum(), lambda e, s, m: ev.ratio_interval(m, e))
    goal = coverage(simulated, e.sum() / s.sum(), lambda e, s, m: ev.inverse(ev.ratio_interval(s, e)))
    assert min(energy, rate, share, goal) >= 0.92, (energy, rate, share, goal)


def test_the_ratio_of_two_policies_covers_the_truth_at_20_tasks():
    def draw(rng, tasks):
        size, ease = rng.lognormal(0, 0.6, tasks)[:, None], rng.beta(0.6, 0.9, tasks)[:, None]
        out = []
        for factor in (1.0, 1.3):
            success = rng.random((tasks, 3)) < ease
            energy = factor * size * rng.lognormal(0, 0.3, (tasks, 3)) * np.where(success, 0.7, 1.3)
            n = np.full(tasks, 3.0)
            out.append({"n": n, "known": n, "success": success.sum(1).astype(float), "energy": energy.sum(1)})
        return out

    a, b = draw(np.random.default_rng(5), 400_000)
    truth = (b["energy"].sum() / b["success"].sum()) / (a["energy"].sum() / a["success"].sum())

    def estimate(a, b):
        d = ev.policy_difference(b, a)
        return ev.Estimate(*(d.get(f"energy_per_goal_ratio{end}") for end in ("", "_lo", "_hi")))

    assert coverage(draw, truth, estimate) >= 0.92


@pytest.mark.integration
def test_intervals_of_the_scores_cover_the_truth_at_20_tasks():
    def draw(rng, tasks):
        energy = rng.lognormal(0, 0.6, tasks)[:, None] * rng.lognormal(0, 0.4, (tasks, 3))
        predicted = energy * np.exp(rng.normal(0, 0.15, tasks)[:, None] + rng.normal(0, 0.2, (tasks, 3)))
        return energy.ravel(), predicted.ravel()

    def plain(y, p):
        rank = [np.argsort(np.argsort(v)) for v in (y, p)]
        r2 = 1 - ((p - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        ape = np.abs(p / y - 1)
        return {"mape": ape.mean(), "mdape": np.median(ape), "mae_j": np.abs(p - y).mean(), "r2": r2, "spearman": np.corrcoef(*rank)[0, 1]}

    truth, rng, rounds = plain(*draw(np.random.default_rng(5), 200_000)), np.random.default_rng(7), 200
    found = [ev.scores(*draw(rng, 20), np.repeat(np.arange(20), 3)) for _ in range(rounds)]
    covered = {k: sum(s[k].lo <= x <= s[k].hi for s in found) / rounds for k, x in truth.items()}
    assert min(covered.values()) >= 0.92, covered


def test_intervals_of_seven_tasks_rest_on_t_and_cover_the_truth_of_a_normal():
    def normal(rng, tasks):
        return (rng.normal(10, 3, tasks),)

    found = coverage(normal, 10, lambda v: ev.ratio_interval(v, np.ones(7)), tasks=7, rounds=1500)
    assert 0.93 <= found <= 0.97


def test_sign_flip_is_exact_on_few_tasks():
    d = np.array([3.0, 1.0, 2.0, -0.5, 4.0])
    extreme = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= d.sum() - 1e-12 for signs in itertools.product((1, -1), repeat=5)]
    assert ev.sign_flip_p(d) == pytest.approx(np.mean(extreme))
    assert ev.sign_flip_p(d[:4]) is None
    assert ev.sign_flip_p(np.ones(20)) == pytest.approx(1 / 20_001, rel=1)


def test_energy_per_goal_has_no_upper_limit_when_success_may_be_zero():
    s, e = np.array([0, 0, 0, 0, 1.0]), np.array([3, 4, 5, 6, 2.0])
    goal = ev.inverse(ev.ratio_interval(s, e))
    assert goal.value == pytest.approx(20) and goal.hi is None and 0 < goal.lo < 20


# --------------------------------------------------------------------------------------------------- fitting


def loss(x, y, b):
    return np.abs(x @ b / y - 1).mean()


def test_one_coefficient_minimises_relative_error_exactly():
    rng = np.random.default_rng(2)
    y = rng.lognormal(0, 1, 41)
    for x in (np.ones((41, 1)), (y * rng.lognormal(0, 0.4, 41))[:, None]):
        b = ev.fit_relative(x, y)
        grid = np.linspace(0.2, 3, 20_001) * b[0]
        assert loss(x, y, b) <= min(loss(x, y, np.array([g])) for g in grid[::20]) + 1e-9


def test_several_coefficients_are_not_negative_and_near_the_best():
    rng = np.random.default_rng(3)
    x = np.column_stack([np.ones(60), rng.uniform(1, 50, 60), rng.uniform(1, 9, 60)])
    y = x @ [5.0, 2.0, 0.0] * rng.lognormal(0, 0.1, 60)
    b = ev.fit_relative(x, y)
    assert (b >= 0).all()
    around = b + rng.normal(0, 0.3, (4000, 3)) * [2, 0.3, 1]
    assert loss(x, y, b) <= min(loss(x, y, c) for c in np.maximum(around, 0)) + 2e-4


def test_a_predictor_never_sees_the_task_it_is_scored_on():
    y = np.array([1.0, 1, 1, 50, 50, 50, 1, 1, 1])
    tasks = np.repeat(["a", "b", "c"], 3)
    out = ev.leave_one_task_out(np.ones((9, 1)), y, tasks)
    assert out[3:6] == pytest.approx(1) and np.isnan(ev.leave_one_task_out(np.ones((3, 1)), y[:3], tasks[:3])).all()


def test_same_task_prediction_leaves_the_trajectory_out():
    y = np.array([1.0, 5, 2, 9, 7])
    out = ev.same_task(y, np.array(list("aaaab")), np.array(["p"] * 5))
    assert out[:4] == pytest.approx([5, 2, 5, 2]) and np.isnan(out[4])


def test_scores_agree_with_plain_formulas():
    rng = np.random.default_rng(4)
    y = rng.lognormal(0, 1, 60)
    p = y * rng.lognormal(0, 0.3, 60)
    s = ev.scores(y, p, np.repeat([f"t{i}" for i in range(12)], 5))
    assert s["mape"].value == pytest.approx(np.abs(p / y - 1).mean()) and s["mdape"].value == pytest.approx(np.median(np.abs(p / y - 1)))
    assert s["r2"].value == pytest.approx(1 - ((p - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    ranks = [np.argsort(np.argsort(v)) for v in (y, p)]
    assert s["spearman"].value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert all(e.lo <= e.value <= e.hi for e in s.values())


# ---------------------------------------------------------------------------------------------- retry budget


@pytest.mark.parametrize("outcomes", [(1, 0, 0, 1), (0, 0, 0), (1, 1), (0, 1, 0, 0, 0), (1,)])
def test_retry_budget_is_the_mean_over_all_orders(outcomes):
    success = np.array(outcomes, bool)
    energy = np.array([3.0, 7.0, 11.0, 2.0, 5.0])[: len(success)]
    for k in range(1, len(success) + 1):
        won, spent = [], []
        for order in itertools.permutations(range(len(success))):
            used = 0.0
            for i in order[:k]:
                used += energy[i]
                if success[i]:
                    break
            won.append(any(success[i] for i in order[:k]))
            spent.append(used)
        p, e = ev.retry_curve(success, energy)[k - 1]
        assert p == pytest.approx(np.mean(won)) and e == pytest.approx(np.mean(spent))
    assert len(ev.retry_curve(success, energy)) == len(success)


def test_retries_leave_out_tasks_with_fewer_attempts_and_say_so(tmp_path):
    table = [attempt("a", r == 3, 1000, rep=r) for r in (1, 2, 3)] + [attempt("b", True, 500)]
    _, out = run(tmp_path, table)
    rows = {int(r["k"]): r for r in read(out / "retry_budget.csv")}
    assert (rows[1]["tasks"], rows[3]["tasks"], rows[3]["tasks_with_fewer_attempts"]) == ("2", "1", "1")
    assert float(rows[1]["energy_per_success_j"]) == pytest.approx(((1000 + 500) / 2) / ((1 / 3 + 1) / 2))
    assert 4 not in rows


def test_cutoff_is_recommended_only_when_it_pays_on_held_out_tasks(tmp_path):
    cheap = [attempt(f"t{i:02d}", r == 1, 1000 if r == 1 else 20_000, rep=r) for i in range(12) for r in (1, 2)]
    _, out = run(tmp_path, cheap)
    held = [r for r in read(out / "energy_cutoff.csv") if r["kind"] == "held-out"]
    assert held[0]["recommended"] == "yes" and float(held[0]["energy_per_success_j"]) == pytest.approx(2000)
    assert float(held[0]["saving"]) == pytest.approx(1 - 2000 / 21_000)
    _, out = run(tmp_path, fake.rows(12, ("summarize-off",), 2, unscored=0), name="plain.csv")
    held = [r for r in read(out / "energy_cutoff.csv") if r["kind"] == "held-out"]
    assert held[0]["recommended"] == "no"
    few = [attempt(f"t{i}", True, 1000) for i in range(3)]
    _, out = run(tmp_path, few, name="few.csv")
    assert {r["kind"] for r in read(out / "energy_cutoff.csv")} == {"descriptive"}


# -------------------------------------------------------------------------------------------- energy per goal


def test_no_success_gives_a_lower_bound_and_no_infinity(tmp_path):
    table = [attempt(f"t{i}", False, 41_000 / 5) for i in range(5)]
    code, out = run(tmp_path, table)
    row = read(out / "configs.csv")[0]
    assert code == 0 and row["energy_per_goal_j"] == "" and float(row["spent_j"]) == pytest.approx(41_000)
    assert float(row["energy_per_goal_lower_bound_j"]) == pytest.approx(18_194, abs=1)
    text = (out / "summary.json").read_text()
    json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} in summary.json"))
    assert "at least 18.2 kJ" in re.sub("<[^>]*>", "", (out / "report.html").read_text())


def test_failed_attempts_are_paid_for_by_the_goals(tmp_path):
    table = [attempt("a", True, 1000), attempt("b", False, 3000), attempt("c", True, 2000)]
    _, out = run(tmp_path, table)
    row = read(out / "configs.csv")[0]
    assert float(row["energy_per_goal_j"]) == pytest.approx(3000) and float(row["energy_per_trajectory_j"]) == pytest.approx(2000)


def test_unscored_runs_bound_the_energy_per_goal(tmp_path):
    table = [attempt("a", True, 1000), attempt("b", False, 3000), attempt("c", False, 2000, outcome="unscored")]
    _, out = run(tmp_path, table)
    row = read(out / "configs.csv")[0]
    assert (float(row["energy_per_goal_j"]), float(row["infra_j"])) == (pytest.approx(4000), pytest.approx(2000))
    assert float(row["energy_per_goal_if_unscored_fail_j"]) == pytest.approx(6000)
    assert float(row["energy_per_goal_if_unscored_succeed_j"]) == pytest.approx(3000)


def test_a_scored_run_without_energy_does_not_cheapen_a_goal(tmp_path):
    lost = attempt("b", False, 3000) | {c: "" for c in fake.row(np.random.default_rng(0), "b", "p", 1, 3, False) if c.endswith("_j")}
    table = [attempt("a", True, 1000), attempt("b", False, 3000, rep=2), lost | {"total_domains": ""}]
    _, out = run(tmp_path, table)
    row = read(out / "configs.csv")[0]
    assert row["no_energy"] == "1" and float(row["energy_per_goal_j"]) == pytest.approx(7000)


def plan(path, rows):
    path.write_text("order,task,policy,rep,mode,recording\n" + "".join(f"{i},{','.join(map(str, r))}\n" for i, r in enumerate(rows)))
    return path


def test_planned_runs_that_left_nothing_stay_in_the_denominator(tmp_path):
    table = [attempt("a", True, 1000)]
    p = plan(tmp_path / "plan.csv", [("a", "summarize-off", 1, "live", ""), ("b", "summarize-off", 1, "live", "")])
    _, out = run(tmp_path, table, "--plan", p)
    row = read(out / "configs.csv")[0]
    assert [row[c] for c in ("planned", "n", "success", "fail", "unscored", "missing", "pending")] == ["2", "1", "1", "0", "1", "1", "0"]
    assert float(row["energy_per_goal_if_unscored_fail_j"]) == pytest.approx(2000)
    _, out = run(tmp_path, table, "--plan", p, "--partial")
    row = read(out / "configs.csv")[0]
    assert [row[c] for c in ("planned", "unscored", "missing", "pending")] == ["2", "0", "0", "1"]
    assert "still to come" in (out / "report.html").read_text()


def test_counts_add_up_for_every_policy(tmp_path):
    table = fake.rows(6, reps=2, unscored=0.3)
    p = plan(tmp_path / "plan.csv", [(r["task"], r["policy"], r["rep"], "live", "") for r in table] + [("new", "summarize-8k", 1, "live", "")])
    _, out = run(tmp_path, table, "--plan", p)
    for row in read(out / "configs.csv"):
        assert sum(int(row[c]) for c in ("success", "fail", "unscored", "pending")) == int(row["planned"])
    assert sum(int(r["planned"]) for r in read(out / "configs.csv")) == 25


def test_carbon_and_price_carry_the_stated_pue(tmp_path):
    _, out = run(tmp_path, [attempt("a", True, 3.6e6)], "--carbon", 400, "--price", 0.3, "--pue", 1.5)
    row = read(out / "configs.csv")[0]
    assert float(row["carbon_per_goal_g"]) == pytest.approx(600) and float(row["price_per_goal"]) == pytest.approx(0.45)
    assert float(row["energy_per_goal_j"]) == pytest.approx(3.6e6) and row["pue"] == "1.5"
    with pytest.raises(SystemExit) as e:
        run(tmp_path, [attempt("a", True, 1)], "--pue", 1.5)
    assert e.value.code == 2


def test_policies_are_compared_on_the_tasks_that_both_have(tmp_path):
    table = [attempt(f"t{i}", True, 1000 + i) for i in range(6)] + [attempt(f"t{i}", True, 2000 + i, "summarize-8k") for i in range(1, 8)]
    _, out = run(tmp_path, table)
    row = next(r for r in read(out / "configs.csv") if r["policy"] == "summarize-8k")
    assert (row["reference_policy"], row["paired_tasks"]) == ("summarize-off", "5")
    assert float(row["energy_difference_j"]) == pytest.approx(1000) and float(row["energy_difference_j_p"]) == pytest.approx(2 / 32)


# ---------------------------------------------------------------------------------------------------- pooling


def test_rows_with_different_domains_or_behaviour_are_never_pooled(tmp_path):
    table = fake.rows(3, ("summarize-off",), 2, unscored=0)
    table += fake.rows(3, ("summarize-off",), 1, unscored=0, domains=("gpu",), prefix="other")
    table += fake.rows(2, ("summarize-off",), 1, unscored=0, mode="replay", recording_source="authored")
    table += fake.rows(2, ("summarize-off",), 1, unscored=0, mode="replay", recording_source="recorded", prefix="again")
    code, out = run(tmp_path, table)
    rows = read(out / "configs.csv")
    assert code == 0 and [(r["behaviour"], r["total_domains"], r["n"]) for r in rows] == [
        *[("live", "gpu+cpu", "6"), ("live", "gpu", "3"), ("authored", "gpu+cpu", "2"), ("recorded", "gpu+cpu", "2")]
    ]
    for name in ("rq1_predictors", "rq1_paired", "rq2_shares", "retry_budget", "energy_cutoff"):
        found = read(out / f"{name}.csv")
        assert found and all(r["behaviour"] and r["total_domains"] and r["source"] for r in found), name
    page = (out / "report.html").read_text()
    assert page.count("Not pooled with the above") == 3 and "Authored replies" in page


def test_estimated_energy_is_called_circular_and_no_test_is_made(tmp_path, capsys):
    code, out = run(tmp_path, fake.quickstart())
    assert code == 0
    assert {r["circular"] for r in read(out / "rq1_predictors.csv")} == {"yes"}
    assert all(r["source"] == "estimated" and r["p_sign_flip"] == "" for r in read(out / "rq1_paired.csv"))
    page = (out / "report.html").read_text()
    assert "Circular" in page and "Estimated energy" in page and not re.search(r"95 % interval \d", page)
    said = capsys.readouterr().out
    assert "authored" in said and "estimated" in said and said.rstrip().endswith("report.html")


def test_measured_gpu_with_estimated_cpu_is_named_as_such(tmp_path):
    _, out = run(tmp_path, fake.rows(3, reps=1, cpu_source="estimated", unscored=0))
    assert {r["source"] for r in read(out / "configs.csv")} == {"measured gpu, estimated cpu"}


def test_kinds_are_compared_only_within_themselves(tmp_path):
    _, out = run(tmp_path, fake.rows(12, reps=2))
    kind = {(r["target"], r["predictor"]): r["kind"] for r in read(out / "rq1_predictors.csv")}
    paired = read(out / "rq1_paired.csv")
    assert {r["compared"] for r in paired} >= {"ex-ante", "post-hoc", "early, 1 call"}
    assert all(kind[r["target"], r["best"]] == kind[r["target"], r["runner_up"]] == r["kind"] for r in paired)
    assert all(float(r["best_mape"]) <= float(r["runner_up_mape"]) and r["p_sign_flip"] for r in paired)


def test_a_clearly_better_predictor_wins_its_test_and_equal_ones_do_not(tmp_path):
    _, out = run(tmp_path, fake.rows(20))
    row = next(r for r in read(out / "rq1_paired.csv") if r["compared"] == "post-hoc" and r["target"] == "total_j")
    assert float(row["difference_lo"]) > 0 and float(row["p_sign_flip"]) < 0.05


def test_shares_add_up_and_match_the_table(tmp_path):
    table = fake.rows(4, reps=2, unscored=0, domains=("gpu", "cpu", "dram"))
    _, out = run(tmp_path, table)
    for row in read(out / "rq2_shares.csv"):
        assert sum(float(row[f"{p}_share"]) for p in ev.PHASES) == pytest.approx(1)
        assert sum(float(row[f"{d}_{p}_share"]) for d in ev.DOMAINS for p in ev.PHASES) == pytest.approx(1)
    whole = read(out / "rq2_shares.csv")[-1]
    assert (whole["task"], whole["policy"]) == ("(all tasks)", "(all policies)")
    model = sum(r[f"{d}_model_j"] for r in table for d in ev.DOMAINS) / sum(r["total_j"] for r in table)
    assert float(whole["model_share"]) == pytest.approx(model)


# ------------------------------------------------------------------------------------ against scipy, where it is


@pytest.fixture(scope="module")
def scipy():
    pytest.importorskip("scipy", reason="SKIPPED: no scipy here, nothing independent has checked the statistics")
    import scipy.optimize
    import scipy.stats

    return scipy


def test_quantiles_and_exact_limits_agree_with_scipy(scipy):
    for a, b, p in itertools.product((0.5, 1, 3, 40), (0.5, 2, 17, 300), (0.001, 0.05, 0.5, 0.95)):
        assert ev.beta_quantile(p, a, b) == pytest.approx(scipy.stats.beta.ppf(p, a, b), rel=1e-8, abs=1e-12)
    for df in (1, 2, 5, 19, 200):
        assert ev.t_cdf(1.3, df) == pytest.approx(scipy.stats.t.cdf(1.3, df), abs=1e-12)
    for k, n in ((0, 5), (1, 5), (3, 40), (40, 40)):  # one-sided 95 % limits are those of a two-sided 90 % interval
        exact = scipy.stats.binomtest(k, n).proportion_ci(confidence_level=0.9, method="exact")
        assert (ev.clopper_pearson_lower(k, n), ev.clopper_pearson_upper(k, n)) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_relative_error_is_as_small_as_a_linear_programme_gets_it(scipy):
    rng = np.random.default_rng(12)
    for p, zero in ((2, False), (3, True), (4, False)):
        x = np.column_stack([np.ones(80), rng.lognormal(3, 1, (80, p - 1))])
        y = x @ np.r_[5.0, 2.0, 0.7, 0.1][:p] * rng.lognormal(0, 0.3, 80) - (x[:, -1] * 0.5 if zero else 0)
        y = np.maximum(y, 1.0)
        z = x / y[:, None]
        best = scipy.optimize.linprog(
            np.r_[np.zeros(p), np.ones(80) / 80], np.block([[z, -np.eye(80)], [-z, -np.eye(80)]]), np.r_[np.ones(80), -np.ones(80)]
        )
        assert loss(x, y, ev.fit_relative(x, y)) <= best.fun * 1.005


def test_scores_and_their_intervals_agree_with_scipy(scipy):
    rng = np.random.default_rng(13)
    y = np.round(rng.lognormal(2, 1, 40), 0) + 1  # with ties
    p = np.round(y * rng.lognormal(0, 0.4, 40), 0) + 1
    s = ev.scores(y, p, np.arange(40))
    assert s["spearman"].value == pytest.approx(scipy.stats.spearmanr(y, p).statistic)
    level = 1 - 2 * ev._tail(40)  # wider than 95 %, for few clusters
    for name, of in (("mdape", lambda y, p: np.median(np.abs(p / y - 1))), ("spearman", lambda y, p: scipy.stats.spearmanr(y, p).statistic)):
        e = scipy.stats.bootstrap((y, p), of, paired=True, vectorized=False, n_resamples=1999, confidence_level=level, rng=1)
        assert (s[name].lo, s[name].hi) == pytest.approx((e.confidence_interval.low, e.confidence_interval.high), rel=0.15, abs=0.02)
    weights = rng.integers(0, 4, 40)
    ranks = (ev.weighted_ranks(np.unique(v, return_inverse=True)[1], weights.astype(float)) for v in (y, p))
    repeated = scipy.stats.spearmanr(np.repeat(y, weights), np.repeat(p, weights)).statistic
    assert ev.weighted_correlation(*ranks, weights.astype(float)) == pytest.approx(repeated)


def test_means_of_few_tasks_and_sign_flips_agree_with_scipy(scipy):
    rng = np.random.default_rng(14)
    d = rng.normal(0.4, 1, 9)
    e, t = ev.ratio_interval(d, np.ones(9)), scipy.stats.ttest_1samp(d, 0).confidence_interval(0.95)
    assert (e.lo, e.hi) == pytest.approx((t.low, t.high))
    test = scipy.stats.permutation_test((d,), lambda x: x.sum(), permutation_type="samples", vectorized=False, n_resamples=np.inf)
    assert ev.sign_flip_p(d) == pytest.approx(test.pvalue)
    for m, shift in ((40, 0.3), (800, 0.06)):  # drawn signs, then the normal limit
        d = rng.normal(shift, 1, m)
        test = scipy.stats.permutation_test(
            (d,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", vectorized=True, n_resamples=5000, rng=2
        )
        assert ev.sign_flip_p(d) == pytest.approx(test.pvalue, abs=0.02)


# ------------------------------------------------------------------------------------------------ odd tables


def test_a_run_in_another_mode_than_planned_and_rows_that_repeat_a_run_are_named(tmp_path, capsys):
    table = [attempt("a", True, 1000), attempt("a", False, 1000, trajectory="a__again"), attempt("b", True, 1000)]
    p = plan(tmp_path / "plan.csv", [("a", "summarize-off", 1, "replay", "x"), ("b", "summarize-off", 1, "live", "")])
    code, out = run(tmp_path, table, "--plan", p)
    said = capsys.readouterr().out
    assert code == 0 and "2 row(s) ran in another mode than planned, such as a, summarize-off, repetition 1: found live" in said
    assert "1 row(s) repeat the task, policy, repetition and mode of another, such as a__again; each counts as an attempt" in said
    rows = {r["behaviour"]: r for r in read(out / "configs.csv")}
    assert (rows["live"]["planned"], rows["live"]["n"]) == ("3", "3")
    assert (rows["replay"]["planned"], rows["replay"]["n"], rows["replay"]["missing"]) == ("1", "0", "1")


@pytest.mark.parametrize(
    "table",
    [
        [attempt("a", True, 1000)],
        [attempt("a", False, 1000)],
        [attempt("a", True, 1000, rep=r) for r in (1, 2, 3)],
        [attempt(f"t{i}", True, 1000) for i in range(12)],
        [attempt(f"t{i}", False, 1000, outcome="unscored") for i in range(6)],
        [attempt(f"t{i}", True, 1000, calls="", prompt_tokens="", cached_tokens="", uncached_tokens="") for i in range(6)],
        [attempt("a", False, 1, outcome="unscored", total_j="", total_domains="", hardware="", gpu_source="none", cpu_source="none")],
        [attempt(f"t{i}", i % 2 == 0, 1000 * (i + 1), gpu_above_idle_j=-5, cpu_above_idle_j="") for i in range(11)],
        [attempt(f"t{i}", True, 1000, calls=0, completion_tokens=0, prompt_tokens=0, uncached_tokens=0, cached_tokens=0) for i in range(3)],
        [attempt(f'<b>&"{i}', True, 1000, model='<script>"&') for i in range(3)],
        fake.quickstart(),
        fake.rows(7, reps=1),
        fake.rows(10, ("summarize-off", "summarize-2k", "summarize-16k"), 1, p_success=1),
    ],
    ids=[
        *["one success", "one fail", "one task", "all alike", "all unscored", "no tokens", "no energy", "below idle", "no calls", "markup"],
        *["quickstart", "seven tasks", "three policies"],
    ],
)
def test_small_and_strange_tables_get_an_answer(tmp_path, table):
    code, out = run(tmp_path, table)
    assert code == 0
    for name in ("configs", "rq1_predictors", "rq1_paired", "rq2_shares", "retry_budget", "energy_cutoff"):
        text = (out / f"{name}.csv").read_text()
        assert not re.search(r"(^|,)(nan|inf|-inf|None|NaN)(,|$)", text, re.M), name
    json.loads((out / "summary.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    page = (out / "report.html").read_text()
    assert "<script" not in page and "nan" not in re.sub(r'src="[^"]*"', "", page).lower().replace("finance", "")


def error(capsys, tmp_path, text):
    path = tmp_path / "trials.csv"
    path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
    code = ev.main(["--trials", str(path), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and "Traceback" not in said
    return said


def test_errors_are_one_line_and_name_what_is_wrong(tmp_path, capsys):
    good = fake.text(fake.rows(2, reps=1, unscored=0))
    header, first = good.split("\n")[:2]
    cells = first.split(",")

    def with_cell(column, value):
        changed = list(cells)
        changed[header.split(",").index(column)] = value
        return f"{header}\n{','.join(changed)}\n"

    assert "empty" in error(capsys, tmp_path, "")
    assert "no trajectory" in error(capsys, tmp_path, header + "\n")
    assert "missing: total_domains, total_j;" in error(capsys, tmp_path, good.replace("total_domains,", "td,", 1).replace(",total_j,", ",tj,", 1))
    assert "row 1, column total_j: found 'many'" in error(capsys, tmp_path, with_cell("total_j", "many"))
    assert "found 'inf'" in error(capsys, tmp_path, with_cell("calls", "inf"))
    assert "expected 0 or more" in error(capsys, tmp_path, with_cell("total_j", "-3"))
    assert "expected success or fail or unscored" in error(capsys, tmp_path, with_cell("outcome", "maybe"))
    assert "column task: empty" in error(capsys, tmp_path, with_cell("task", ""))
    assert "total_domains" in error(capsys, tmp_path, with_cell("total_domains", ""))
    assert "row 1: found" in error(capsys, tmp_path, f"{header}\na,b\n{first}\n")
    assert "more than once" in error(capsys, tmp_path, f"{with_cell('total_j', '5')}{first}\n")
    assert "UTF-8" in error(capsys, tmp_path, b"\xff\xfe" + good.encode())
    assert ev.main(["--trials", str(tmp_path / "none.csv"), "--out", str(tmp_path / "out")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_bom_crlf_a_torn_last_line_and_double_rows_are_taken(tmp_path, capsys):
    table = fake.rows(3, reps=2, unscored=0)
    _, plain = run(tmp_path, table)
    text = fake.text(table)
    odd = tmp_path / "odd.csv"
    lines = text.rstrip("\n").split("\n")
    odd.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, lines[3], lines[4][:40]]).encode())
    capsys.readouterr()
    code, out = run(tmp_path, odd, name="odd.csv")
    said = capsys.readouterr().out
    assert code == 0 and "torn" in said and "stood twice" in said
    assert (out / "configs.csv").read_bytes() == (plain / "configs.csv").read_bytes()


def test_the_order_of_the_rows_does_not_matter(tmp_path):
    table = fake.rows(11, reps=2) + fake.rows(3, reps=1, mode="replay", recording_source="authored", prefix="again")
    names = list(dict.fromkeys(c for r in table for c in r))
    table = [{c: r.get(c, "") for c in names} for r in table]
    _, a = run(tmp_path, table)
    order = np.random.default_rng(1).permutation(len(table))
    (tmp_path / "b").mkdir()
    _, b = run(tmp_path / "b", [table[i] for i in order])
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir()) and len(names) >= 12
    for n in names:
        assert (a / n).read_bytes() == (b / n).read_bytes(), n


def test_figures_of_an_earlier_run_do_not_stay(tmp_path):
    run(tmp_path, fake.quickstart())
    _, out = run(tmp_path, [attempt("a", True, 1000)], "--format", "pdf", "--format", "svg")
    assert not list(out.glob("*_group2.*")) and not list(out.glob("retry_budget.png"))
    assert (out / "rq2_shares.svg").read_text().startswith("<?xml") and (out / "rq2_shares.pdf").read_bytes().startswith(b"%PDF")


def test_only_numpy_pandas_and_matplotlib_are_imported(repo):
    found = set()
    for name in ("evaluate.py", "stages/report.py"):
        found |= set(re.findall(r"^\s*(?:from|import) (\w+)", (repo / name).read_text(), re.M))
    assert found - set(sys.stdlib_module_names) == {"numpy", "pandas", "matplotlib", "stages"}


def test_every_column_that_is_read_is_one_that_the_aligner_writes():
    import align_trial

    assert not {*ev.TEXT, *ev.TEXT_OPTIONAL, *ev.NUMBERS, *ev.NUMBERS_OPTIONAL} - set(align_trial.COLUMNS)


def test_the_committed_synthetic_table_is_evaluated_from_the_command_line(tmp_path, repo):
    table = repo / "tests/data/trials/synthetic_quickstart.csv"
    command = [sys.executable, repo / "evaluate.py", "--trials", table, "--out", tmp_path / "deep/eval"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and "synthetic" in (tmp_path / "deep/eval/report.html").read_text()


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        ev.main(["--help"])
    assert "evaluate.py --trials results/trials_formal.csv --out results/eval" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- the page


def test_the_page_is_self_contained(tmp_path):
    _, out = run(tmp_path, fake.rows(11, reps=2))
    page = (out / "report.html").read_text()
    assert "<script" not in page and "http" not in re.sub(r'src="data:[^"]*"', "", page)
    assert len(re.findall(r'<img alt="[^"]+" src="data:image/png;base64,', page)) == 4 and "$" not in re.sub(r'src="[^"]*"', "", page)


@pytest.mark.integration
def test_the_page_fits_phone_and_desk_and_prints_in_a_real_browser(tmp_path):
    if not browser.find():
        pytest.skip("SKIPPED: no chromium found (Debian: apt-get install -y chromium); the page was not looked at in a browser")
    pages = []
    for name, table in (("quick", fake.quickstart()), ("formal", fake.rows(20))):
        _, out = run(tmp_path, table, name=f"{name}.csv")
        pages.append(out / "report.html")
    with browser.Browser(tmp_path / "profile") as b:
        for page in pages:
            for width, phone in ((390, True), (1280, False)):
                assert b.open(page.as_uri(), width, mobile=phone, script=False) <= width, f"{page.name} is wider than {width} pixels"
                b.screenshot(tmp_path / f"{width}.png")
                assert (tmp_path / f"{width}.png").stat().st_size > 50_000
            assert b.pdf().startswith(b"%PDF")
        assert not b.errors and not [u for u in b.requests if not u.startswith(("file:", "data:"))]
