#!/bin/bash
# The texts are known.
mkdir -p /logs/verifier
echo 0 >/logs/verifier/reward.txt
python3 - <<'PY' && echo 1 >/logs/verifier/reward.txt
import pathlib

GERMAN = "Über den Dächern von Köln\nliegt Nebel; die Straße glänzt.\n\n\tMäßig heißer Kaffee für fünf Gäste.\n"
FRENCH = "Où est le garçon de café ?\nIl a réglé l'œuvre à Noël,\n  près de la forêt brûlée.\n"
SPANISH = "El niño soñó con un pingüino.\n¿Qué día es mañana? ¡Sábado!\n\nFin.\n"
QUOTES = "„Guten Tag“, sagte sie – und ging…\nDer Preis: 12 €\n"
PLAIN = "no accents here\njust ascii\n"
BEACH = "Été à la plage, forêt, garçon, déjà vu.\nÀ bientôt !\n"
EXPECTED = {
    "berlin.txt": ("latin-1", GERMAN),
    "bordeaux.txt": ("windows-1252", FRENCH),
    "burgos.txt": ("mac-roman", SPANISH),
    "notes/marked.txt": ("utf-8", FRENCH),
    "notes/quotes.txt": ("windows-1252", QUOTES),
    "notes/readme.txt": ("utf-8", PLAIN),
    "notes/wide-be.txt": ("utf-16", SPANISH),
    "notes/wide.txt": ("utf-16", GERMAN),
    "old/apart.txt": ("utf-8", GERMAN),
    "old/half.txt": ("double-utf-8", GERMAN + FRENCH + SPANISH),
    "old/mac.txt": ("mac-roman", FRENCH),
    "old/mixed-ends.txt": ("latin-1", BEACH),
    "old/no-end.txt": ("utf-8", SPANISH),
    "old/thrice.txt": ("double-utf-8", BEACH),
    "old/twice.txt": ("double-utf-8", GERMAN),
}
clean = pathlib.Path("/app/clean")
found = {str(p.relative_to(clean)) for p in clean.rglob("*") if p.is_file()}
assert found == {*EXPECTED, "data.bin"}, f"files: {sorted(found)}"
assert (clean / "data.bin").read_bytes() == bytes(range(256)), "data.bin has changed"
for name, (_, text) in EXPECTED.items():
    assert (clean / name).read_bytes() == text.encode(), f"{name}: {(clean / name).read_bytes()[:60]!r}"
kinds = dict(line.split("\t") for line in pathlib.Path("/app/encodings.tsv").read_text().splitlines())
assert kinds == {name: kind for name, (kind, _) in EXPECTED.items()}, f"encodings: {kinds}"
print("all texts are right")
PY
