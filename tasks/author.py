"""Write the recordings (JSON, for llm_proxy.py --replay) from their readable sources (TOML).

    python tasks/author.py                      # every tasks/recordings/<task>/<nn>-<name>.toml -> .json beside it
    python tasks/author.py --check              # exit 1 if a .json is missing or differs
    python tasks/author.py --table              # tasks/recordings.csv: outcome, calls and reply tokens of each recording

A source is one trajectory of Terminus-2, reply by reply:

    description = "Reads the files, repairs the bug, runs the tests."
    expected_outcome = "success"                # or "fail"
    summary = "..."                             # answers around a context summary, used whenever one is asked for;
    questions = "..."                           # also answers and short_summary
    [[reply]]
    analysis = "..."
    plan = "..."
    run = [["ls -la", 0.2], ["cat stats.py", 0.3]]    # shell lines with the seconds to wait; Enter is added
    keys = [["C-c", 0.2], ["", 5.0]]                  # keystrokes as they are, after the lines of run
    done = true                                       # task_complete; Terminus-2 wants it twice in a row
    [[reply]]
    raw = "not JSON at all"                     # a reply as it is, e.g. one that cannot be parsed
    [[reply]]
    same = "01-solve:1-9"                       # replies 1 to 9 of another recording of the task: where two part ways later

What is written this way is *authored*: energy measured on its replay is real, the behaviour is not a model's.
"""

import argparse
import csv
import json
import re
import sys
import tomllib
from pathlib import Path

RECORDINGS = Path(__file__).resolve().parent / "recordings"
TOKENIZER = RECORDINGS.parent.parent / "models/tokenizer/tokenizer.json"  # SmolLM2's, from 01_setup.sh
TABLE = RECORDINGS.parent / "recordings.csv"
AROUND_SUMMARY = ["summary", "questions", "answers", "short_summary"]


def reply_text(reply, where):
    """The text that the model is to have said. Raises ValueError with the place for an unknown or missing key."""
    if unknown := set(reply) - {"analysis", "plan", "run", "keys", "done", "raw"}:
        raise ValueError(f"{where}: unknown key {min(unknown)!r}; known are analysis, plan, run, keys, done, raw")
    if "raw" in reply:
        return reply["raw"]
    if missing := {"analysis", "plan"} - set(reply):
        raise ValueError(f"{where}: {min(missing)} is missing")
    commands = [{"keystrokes": line + "\n", "duration": wait} for line, wait in reply.get("run", [])]
    commands += [{"keystrokes": keys, "duration": wait} for keys, wait in reply.get("keys", [])]
    out = {"analysis": reply["analysis"].strip(), "plan": reply["plan"].strip(), "commands": commands}
    if reply.get("done"):
        out["task_complete"] = True
    return json.dumps(out, ensure_ascii=False)


def read(source):
    """A TOML source as a dict. Raises ValueError with its name."""
    try:
        return tomllib.loads(source.read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise ValueError(f"{source}: {e}") from None


def replies(source, doc):
    """The texts of a source's replies, in order; `same` is replaced by what it refers to."""
    out = []
    for n, reply in enumerate(doc.get("reply", []), 1):
        where = f"{source}: reply {n}"
        if "same" not in reply:
            out.append(reply_text(reply, where))
            continue
        m = re.fullmatch(r"([\w-]+):([0-9]+)-([0-9]+)", reply["same"])
        if len(reply) > 1 or not m or m[1] >= source.stem:
            raise ValueError(f"{where}: same is {reply['same']!r} beside {len(reply) - 1} keys; expected alone, '<an earlier name>:<first>-<last>'")
        other = source.with_name(f"{m[1]}.toml")
        texts, first, last = replies(other, read(other)), int(m[2]), int(m[3])
        if not 1 <= first <= last <= len(texts):
            raise ValueError(f"{where}: {reply['same']} asks for replies {first} to {last}, {other.name} has {len(texts)}")
        out += texts[first - 1 : last]
    return out


def recording(source):
    """The recording (dict) of a TOML source."""
    source = Path(source)
    doc = read(source)
    if doc.get("expected_outcome") not in ("success", "fail"):
        raise ValueError(f"{source}: expected_outcome is {doc.get('expected_outcome')!r}, expected 'success' or 'fail'")
    calls = [
        {"kind": "agent", "content": text, "messages": None, "completion_tokens": None} for text in replies(source, doc)
    ]
    calls += [
        {"kind": kind, "content": doc[kind].strip(), "messages": None, "completion_tokens": None, "repeat": True}
        for kind in AROUND_SUMMARY
        if kind in doc
    ]
    return {
        "schema": 1,
        "name": source.stem,
        "task": source.parent.name,
        "source": "authored",
        "agent": "terminus-2",
        "model": None,
        "description": doc["description"],
        "expected_outcome": doc["expected_outcome"],
        "calls": calls,
    }


def write_table():
    """tasks/recordings.csv: one row a recording. Calls and tokens are those of the agent's replies, without summaries."""
    from tokenizers import Tokenizer

    if not TOKENIZER.exists():
        print(f"author: {TOKENIZER} is missing; expected SmolLM2's tokenizer there: run `bash 01_setup.sh`", file=sys.stderr)
        return 1
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    with open(TABLE, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["task", "recording", "outcome", "calls", "reply_tokens"])
        for path in sorted(RECORDINGS.glob("*/*.json")):
            doc = json.loads(path.read_text())
            texts = [c["content"] for c in doc["calls"] if c["kind"] == "agent"]
            tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
            out.writerow([doc["task"], doc["name"], doc["expected_outcome"], len(texts), tokens])
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if something would change")
    parser.add_argument("--table", action="store_true", help="write tasks/recordings.csv, too")
    args = parser.parse_args(argv)
    stale = []
    for source in sorted(RECORDINGS.glob("*/*.toml")):
        try:
            text = json.dumps(recording(source), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        except (ValueError, KeyError) as e:
            print(f"author: {e}", file=sys.stderr)
            return 2
        target = source.with_suffix(".json")
        if not target.exists() or target.read_text() != text:
            stale.append(target)
            if not args.check:
                target.write_text(text)
    for target in stale:
        print(f"{target.relative_to(RECORDINGS.parent)}: {'differs from its source' if args.check else 'written'}")
    if args.table and not args.check:
        return write_table()
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
