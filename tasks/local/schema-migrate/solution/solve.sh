#!/bin/bash
cat >/app/club/migrate.py <<'PY'
"""migrate.py OLD NEW: moves the club's database to schema.sql by the rules in RULES.md."""

import datetime
import pathlib
import re
import sqlite3
import sys


def date(text):
    for pattern, order in ((r"(\d{4})-(\d\d?)-(\d\d?)", (1, 2, 3)), (r"(\d\d?)\.(\d\d?)\.(\d{4})", (3, 2, 1)), (r"(\d\d?)/(\d\d?)/(\d{4})", (3, 1, 2))):
        if m := re.fullmatch(pattern, text):
            try:
                return datetime.date(*(int(m[i]) for i in order)).isoformat()
            except ValueError:
                return None
    return None


def cents(text):
    text = re.sub(r"\s*EUR$", "", text)
    if text.lower() == "free":
        return 0
    m = re.fullmatch(r"(\d{1,3}(?:[.,]\d{3})+|\d+)(?:[.,](\d\d))?", text)
    return int(re.sub(r"\D", "", m[1])) * 100 + int(m[2] or 0) if m else None


def numbers(text):
    for part in re.split("[;/]", text):
        n = re.sub(r"[\s()-]", "", part)
        n = "+" + n[2:] if n.startswith("00") else "+49" + n[1:] if n.startswith("0") else n
        if re.fullmatch(r"\+\d{7,15}", n):
            yield n


def minutes(text):
    if text.isdigit():
        return int(text)
    m = re.fullmatch(r"(\d+)(?:h([0-5]?\d)?|:([0-5]\d))", text)
    return int(m[1]) * 60 + int(m[2] or m[3] or 0) if m else 0


old_path, new_path = map(pathlib.Path, sys.argv[1:])
new_path.unlink(missing_ok=True)
old = sqlite3.connect(f"file:{old_path}?mode=ro", uri=True)
new = sqlite3.connect(new_path)
new.executescript((pathlib.Path(__file__).parent / "schema.sql").read_text())
reject = lambda *row: new.execute("INSERT INTO reject VALUES (?, ?, ?)", row)  # noqa: E731
ids, names = set(), {}
for row in old.execute("SELECT no, name, born, phones, place, fee, joined FROM members ORDER BY rowid"):
    no, name, born, phones, place, fee, joined = ((c or "").strip() for c in row)
    n, joined, fee = int(no[2:]), date(joined), cents(fee)
    if n in ids or joined is None or fee is None:
        reject("members", no, "duplicate" if n in ids else "joined" if joined is None else "fee")
        continue
    ids.add(n)
    last, first = (p.strip() for p in name.split(",", 1))
    names.setdefault((last, first), []).append(n)
    m = re.fullmatch(r"(?:(\d{5})\s+)?(.*)", place)
    new.execute("INSERT INTO person VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (n, first, last, date(born), m[1], m[2] or None, joined, fee))
    new.executemany("INSERT INTO phone VALUES (?, ?)", [(n, p) for p in dict.fromkeys(numbers(phones))])
halls = {}
for rowid, *row in old.execute("SELECT rowid, day, member, hall, minutes FROM visits ORDER BY rowid"):
    day, member, hall, spent = ((c or "").strip() for c in row)
    if m := re.fullmatch(r"M-(\d+)", member):
        who = [int(m[1])] if int(m[1]) in ids else []
    else:
        who = names.get(tuple(p.strip() for p in member.split(",", 1)), [])
    if len(who) != 1 or not minutes(spent) or not date(day):
        reason = "unknown" if not who else "ambiguous" if len(who) > 1 else "minutes" if not minutes(spent) else "day"
        reject("visits", str(rowid), reason)
        continue
    if hall.casefold() not in halls:
        halls[hall.casefold()] = new.execute("INSERT INTO hall (name) VALUES (?)", (hall,)).lastrowid
    new.execute("INSERT INTO visit VALUES (?, ?, ?, ?)", (who[0], halls[hall.casefold()], date(day), minutes(spent)))
new.commit()
PY
cd /app/club && python3 migrate.py old.db new.db
