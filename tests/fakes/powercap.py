"""A powercap tree as Linux shows it, with counters that a thread moves.

    tree = Powercap(tmp_path / "powercap").package(0, watts=30, dram_watts=4).package(0, mmio=True).psys()
    tree.tick(0.1)            # 0.1 s of energy, wraps included
    with tree.running():      # or in real time
        ...
"""

import contextlib
import os
import threading
import time
from pathlib import Path

RANGE_UJ = 262_143_328_850  # max_energy_range_uj of a Xeon


class Powercap:
    def __init__(self, root):
        self.root, self.zones = Path(root), {}
        self.root.mkdir(parents=True)

    def zone(self, path, name, watts, start_uj=1_000_000, range_uj=RANGE_UJ, follows=None):
        """A zone folder; `follows`: another zone whose counter it shows."""
        folder = self.root / path
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        if range_uj is not None:
            (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        (folder / "constraint_0_name").write_text("long_term\n")
        (folder / "constraint_0_power_limit_uw").write_text("250000000\n")
        self.zones[path] = {"uj": float(start_uj), "watts": watts, "range": range_uj or RANGE_UJ, "follows": follows}
        self._write(path)
        return self

    def package(self, number, watts=30.0, dram_watts=None, mmio=False, name=None, at=None, **kw):
        kind = "intel-rapl-mmio" if mmio else "intel-rapl"
        at = number if at is None else at
        self.zone(f"{kind}:{at}", name or f"package-{number}", watts, **kw)
        if dram_watts is not None:
            self.zone(f"{kind}:{at}:0", "dram", dram_watts, **{**kw, "follows": None})
        return self

    def psys(self, at=9, watts=80.0):
        return self.zone(f"intel-rapl:{at}", "psys", watts)

    def _write(self, path):
        zone = self.zones[path]
        shown = self.zones[zone["follows"]]["uj"] if zone["follows"] else zone["uj"]
        tmp = self.root / path / ".energy"
        # in place, as the kernel does: readers keep the file open
        target = self.root / path / "energy_uj"
        if not target.exists():
            tmp.write_text("0\n")
            os.replace(tmp, target)
        with open(target, "r+b", buffering=0) as f:
            f.write(f"{int(shown):020d}\n".encode())

    def tick(self, seconds):
        for path, zone in self.zones.items():
            zone["uj"] = (zone["uj"] + zone["watts"] * seconds * 1e6) % zone["range"]
            self._write(path)

    @contextlib.contextmanager
    def running(self, period_s=0.005):
        stop, last = threading.Event(), time.monotonic()

        def loop():
            nonlocal last
            while not stop.wait(period_s):
                now = time.monotonic()
                self.tick(now - last)
                last = now

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
