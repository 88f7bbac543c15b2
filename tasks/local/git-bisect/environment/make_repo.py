"""Builds /app/units: 39 commits with fixed names and dates, so that their ids are the same everywhere."""

import os
import pathlib
import subprocess

root = pathlib.Path("/app/units")
root.mkdir(parents=True)
n = 0


def git(*args):
    stamp = f"2025-0{1 + n // 28}-{1 + n % 28:02d} 09:30:00 +0100"
    who = {"GIT_AUTHOR_NAME": "Kim", "GIT_AUTHOR_EMAIL": "kim@example.org", "GIT_COMMITTER_NAME": "Kim", "GIT_COMMITTER_EMAIL": "kim@example.org"}
    subprocess.run(["git", "-c", "gc.auto=0", *args], cwd=root, check=True, env={**os.environ, **who, "GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp})


def commit(message):
    global n
    n += 1
    git("add", "-A")
    git("commit", "-q", "-m", message)


UNITS = """# name = factor to the base unit of its kind
[length]
m = 1
km = 1000
cm = 0.01
ft = 0.3048
in = 0.0254
yd = 0.9144
mi = 1609.344
nmi = 1852
[mass]
kg = 1
g = 0.001
lb = 0.45359237
[time]
s = 1
min = 60
h = 3600
"""
PROGRAM = '''"""units.py VALUE FROM TO: converts between units of the same kind."""

import sys

import table
import show


def convert(value, source, target):
    """Raises KeyError for an unknown unit, ValueError for units of different kinds."""
    a, b = table.find(source), table.find(target)
    if a.kind != b.kind:
        raise ValueError(f"{source} is {a.kind}, {target} is {b.kind}")
    return value * a.factor / b.factor


def main(argv):
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(show.number(convert(float(argv[0]), argv[1], argv[2])))
    except (KeyError, ValueError) as fault:
        print(f"units: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
'''
TABLE = '''"""Reads units.txt once."""

import collections
import pathlib

Unit = collections.namedtuple("Unit", "kind factor")
FILE = pathlib.Path(__file__).parent / "units.txt"


def load():
    kind, units = None, {}
    for line in FILE.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("["):
            kind = line.strip("[]")
        elif line:
            name, factor = line.split("=")
            units[name.strip()] = Unit(kind, float(factor))
    return units


UNITS = load()


def find(name):
    return UNITS[name]
'''
SHOW = '''"""How numbers are printed."""


def number(x):
    return f"{x:.6g}"
'''
TEST = '''import unittest

import show
import units


class Tests(unittest.TestCase):
    def test_length(self):
        self.assertAlmostEqual(units.convert(1, "ft", "m"), 0.3048)
        self.assertAlmostEqual(units.convert(1, "km", "m"), 1000)

    def test_kinds(self):
        with self.assertRaises(ValueError):
            units.convert(1, "m", "kg")

    def test_number(self):
        self.assertEqual(show.number(2.5), "2.5")


if __name__ == "__main__":
    unittest.main()
'''


def write(name, text):
    (root / name).write_text(text)


def change(name, old, new):
    text = (root / name).read_text()
    assert text.count(old) == 1, (name, old)
    write(name, text.replace(old, new))


git("init", "-q", "-b", "main", ".")
write("units.txt", UNITS)
write("units.py", PROGRAM)
write("table.py", TABLE)
write("show.py", SHOW)
commit("Convert lengths, masses and times")
write("test_units.py", TEST)
commit("Tests")
write("README", "units.py VALUE FROM TO\n")
commit("README")
write(".gitignore", "__pycache__/\n")
commit("Ignore compiled files")
git("tag", "v1.0")


def unit(kind, name, factor):
    change("units.txt", f"[{kind}]\n", f"[{kind}]\n{name} = {factor}\n")
    commit(f"Add {name}")


unit("time", "d", 86400)
unit("mass", "oz", 0.028349523125)
unit("mass", "t", 1000)
change("README", "units.py VALUE FROM TO\n", "units.py VALUE FROM TO\n\nThe units stand in units.txt.\n")
commit("README: where the units are")
unit("time", "week", 604800)
unit("length", "mm", 0.001)
write("units.txt", (root / "units.txt").read_text() + "[area]\nm2 = 1\nha = 10000\n")
commit("Areas")
unit("area", "acre", 4046.8564224)
change("show.py", '    return f"{x:.6g}"\n', '    text = f"{x:.6g}"\n    return text[:-2] if text.endswith(".0") else text\n')
commit("Print whole numbers without a fraction")
unit("length", "um", 0.000001)
unit("area", "km2", 1000000)
change(
    "table.py",
    "def find(name):\n    return UNITS[name]\n",
    'def find(name):\n    if name not in UNITS:\n        raise KeyError(f"unknown unit {name}")\n    return UNITS[name]\n',
)
commit("Say which unit is unknown")
unit("mass", "mg", 0.000001)
# a commit that does not run, mended four commits later
change("units.py", "import show\n", "import show\nimport aliases\n")
change("units.py", "table.find(source), table.find(target)", "table.find(aliases.name(source)), table.find(aliases.name(target))")
commit("Long names: mile, metre, pound")
unit("length", "ly", 9460730472580800)
unit("time", "ms", 0.001)
unit("length", "au", 149597870700)
write(
    "aliases.py",
    '"""Long names of units."""\n\nLONG = {"mile": "mi", "metre": "m", "pound": "lb", "inch": "in"}\n\n\n'
    "def name(text):\n    return LONG.get(text.lower(), text)\n",
)
commit("The file that was forgotten")
change("README", "The units stand in units.txt.\n", "The units stand in units.txt, long names in aliases.py.\n")
commit("README: long names")
unit("mass", "st", 6.35029318)
# the guilty one: thousands are cut off where a factor has four digits before the dot
change(
    "table.py",
    "            name, factor = line.split(\"=\")\n            units[name.strip()] = Unit(kind, float(factor))\n",
    "            name, factor = (part.strip() for part in line.split(\"=\"))\n            factor, _, comment = factor.partition(\";\")\n"
    "            units[name] = Unit(kind, round(float(factor), 9 if float(factor) < 1000 else -1))\n",
)
change("units.txt", "# name = factor to the base unit of its kind\n", "# name = factor to the base unit of its kind ; where it is from\n")
commit("Factors may name their source")
unit("length", "fathom", "1.8288 ; Royal Navy")
unit("time", "year", "31557600 ; Julian")
change("show.py", '    text = f"{x:.6g}"\n', '    if x != x:\n        return "not a number"\n    text = f"{x:.6g}"\n')
commit("Print not a number in words")
unit("area", "ft2", 0.09290304)
write("units.txt", (root / "units.txt").read_text() + "[volume]\nl = 1\nml = 0.001\ngal = 3.785411784\n")
commit("Volumes")
unit("volume", "pint", 0.473176473)
change("aliases.py", '"inch": "in"', '"inch": "in", "litre": "l", "gallon": "gal"')
commit("Long names of volumes")
unit("volume", "cup", 0.2365882365)
change(
    "test_units.py",
    '        self.assertEqual(show.number(2.5), "2.5")\n',
    '        self.assertEqual(show.number(2.5), "2.5")\n        self.assertEqual(show.number(4.0), "4")\n',
)
commit("Test of whole numbers")
unit("length", "furlong", 201.168)
change("README", "long names in aliases.py.\n", "long names in aliases.py.\nWhat stands behind a semicolon says where a factor is from.\n")
commit("README: sources")
unit("mass", "ct", 0.0002)
unit("time", "fortnight", 1209600)
change(
    "units.py",
    "    if len(argv) != 3:\n",
    '    if argv[:1] == ["--list"]:\n        print(*sorted(table.UNITS))\n        return 0\n    if len(argv) != 3:\n',
)
commit("--list")
git("config", "user.name", "Robin")
git("config", "user.email", "robin@example.org")
