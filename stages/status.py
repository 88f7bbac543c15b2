"""How a batch stands: one line, and a page that a phone can read. Written anew after every trial.

    python stages/status.py --traj data/quickstart/traj --waste data/quickstart/waste.csv --out results/quickstart/status.html

Energy is that of whole trials (set-up, agent, verifier), every counter that may be added. Waste is what attempts used that had to be set
aside (traj_unfinished/ beside the trajectories: killed, or failed for infrastructure reasons); waste.csv has a row for each, none when there
was none, and keeps them when the folders are deleted. evaluate.py gives waste its place among all energy. The time left is
the usual time between the ends of two trials times the trials left, so it holds for shards and concurrent trials too.
"""

import argparse
import html
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stages import csvfiles, plan  # noqa: E402

WASTE = ["trajectory", "set_aside", "reason", "seconds", "energy_j", "domains", "sources"]

ENTRY = {"t_end", "seconds", "joules", "domains", "sources"}  # of a trial in energy.json


def used(folder):
    """(seconds, joules, domains, sources) of everything that was sampled in a trajectory's folder, an equal part of it when several ran at a
    time; joules None when it cannot be known."""
    import numpy as np

    import energylib

    trial = read_object(folder / "trial.json") or read_object(folder / "request.json") or {}
    try:
        together = len((trial.get("shared") or {}).get("members") or [1])
        s = energylib.read_samples(folder / "samples.csv")
        domains = [d for d in s.total_domains if d in s.domains]
        span = np.array([s.t[0]]), np.array([s.t[-1]])
        joules = s.energy(*span).joules
        total = float(sum(joules[d][0] for d in domains)) / together
        return float(span[1][0] - span[0][0]), total if np.isfinite(total) and domains else None, "+".join(domains), "+".join(sorted(set(s.source.values())))
    except (OSError, ValueError, IndexError, AttributeError, TypeError):
        return None, None, "", ""


def read_object(path):
    """The object of a JSON file, None without the file. What else stands there is said and left out: a page must not end a batch."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as e:
        found = e
    if isinstance(found, dict):
        return found
    what = f"no JSON ({found})" if isinstance(found, ValueError) else json.dumps(found)[:40]
    print(f"status: {path}: found {what}, expected an object; left out", file=sys.stderr)
    return None


def read_trial(path):
    """trial.json of a finished trial, None where there is none that can be counted."""
    trial = read_object(path)
    end, reward = (trial or {}).get("t_end"), (trial or {}).get("reward")
    if trial and (not is_number(end or 0) or not is_number(reward or 0)):
        print(f"status: {path}: found t_end {end!r:.40}, reward {reward!r:.40}, expected numbers or null; left out", file=sys.stderr)
        return None
    return trial


def is_number(x):
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < float("inf")


def is_known(entry, trial):
    """Is this what energy.json should say of that trial? Else its samples are read again."""
    if not isinstance(entry, dict) or entry.keys() != ENTRY or entry["t_end"] != trial.get("t_end"):
        return False
    return all(entry[k] is None or is_number(entry[k]) for k in ("seconds", "joules")) and all(isinstance(entry[k], str) for k in ("domains", "sources"))


def read_waste(table):
    """Rows of waste.csv, none without the file. Raises ValueError for one that this program did not write."""
    rows = csvfiles.read(table)
    for number, r in enumerate(rows, 1):
        if lacking := [c for c in WASTE if r.get(c) is None]:
            raise ValueError(f"{table}: row {number}: no {', '.join(lacking)}; expected {','.join(WASTE)}; move the file away to have it made anew")
        try:
            if r["energy_j"] != "" and not 0 <= float(r["energy_j"]) < float("inf"):
                raise ValueError
        except ValueError:
            raise ValueError(f"{table}: row {number}, energy_j: found '{r['energy_j']}', expected joules, 0 or more, or an empty cell") from None
    return rows


def wasted(unfinished, table):
    """Rows of waste.csv, brought up to date: one per folder that is or was in `unfinished`. Folders never change: known ones are not read again."""
    known = {r["set_aside"]: r for r in read_waste(table)}
    found = sorted(p.name for p in unfinished.glob("*") if p.is_dir()) if unfinished.exists() else []
    for name in found:
        if name not in known:
            trial = read_trial(unfinished / name / "trial.json")
            reason = (plan.infra_failure(trial) or "measured, then set aside") if trial else "stopped before its end"
            seconds, joules, domains, sources = used(unfinished / name)
            known[name] = dict(zip(WASTE, [name.rpartition(".")[0], name, reason, rounded(seconds), rounded(joules), domains, sources], strict=True))
    csvfiles.write(table, WASTE, known.values())
    return list(known.values())


def rounded(x):
    return "" if x is None else round(x, 3)


def spacing(ends):
    """Usual seconds between the ends of two trials, pauses left out; None below two."""
    gaps = [b - a for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False) if b > a][-20:]
    if not gaps:
        return None
    usual = [g for g in gaps if g <= 3 * statistics.median(gaps)]
    return sum(usual) / len(usual)


def look(traj, waste_table):
    """Everything that the line and the page say, as a dict."""
    if not (traj / "plan.csv").exists():
        raise ValueError(f"{traj}: no plan.csv in it; expected the folder of a batch's trajectories (06_run_batch.sh)")
    rows = plan.read_plan(traj / "plan.csv")
    cache_path = traj.parent / "batch" / "energy.json"
    cache = read_object(cache_path) or {}
    trials, ends = [], []
    for r in rows:
        name = plan.name(r)
        trial = read_trial(traj / name / "trial.json")
        if not trial:
            continue
        if not is_known(cache.get(name), trial):
            seconds, joules, domains, sources = used(traj / name)
            cache[name] = {"t_end": trial.get("t_end"), "seconds": seconds, "joules": joules, "domains": domains, "sources": sources}
        if trial.get("t_end"):
            ends.append(trial["t_end"])
        trials.append({"name": name, "failure": plan.infra_failure(trial), "reward": trial.get("reward"),
                       "exception": trial.get("exception"), **cache[name]})  # fmt: skip
    csvfiles.replace(cache_path, lambda f: json.dump(cache, f, allow_nan=False))
    failed = [t for t in trials if t["failure"]]
    left = len(rows) - len(trials)
    gap = spacing(ends)
    waste = wasted(traj.parent / "traj_unfinished", waste_table)
    return {
        "planned": len(rows), "measured": len(trials) - len(failed), "failed": failed, "left": left, "left_s": gap * left if gap else None,
        "energy_j": sum(t["joules"] for t in trials if t["joules"] is not None), "sources": sorted({t["sources"] for t in trials if t["sources"]}),
        "unknown": sum(t["joules"] is None for t in trials), "waste": waste, "waste_j": sum(float(r["energy_j"]) for r in waste if r["energy_j"] != ""),
        "trials": sorted(trials, key=lambda t: t["t_end"] or 0),
    }  # fmt: skip


def joules(x):
    return f"{x / 1000:.1f} kJ" if x >= 1000 else f"{x:.0f} J"


def duration(s):
    return f"{s / 3600:.1f} h" if s >= 5400 else f"{s / 60:.0f} min" if s >= 90 else f"{s:.0f} s"


def source_words(sources):
    return ", estimated" if any("model" in s for s in sources) else ""


def line(b):
    text = f"{b['measured']} of {b['planned']} measured, {len(b['failed'])} failed, {b['left']} left; {joules(b['energy_j'])}{source_words(b['sources'])}"
    if b["waste"]:
        text += f"; waste {joules(b['waste_j'])} in {len(b['waste'])} attempt{'s' * (len(b['waste']) != 1)} set aside"
    return text + (f"; about {duration(b['left_s'])} left" if b["left"] and b["left_s"] else "")


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="30"><title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem }}
h1 {{ font-size: 1.2rem }} h2 {{ font-size: 1rem; margin: 1.5rem 0 .3rem }}
.bar {{ display: flex; height: 1rem; border-radius: .3rem; overflow: hidden; background: #8884 }} .bar i {{ background: #2a7 }} .bar b {{ background: #c43 }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .5rem; margin: 1rem 0 }}
dt {{ font-size: .8rem; opacity: .7 }} dd {{ margin: 0; font-size: 1.3rem }}
table {{ border-collapse: collapse; width: 100%; font-size: .85rem }} td {{ padding: .25rem .4rem; border-top: 1px solid #8884; overflow-wrap: anywhere }}
td:nth-child(n+2) {{ text-align: right; white-space: nowrap }} p {{ font-size: .85rem; opacity: .7 }}
</style></head><body><h1>{title}</h1><div class="bar"><i style="width:{measured_pct:.2f}%"></i><b style="width:{failed_pct:.2f}%"></b></div>
<dl>{facts}</dl>{tables}<p>{foot}</p></body></html>
"""


