"""evaluate.py: the statistics against independent values and by simulation, honest denominators, odd tables, and the page in a browser."""

import csv
import html
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


def test_the_report_says_what_served_and_names_a_mixture(tmp_path):
    table = [attempt(f"t{k}", True, 1000.0, server="vLLM 0.26.0", harbor="0.24.0", calib_sha256="ab" * 32) for k in range(4)]
    _, out = run(tmp_path, table)
    page = html.unescape(re.sub("<[^>]*>", "", (out / "report.html").read_text()))
    assert "vLLM 0.26.0 and Harbor 0.24.0" in page and "abababababab…" in page and "different servers" not in page
    _, out = run(tmp_path, [*table[:3], table[3] | {"server": "vLLM 0.27.0"}], name="mixed.csv")
    assert "different servers (vLLM 0.26.0, vLLM 0.27.0)" in (out / "report.html").read_text()


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


@pytest.mark.parametrize(("tasks", "reps"), [(1, 1), (1, 9), (4, 3)])
def test_too_few_tasks_without_success_say_nothing_of_what_a_goal_costs(tmp_path, capsys, tasks, reps):
    _, out = run(tmp_path, [attempt(f"t{i}", False, 1000, rep=r) for i in range(tasks) for r in range(1, reps + 1)])
    row, said, page = read(out / "configs.csv")[0], capsys.readouterr().out, (out / "report.html").read_text()
    top = re.sub("<[^>]*>", "", page[: page.index("<h2>")])
    n = int(row["fail"])
    assert row["energy_per_goal_basis"] == "too few tasks" and float(row["energy_per_goal_lower_bound_j"]) == pytest.approx(1000 / (1 - 0.05 ** (1 / n)))
    for text in (said, top):
        assert f"cannot be said from {n} attempt" in text and "at least" not in text and "≥" not in text
    assert f"0 of {n} attempt" in page and "fewer than 5 tasks: no conclusion" in page


def test_goals_on_few_tasks_are_told_as_of_these_tasks(tmp_path, capsys):
    run(tmp_path, [attempt("a", True, 1000)])
    assert "the only scored attempt succeeded: 1.00 kJ per accomplished goal on this task (no interval from 1 task)" in capsys.readouterr().out


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


def test_planned_runs_that_left_nothing_stay_in_the_denominator(tmp_path, capsys):
    table = [attempt("a", True, 1000)]
    p = plan(tmp_path / "plan.csv", [("a", "summarize-off", 1, "live", ""), ("b", "summarize-off", 1, "live", "")])
    _, out = run(tmp_path, table, "--plan", p)
    assert "1 of 2 planned runs are unscored, 1 of them left no row" in capsys.readouterr().out
    row = read(out / "configs.csv")[0]
    assert [row[c] for c in ("planned", "n", "success", "fail", "unscored", "missing", "pending")] == ["2", "1", "1", "0", "1", "1", "0"]
    assert float(row["energy_per_goal_if_unscored_fail_j"]) == pytest.approx(2000)
    _, out = run(tmp_path, table, "--plan", p, "--partial")
    row = read(out / "configs.csv")[0]
    assert [row[c] for c in ("planned", "unscored", "missing", "pending")] == ["2", "0", "0", "1"]
    assert "1 of 2 planned runs are still to come" in capsys.readouterr().out and "still to come" in (out / "report.html").read_text()


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


