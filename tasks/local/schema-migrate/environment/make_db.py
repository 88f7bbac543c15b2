"""make_db.py FILE SEED: an old database. Only random() is used, whose sequence is the same in every Python."""

import random
import sqlite3
import sys

R = random.Random(int(sys.argv[2]))
FIRST = [
    "Anna", "Ben", "Clara", "David", "Eva", "Finn", "Greta", "Hugo", "Ida", "Jonas",
    "Klara", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Tim", "Uta", "Viktor",
]  # fmt: skip
LAST = [
    "Abel", "Brandt", "Conrad", "Dietz", "Ebert", "Franke", "Graf", "Hahn", "Ihle", "Jung",
    "Keller", "Lenz", "Maurer", "Nagel", "Otto", "Pohl", "Roth", "Sauer", "Thiel", "Vogt",
]  # fmt: skip
CITIES = ["80331 München", "04109 Leipzig", "50667 Köln", "Husum", " 20095 Hamburg ", "", "99084 Erfurt", "Bad Tölz"]
HALLS = ["North Hall", "north hall", "Pool", "POOL ", "Climbing", "Court 2", "court 2", " North Hall"]


def pick(seq):
    return seq[int(R.random() * len(seq))]


def number(low, high):
    return low + int(R.random() * (high - low + 1))


def date(first, last):
    y, m, d = number(first, last), number(1, 12), number(1, 28)
    return pick([f"{y}-{m:02d}-{d:02d}", f"{d:02d}.{m:02d}.{y}", f"{m}/{d}/{y}", f" {y}-{m:02d}-{d:02d}"])


def phone():
    n = f"{number(100, 999)}{number(10000, 999999)}"
    return pick([f"0{n[:3]} {n[3:]}", f"+49 ({n[:3]}) {n[3:]}", f"0043-{n[:3]}-{n[3:]}", f"0{n[:3]}-{n[3:]}", f"0{n}", n[:4]])


def fee():
    return pick(["12,50 EUR", "12.50", "9 EUR", "free", "1.250,00 EUR", "25", "7,90 EUR", "1,250.00", "Free", "45.00 EUR"])


members, visits = [], []
for n in range(1, 61):
    phones = [phone() for _ in range(number(0, 3))]
    if phones and R.random() < 0.2:
        phones.append(phones[0])
    name, born = f"{pick(LAST)}, {pick(FIRST)}", date(1940, 2012)
    members.append([f"M-{n:04d}", name, born, pick(["; ", ";", " / "]).join(phones), pick(CITIES), fee(), date(1985, 2024)])
BAD = [
    (2, ""), (2, "31.02.1980"), (2, "13/5/1977"), (6, ""), (6, "30.02.2001"),
    (6, "2003"), (5, "ask Uta"), (5, ""), (5, "12,5 EUR"), (6, "2/30/1999"),
]  # fmt: skip
for column, bad in BAD:
    members[number(0, 59)][column] = bad
for k in (12, 30, 47):
    members.insert(k + 6, [members[k][0], *members[k + 5][1:]])
for k in (3, 9, 21):
    members[k + 20][1] = members[k][1]
accepted_like = [m[0] for m in members] + [m[1] for m in members]
for _ in range(150):
    who = pick(accepted_like) if R.random() < 0.94 else pick(["M-0999", "Nobody, Nora", "M-12b"])
    minutes = pick(["90", "60", "45", "1h30", "1h", "2:15", "0:50", "1h05", "0", "ninety", "1:75"]) if R.random() < 0.5 else str(number(20, 180))
    visits.append([date(2023, 2024) if R.random() < 0.97 else "29.02.2023", f" {who}" if R.random() < 0.1 else who, pick(HALLS), minutes])
db = sqlite3.connect(sys.argv[1])
db.execute("CREATE TABLE members (no TEXT, name TEXT, born TEXT, phones TEXT, place TEXT, fee TEXT, joined TEXT)")
db.execute("CREATE TABLE visits (day TEXT, member TEXT, hall TEXT, minutes TEXT)")
db.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?)", members)
db.executemany("INSERT INTO visits VALUES (?, ?, ?, ?)", visits)
db.commit()
