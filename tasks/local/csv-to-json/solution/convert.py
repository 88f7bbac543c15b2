"""convert.py IN.csv OUT.json REJECTS.csv"""

import csv
import datetime
import json
import re
import sys

HEADER = ["sku", "name", "price", "stock", "tags", "updated"]


def sku(text):
    text = re.sub(r"\s", "", text).upper()
    if not re.fullmatch(r"[A-Z]{2}-[0-9]{4}", text):
        raise ValueError("sku")
    return text


def name(text):
    if not text.split():
        raise ValueError("name")
    return " ".join(text.split())


def price(text):
    text = re.sub(r"^(€|EUR)|(€|EUR)$", "", text.strip()).strip()
    for point, comma in ((",", r"\."), (r"\.", ",")):
        if m := re.fullmatch(rf"(\d{{1,3}}(?:{comma}\d{{3}})+|\d+)(?:{point}(\d{{1,2}}))?", text):
            return int(re.sub(r"\D", "", m[1])) * 100 + int((m[2] or "0").ljust(2, "0"))
    raise ValueError("price")


def stock(text):
    if text.strip() and not re.fullmatch(r"[+-]?\d+", text.strip()):
        raise ValueError("stock")
    return int(text) if text.strip() else None


def tags(text):
    return list(dict.fromkeys(t for t in (t.strip().lower() for t in re.split("[,|]", text)) if t))


def updated(text):
    m = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", text.strip())
    d = None if m else re.fullmatch(r"(\d\d)\.(\d\d)\.(\d{4})", text.strip())
    try:
        return datetime.date(*map(int, m.groups() if m else d.groups()[::-1])).isoformat()
    except (ValueError, AttributeError):
        raise ValueError("updated") from None


good, rejects = {}, []
with open(sys.argv[1], encoding="utf-8", newline="") as f:
    reader = csv.reader(f, delimiter=";")
    begin = 1
    for row in reader:
        line, begin = begin, reader.line_num + 1
        if not row or row == HEADER:
            continue
        try:
            if len(row) != len(HEADER):
                raise ValueError("fields")
            # in the order in which reasons apply
            product = {
                "sku": sku(row[0]), "name": name(row[1]), "price_cents": price(row[2]), "stock": stock(row[3]), "tags": tags(row[4]),
                "updated": updated(row[5]),
            }  # fmt: skip
        except ValueError as reason:
            rejects.append((line, reason))
            continue
        if product["sku"] not in good or product["updated"] >= good[product["sku"]]["updated"]:
            good[product["sku"]] = product
with open(sys.argv[2], "w", encoding="utf-8") as f:
    json.dump([good[k] for k in sorted(good)], f, indent=1, ensure_ascii=False)
with open(sys.argv[3], "w", newline="") as f:
    csv.writer(f, lineterminator="\n").writerows([("line", "reason"), *rejects])