def waste(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "trajectory,set_aside,reason,seconds,energy_j,domains,sources\n"
    reasons = ("stopped before its end", '"measured, then set aside"', "/home/x/traj/a: Harbor reports <b>")
    path.write_text(text + "".join(f"{t},{t}.2026,{reasons[i % 3]},3,{j},{d},{s}\n" for i, (t, j, d, s) in enumerate(rows)))
    return path


def test_waste_has_its_place_per_policy_and_in_all_energy(tmp_path, capsys):
    table = [attempt("a", True, 1000), attempt("b", False, 3000), attempt("a", True, 1000, "summarize-8k"), attempt("b", True, 1, "summarize-8k")]
    table[3] |= {"outcome": "unscored", "fail_reason": "wrong_result"}
    for r in table:
        r |= {"setup_j": 100.0, "verifier_j": "", "wasted_j": 5.0}
    (tmp_path / "data/traj").mkdir(parents=True)
    p = plan(tmp_path / "data/traj/plan.csv", [])
    names = [r["trajectory"] for r in table]
    waste(
        tmp_path / "data/waste.csv",
        (names[0], 500, "gpu0+cpu0", "nvml+rapl"),
        (names[1], "", "", ""),
        (names[2], 70, "cpu0", "model"),  # joules of another kind are counted, not added
        ("gone__summarize-off__r9", 30, "gpu0+cpu0", "nvml+rapl"),
    )
    code, out = run(tmp_path, table, "--plan", p)
    off, other = read(out / "configs.csv")
    assert code == 0 and [float(off[c]) for c in ("set_aside", "set_aside_no_energy", "set_aside_j", "wasted_j")] == [2, 1, 500, 10]
    assert (float(off["waste_j"]), float(off["all_j"])) == (500, 4000 + 200 + 500) and float(off["waste_share"]) == pytest.approx(500 / 4700)
    assert (other["set_aside"], other["set_aside_j"], float(other["waste_j"]), float(other["all_j"])) == ("1", "", 101, 1000 + 1 + 200)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["groups"][0]["waste"]["waste_j"] == 601 and summary["groups"][0]["waste"]["waste_no_energy"] == 2
    assert summary["set_aside"]["attempts"] == 4 and summary["set_aside"]["of_no_run_in_the_table"] == 1
    kinds = {k["source"]: (k["total_domains"], k["attempts"], k["energy_j"]) for k in summary["set_aside"]["by_source"]}
    assert kinds == {"measured": ("gpu+cpu", 2, 530), "estimated": ("cpu", 1, 70), "": ("", 1, None)}
    said, page = capsys.readouterr().out, html.unescape(re.sub("<[^>]*>", "", (out / "report.html").read_text()))
    for text in (said, page):  # what the user or a kill set aside is called no failure
        aside = "1 × failed (a: Harbor reports <b>), 1 × measured, then set aside by the user, 1 × stopped before its end (killed or interrupted)"
        assert f"601 J (3 attempts set aside: {aside}; 1 unscored run: 1 × wrong result), 10 % of all energy, 5.90 kJ" in text
        assert "took at least 601 J" in text and "ailures of the infrastructure" not in text
    assert summary["groups"][0]["waste"]["reasons"]["set_aside"]["measured, then set aside"] == 1
    assert "In all 4 attempts of this batch were set aside" in page and "530 J measured (gpu+cpu)" in page


def test_no_table_of_waste_is_not_no_waste(tmp_path):
    _, out = run(tmp_path, [attempt("a", True, 1000)])
    assert read(out / "configs.csv")[0]["waste_j"] == "" and "set aside is not known" in (out / "report.html").read_text()
    _, out = run(tmp_path, [attempt("a", True, 1000)], "--waste", waste(tmp_path / "w/waste.csv"))
    row = read(out / "configs.csv")[0]
    assert (row["set_aside"], float(row["waste_j"]), float(row["waste_share"])) == ("0", 0, 0)
    assert "No attempt was set aside, and no run stayed unscored" in (out / "report.html").read_text()


def test_what_the_calibration_warns_of_leads_the_page_and_the_terminal(tmp_path, capsys):
    texts = [("drift", "warning", "it drifted"), ("idle", "refused", "/home/x/calib/idle.csv: not idle"), ("linearity", "ok", "fine")]
    texts += [("accuracy", "warning", "no basis for estimates"), ("append", "warning", "far off")]
    checks = [{"code": c, "severity": s, "text": t, "value": 1} for c, s, t in texts]
    params = {"hardware": fake.HARDWARE, "model": fake.MODEL, "idle": {}, "energy": {}, "checks": checks}
    (tmp_path / "params.json").write_text(json.dumps(params))
    _, out = run(tmp_path, fake.rows(3, reps=1), "--calib", tmp_path)
    said, page = capsys.readouterr().out, (out / "report.html").read_text()
    top = page[: page.index('class="answer"')]
    for text in (said, top):
        assert text.index("no basis for estimates") < text.index("idle.csv: not idle") < text.index("it drifted")
        assert "far off" not in text and "fine" not in text and "1 more" in text
    assert "far off" in page and "/home/x" not in page and "is none that the table was made with" in said
    assert [c["code"] for c in json.loads((out / "summary.json").read_text())["calibration_checks"]] == [t[0] for t in texts]


def test_replays_that_ended_otherwise_and_the_idle_power_are_named(tmp_path, capsys):
    table = fake.rows(3, reps=2, mode="replay", recording_source="authored", unscored=0)
    for r in table[:2]:
        r |= {"flags": "idle_drift;outcome_differs", "quality": "idle moved; ended otherwise", "idle_source": "batch", "idle_w": 118.0}
    _, out = run(tmp_path, table)
    said, page = capsys.readouterr().out, (out / "report.html").read_text()
    top = page[: page.index('class="answer"')]
    assert "2 of 12 replays ended otherwise than the recording says" in said and "2 of 12 replays ended otherwise" in top
    assert "118 W (the calibration's, moved to the batch's own baseline; 2 runs), 120 W (of the calibration; 10 runs)" in said
    assert "2 × <code>outcome_differs</code>: ended otherwise" in page
    group = json.loads((out / "summary.json").read_text())["groups"][0]
    assert group["outcome_differs"] == {"replays": 12, "differ": 2} and [p["runs"] for p in group["idle_w"]] == [2, 10]


def page_text(out):
    return html.unescape(re.sub("<[^>]*>", "", (out / "report.html").read_text()))


def test_shares_stand_beside_the_idle_share_and_whose_time_commands_have(tmp_path, capsys):
    table = [r | {"model": "m-random"} for r in fake.rows(10, reps=1, domains=("gpu",), unscored=0)]
    for r in table[:4]:
        r |= {"split_source": "trajectory", "flags": "recording_missing;requested_durations"}
    table[4]["flags"] = "requested_durations"
    _, out = run(tmp_path, table)
    said, page = capsys.readouterr().out, page_text(out)
    idle = sum(r["gpu_idle_j"] for r in table) / sum(r["total_j"] for r in table)
    group = json.loads((out / "summary.json").read_text())["groups"][0]
    assert group["shares"]["idle_share"] == pytest.approx(idle) and group["requested_durations"] == {"trajectories": 5, "of": 20}
    for text in (said, page):
        assert re.search(rf"{100 * idle:.0f} % of the energy \(95 % interval \d+ to \d+ %\) is idle power times time: what the GPU draws though", text)
        assert "commands and waiting is what the loaded, idle GPU draws (120 W there, idle power 120 W)" in text
        assert "CPU energy was not measured on this machine; it is not in these totals" in text
        assert "the time that the agent asked for, in 5 of 20 trajectories" in text
    assert "In 5 of 20 trajectories the time of commands" in page and "CPU counters include" not in page
    assert "m-random (its weights are random)" in page and "its other time being known" in page
    tiles = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>', (out / "report.html").read_text())
    assert ["95 % interval" in words for _, words in tiles] == [True, True, True, False], tiles  # a median has none


def test_a_gpu_that_is_busy_outside_of_calls_and_counters_of_the_cpu_are_told_as_they_are(tmp_path):
    table = fake.rows(3, reps=1, unscored=0)
    for r in table:
        r["idle_w"] = 80.0
    _, out = run(tmp_path, table)
    page = page_text(out)
    assert "During commands and waiting the GPU drew 120 W, against an idle power of 80 W." in page
    assert "what the GPU and CPU draw though nothing runs" in page
    assert "CPU counters include everything" in page and "CPU energy was not measured" not in page and "agent asked for" not in page


def test_closure_is_told_with_and_without_stalled_calls_and_for_time(tmp_path, capsys):
    table = fake.rows(6, reps=2, unscored=0)
    for i, r in enumerate(table):
        r |= {"closure_model_above_idle": 0.02, "closure_time": -0.03}
        if i == 0:
            r |= {"closure_model_above_idle": 0.5, "closure_time": -0.9, "flags": "stalled_call"}
    _, out = run(tmp_path, table)
    said, page = capsys.readouterr().out, page_text(out)
    group = json.loads((out / "summary.json").read_text())["groups"][0]
    assert group["stalled_call"] == 1 and group["trajectories"] == 24
    for name, value, off in (("model_above_idle", 0.02, 0.5), ("time", -0.03, -0.9)):
        both, without = f"closure_{name}", f"closure_{name}_without_stalled_calls"
        assert (group[f"{both}_n"], group[f"{without}_n"]) == (24, 23) and group[f"{both}_median"] == group[f"{without}_median"] == value
        assert group[f"{both}_mean_abs"] == pytest.approx((23 * abs(value) + abs(off)) / 24) and group[f"{without}_mean_abs"] == pytest.approx(abs(value))
    assert "1 of 24 trajectories had a call that took over twice as long" in page
    assert "median −3.0 % and mean size 6.6 % (n = 24) with, median −3.0 % and mean size 3.0 % (n = 23) without" in page
    assert "1 trajectory with a stalled call" in said and re.search(r"closure error +median −3.0 %.*time of the model calls", said)


def test_numbers_side_by_side_have_one_unit():
    assert ev.report.joule_range(908, 1090) == "0.908 to 1.09 kJ"
    assert ev.report.span({"x_lo": 900.0, "x_hi": 2e6}, "x", ev.report.joules) == "0.000900 to 2.00 MJ"


def test_policies_are_compared_on_the_tasks_that_both_have(tmp_path):
    table = [attempt(f"t{i}", True, 1000 + i) for i in range(6)] + [attempt(f"t{i}", True, 2000 + i, "summarize-8k") for i in range(1, 8)]
    _, out = run(tmp_path, table)
    row = next(r for r in read(out / "configs.csv") if r["policy"] == "summarize-8k")
    assert (row["reference_policy"], row["paired_tasks"]) == ("summarize-off", "5")
    assert "each task counting once (the means of the table count each trajectory once)" in (out / "report.html").read_text()
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
    assert "column task: found an empty cell, expected a name" in error(capsys, tmp_path, with_cell("task", ""))
    assert "total_domains" in error(capsys, tmp_path, with_cell("total_domains", ""))
    for column, value, expected in (
        ("total_domains", "gpu+tpu", "gpu, cpu, dram (numbered or not), joined by +, or an empty cell"),
        ("est_domains", "joule", "gpu, cpu, dram"),
        ("gpu_source", "guess", "nvml, nvml-power, estimated"),
        ("cpu_source", "none", "the source of the energy that total_j sums"),
        ("mode", "dream", "live or replay"),
        ("recording_source", "heard", "authored or recorded or an empty cell"),
        ("attribution", "mine", "exclusive or shared"),
        ("split_source", "coin", "recording or agent_log"),
        ("idle_source", "coin", "calibration or batch"),
        ("rep", "x", "the number of the repetition, 1 or more"),
        ("rep", "0", "1 or more"),
        ("concurrency", "many", "a whole number, 1 or more"),
        ("calls", "-1", "0 or more"),
        ("calls", "2.5", "a whole number"),
        ("first1_total_j", "-1", "0 or more"),
        ("coverage", "2", "a share from 0 to 1"),
        ("total_j", "nan", "a number or an empty cell"),
        ("model_s", "1e9", "the sum of model_s + command_s + waiting_s"),
        ("cached_tokens", "1", "the sum of cached_tokens + uncached_tokens"),
        ("gpu_model_j", "0", "the sum of gpu_model_j + gpu_command_j + gpu_waiting_j"),
        ("total_j", "1", "the sum of gpu_total_j + cpu_total_j"),
    ):
        said = error(capsys, tmp_path, with_cell(column, value))
        assert expected in said, said
        if "sum" not in expected:
            assert f"trials.csv: row 1, column {column}: found " in said and value in said, said
    assert "row 1: found" in error(capsys, tmp_path, f"{header}\na,b\n{first}\n")
    assert "more than once" in error(capsys, tmp_path, f"{with_cell('waiting_s', '')}{first}\n")
    assert "UTF-8" in error(capsys, tmp_path, b"\xff\xfe" + good.encode())
    assert ev.main(["--trials", str(tmp_path / "none.csv"), "--out", str(tmp_path / "out")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_what_is_named_on_the_command_line_must_be_there_and_make_sense(tmp_path, capsys):
    good = fake.write(tmp_path / "good.csv", fake.rows(2, reps=1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/params.json").write_text("{}")
    (tmp_path / "plan.csv").write_text("order,task,policy,rep,mode,recording\n1,a,p,x,live,\n")
    (tmp_path / "waste.csv").write_text("trajectory,set_aside,reason,seconds,energy_j,domains,sources\na__p__r1,x,y,3,-5,gpu0,nvml\n")
    for option, value, said in (
        ("--calib", "nope", "03_calibrate.sh or calibrate.py --out-dir"),
        ("--calib", tmp_path / "empty", "found no hardware, model, idle, energy, checks"),
        ("--plan", tmp_path / "none.csv", "none.csv: cannot read the plan"),
        ("--plan", tmp_path / "plan.csv", "row 1, column rep: found 'x', expected the number of the repetition"),
        ("--waste", tmp_path / "none.csv", "none.csv: cannot read the waste.csv"),
        ("--waste", tmp_path / "waste.csv", "row 1, column energy_j: found -5, expected 0 or more"),
        ("--out", good, "good.csv: cannot be made a folder"),
    ):
        assert ev.main(["--trials", str(good), "--out", str(tmp_path / "out"), option, str(value)]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
    for option, value in (("--carbon", "-3"), ("--carbon", "nan"), ("--price", "inf"), ("--price", "x"), ("--pue", "0.9")):
        with pytest.raises(SystemExit) as e:
            ev.main(["--trials", str(good), "--out", str(tmp_path / "out"), "--carbon", "1", option, value])
        assert e.value.code == 2 and option in capsys.readouterr().err
    assert not (tmp_path / "out/report.html").exists()


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


def test_the_first_example_of_the_help_is_the_readmes_command(capsys, repo):
    with pytest.raises(SystemExit):
        ev.main(["--help"])
    said = capsys.readouterr().out
    first = re.search(r"python evaluate.py (?:.*\\\n)*.*", said).group()
    readme = " ".join((repo / "README.md").read_text().replace("\\\n", " ").split())
    assert " ".join(first.replace("\\\n", " ").split()) in readme  # what the help shows first can be run as it stands


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
