#!/bin/bash
# Every file of the inbox by content and place, the index, and that the inbox is empty.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import pathlib

expected = {
    "txt/report.TXT": "Quarterly report: revenue up 4 percent.\n",
    "txt/notes.txt": "buy milk, call the plumber\n",
    "txt/meeting notes.txt": "Present: Ada, Grace, Edsger. Agreed: nothing.\n",
    "csv/steps.csv": "day,steps\n1,4200\n2,6100\n",
    "csv/STEPS_OLD.CSV": "day,steps\n1,3900\n",
    "json/settings.json": '{"theme": "dark"}\n',
    "json/app.config.json": "v1.2\n",
    "other/Makefile": "all: ;\n",
    "other/README": "Read me first.\n",
    "md/holiday plan.md": "# Plan\n\n- sort the inbox\n",
}
sorted_dir, inbox = pathlib.Path("/app/sorted"), pathlib.Path("/app/inbox")
assert inbox.is_dir() and not list(inbox.iterdir()), "the inbox is gone or not empty"
found = {str(p.relative_to(sorted_dir)): p.read_text() for p in sorted_dir.rglob("*") if p.is_file() and p.name != "index.txt"}
assert found == expected, f"files differ: {sorted(set(found) ^ set(expected))}"
index = (sorted_dir / "index.txt").read_text()
assert index == "".join(line + "\n" for line in sorted(expected)), f"index.txt is wrong:\n{index}"
print("all 10 files are in place")
PY