def page(b, title):
    facts = {"planned": b["planned"], "measured": b["measured"], "failed": len(b["failed"]), "left": b["left"],
             "time left": duration(b["left_s"]) if b["left"] and b["left_s"] else "–" if b["left"] else "done",
             "energy so far": joules(b["energy_j"]), "waste": joules(b["waste_j"])}  # fmt: skip
    cells = lambda rows: "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in r) + "</tr>" for r in rows)  # noqa: E731
    tables = ""
    if b["failed"]:
        tables += f"<h2>Failed for infrastructure reasons</h2><table>{cells((t['name'], t['failure']) for t in b['failed'][-20:])}</table>"
    if b["waste"]:
        rows = ((r["trajectory"], r["reason"], joules(float(r["energy_j"])) if r["energy_j"] != "" else "–") for r in b["waste"][-20:])
        tables += f"<h2>Set aside, energy counted as waste</h2><table>{cells(rows)}</table>"
    last = [(t["name"], "not scored" if t["failure"] else f"reward {t['reward']}" if t["reward"] is not None else t["exception"],
             joules(t["joules"]) if t["joules"] is not None else "–") for t in b["trials"][:-11:-1]]  # fmt: skip
    tables += f"<h2>Last trials</h2><table>{cells(last)}</table>" if last else ""
    foot = f"Energy of whole trials{source_words(b['sources'])}. {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}"
    if b["unknown"]:
        foot += f" Without energy: {b['unknown']} of {len(b['trials'])} trials."
    total = max(b["planned"], 1)
    return PAGE.format(title=html.escape(title), measured_pct=100 * b["measured"] / total, failed_pct=100 * len(b["failed"]) / total,
                       facts="".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts.items()), tables=tables, foot=foot)  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--traj", type=Path, required=True)
    p.add_argument("--waste", type=Path, required=True)
    p.add_argument("--out", type=Path, help="the page")
    p.add_argument("--title", default="Trajoule: batch")
    a = p.parse_args()
    try:
        b = look(a.traj, a.waste)
    except (OSError, ValueError) as e:
        print(f"status: {e}", file=sys.stderr)
        sys.exit(2)
    try:
        if a.out:
            csvfiles.replace(a.out, lambda f: f.write(page(b, a.title)))
    except OSError as e:
        print(f"status: {a.out}: {e.strerror}; the page was not written", file=sys.stderr)
    print(line(b))


if __name__ == "__main__":
    main()
