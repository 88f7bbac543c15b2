"""Writes /app/logs: three logs of the same 118 requests. Only random() is used, whose sequence is the same in every Python."""

import datetime as dt
import os
import random

R = random.Random(20250602)
OFFSET_S = -43  # the database's clock, against the others
START = dt.datetime(2025, 6, 2, 6, 0, tzinfo=dt.timezone.utc)  # noqa: UP017 (Python 3.10 runs it, too)
CEST = dt.timezone(dt.timedelta(hours=2))
ROUTES = ["GET /cart", "POST /cart", "GET /item", "POST /order", "GET /search", "POST /pay"]
TENANTS = ["acme", "borealis", "cobalt", "delta"]
TRACES = {
    "KeyError": ("basket.py", "KeyError: 'basket'"),
    "PriceMismatch": ("price.py", "shop.errors.PriceMismatch: 12.40 != 12.90"),
    "TimeoutError": ("payment.py", "TimeoutError: no answer from payment provider within 5 s"),
    "JSONDecodeError": ("body.py", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
}
# what goes wrong with the n-th request: (status, cause); cause also for requests that end well, as a trap
PLAN = {
    7: (500, "KeyError"), 15: (503, "unreached"), 22: (500, "lock"), 27: (200, "lock"), 33: (500, "deadlock"), 38: (500, "TimeoutError"),
    44: (200, "deadlock"), 51: (500, "PriceMismatch"), 52: (500, "lock"), 60: (502, "unreached"), 66: (500, "lock+deadlock"),
    71: (404, "ok"), 77: (500, "JSONDecodeError"), 83: (500, "shortlock+KeyError"), 90: (504, "lock"), 96: (503, "unreached"),
    101: (500, "deadlock+PriceMismatch"), 109: (500, "TimeoutError"), 113: (200, "lock"),
}  # fmt: skip


def pick(seq):
    return seq[int(R.random() * len(seq))]


def ms(low, high):
    return dt.timedelta(milliseconds=low + int(R.random() * (high - low)))


gateway, app, db = [], [], []


def say(t, worker, text):
    app.append((t, f"{t.astimezone(CEST):%d.%m.%Y %H:%M:%S},{t.microsecond // 1000:03d} [w{worker}] {text}"))


def db_say(t, text):
    seen = t + dt.timedelta(seconds=OFFSET_S)
    db.append((t, f"{seen.timestamp():.3f} {text}"))


query, t = 61, START
for n in range(118):
    t += ms(4000, 31000)
    req, route, tenant, worker = f"{int(R.random() * 0xFFFF):04x}", pick(ROUTES), pick(TENANTS), 1 + int(R.random() * 4)
    status, cause = PLAN.get(n, (200, "ok"))
    now = t + ms(2, 9)
    if cause != "unreached":
        say(now, worker, f"INFO  start req={req} tenant={tenant} {route}")
        queries = 1 + int(R.random() * 3)
        for k in range(queries):
            now += ms(3, 40)
            say(now, worker, f"DEBUG req={req} sent q={query:02d}")
            db_say(now + ms(1, 4), f"q={query:02d} recv {pick(['select', 'select', 'update', 'insert'])} {pick(['items', 'baskets', 'orders', 'prices'])}")
            now += ms(5, 90)
            last = k == queries - 1
            if "lock" in cause.split("+") and k == 0:
                wait = 1200 + int(R.random() * 3000)
                now += dt.timedelta(milliseconds=wait)
                db_say(now, f"q={query:02d} waited {wait} ms for a lock on baskets")
            if "shortlock" in cause and k == 0:
                now += dt.timedelta(milliseconds=640)
                db_say(now, f"q={query:02d} waited 640 ms for a lock on baskets")
            if "deadlock" in cause and last:
                db_say(now, f"q={query:02d} deadlock detected, rolled back")
            else:
                db_say(now, f"q={query:02d} done rows={int(R.random() * 40)}")
            query = (query + 1) % 100
        now += ms(2, 20)
        failed = next((name for name in TRACES if name in cause), None)
        if failed is None and status >= 500:
            say(now, worker, f"ERROR req={req} unhandled")
            app.append((now, '  File "/srv/shop/db.py", line 88, in run'))
            app.append((now, "shop.errors.DatabaseGaveUp: query failed or too late"))
        elif failed:
            say(now, worker, f"ERROR req={req} unhandled")
            app.append((now, f'  File "/srv/shop/{TRACES[failed][0]}", line {20 + int(R.random() * 90)}, in handle'))
            app.append((now, TRACES[failed][1]))
        else:
            if "deadlock" in cause:
                say(now, worker, f"WARN  req={req} deadlock, second attempt without locks went well")
            say(now, worker, f"INFO  end req={req} {status}")
    done = now + ms(1, 5)
    took = int((done - t).total_seconds() * 1000)
    gateway.append((t, f"{t:%Y-%m-%dT%H:%M:%S}.{t.microsecond // 1000:03d}Z gw{1 + n % 2} req={req} {route} {status} {took}ms"))
    if n % 29 == 17:
        gateway.append((done, f"{done:%Y-%m-%dT%H:%M:%S}.{done.microsecond // 1000:03d}Z gw{1 + n % 2} health ok"))

os.makedirs("/app/logs", exist_ok=True)
for name, lines in (("gateway", gateway), ("app", app), ("db", db)):
    with open(f"/app/logs/{name}.log", "w") as f:
        f.writelines(text + "\n" for _, text in sorted(lines, key=lambda pair: pair[0]))
