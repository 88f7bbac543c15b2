"""next.py JOBS TIME N: the next N times of every job; see FIELDS.md."""

import datetime
import pathlib
import sys

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
RANGES = [(0, 59, {}), (0, 23, {}), (1, 31, {}), (1, 12, {m: i + 1 for i, m in enumerate(MONTHS)}), (0, 7, {d: i for i, d in enumerate(DAYS)})]


def values(field, low, high, names, around):
    def one(text):
        v = names[text.lower()] if text.lower() in names else int(text) if text.isascii() and text.isdigit() else None
        if v is None or not low <= v <= high:
            raise ValueError(text)
        return v

    out = set()
    for part in field.split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isascii() and step.isdigit() and int(step)):
            raise ValueError(part)
        step = int(step) if slash else 1
        if span == "L" and high == 31 and not slash:
            out.add("L")
            continue
        if span == "*":
            first, last = low, high - (high == 7)
        elif "-" in span:
            first, last = (one(v) for v in span.split("-"))
        else:
            first = one(span)
            last = high if slash else first
        if first > last:
            if not around:
                raise ValueError(part)
            # the week has seven days, the year twelve months
            out |= set(range(first, last + (7 if high == 7 else 12) + 1, step))
        else:
            out |= set(range(first, last + 1, step))
    if high == 7:
        return {v % 7 for v in out}
    return {(v - 1) % 12 + 1 for v in out} if high == 12 else out


def times(fields, start, n):
    texts = fields.split()
    if len(texts) != 5:
        raise ValueError(fields)
    minutes, hours, days, months, weekdays = (values(t, *r, i >= 3) for i, (t, r) in enumerate(zip(texts, RANGES, strict=True)))
    either = not texts[2].startswith("*") and not texts[4].startswith("*")
    out, day, end = [], start.date(), start.replace(year=start.year + 40, day=min(start.day, 28))
    while day <= end.date() and len(out) < n:
        if day.month in months:
            last = (day + datetime.timedelta(1)).month != day.month
            a = day.day in days or (last and "L" in days)
            b = day.isoweekday() % 7 in weekdays
            if (a or b) if either else (a and b):
                at = (datetime.datetime(day.year, day.month, day.day, h, m) for h in sorted(hours) for m in sorted(minutes))
                out += [t for t in at if t > start]
        day += datetime.timedelta(1)
    return out[:n]


start = datetime.datetime.strptime(sys.argv[2], "%Y-%m-%dT%H:%M")
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    if not line.strip() or line.startswith("#"):
        continue
    name, _, fields = line.strip().partition(":")
    try:
        found = times(fields, start, int(sys.argv[3]))
        print(f"{name}:", *(t.strftime("%Y-%m-%dT%H:%M") for t in found) if found else ["never"])
    except ValueError:
        print(f"{name}: error")
