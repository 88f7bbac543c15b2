"""Writes /app/texts."""

import pathlib
import unicodedata

root = pathlib.Path("/app/texts")
GERMAN = "Über den Dächern von Köln\nliegt Nebel; die Straße glänzt.\n\n\tMäßig heißer Kaffee für fünf Gäste.\n"
FRENCH = "Où est le garçon de café ?\nIl a réglé l'œuvre à Noël,\n  près de la forêt brûlée.\n"
SPANISH = "El niño soñó con un pingüino.\n¿Qué día es mañana? ¡Sábado!\n\nFin.\n"
QUOTES = "„Guten Tag“, sagte sie – und ging…\nDer Preis: 12 €\n"
PLAIN = "no accents here\njust ascii\n"
LATIN_FRENCH = "Été à la plage, forêt, garçon, déjà vu.\nÀ bientôt !\n"


def doubled(text):
    return text.encode().decode("cp1252")


def put(name, data):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


put("berlin.txt", GERMAN.encode("latin-1"))
put("bordeaux.txt", FRENCH.encode("cp1252"))
put("burgos.txt", SPANISH.encode("mac-roman"))
put("notes/readme.txt", PLAIN.replace("\n", "\r\n").encode())
put("notes/quotes.txt", QUOTES.replace("\n", "\r\n").encode("cp1252"))
put("notes/wide.txt", b"\xff\xfe" + GERMAN.encode("utf-16-le"))
put("notes/wide-be.txt", b"\xfe\xff" + SPANISH.replace("\n", "\r\n").encode("utf-16-be"))
put("notes/marked.txt", b"\xef\xbb\xbf" + FRENCH.encode())
put("old/apart.txt", unicodedata.normalize("NFD", GERMAN).encode())
put("old/mac.txt", FRENCH.replace("\n", "\r").encode("mac-roman"))
put("old/twice.txt", doubled(GERMAN).encode())
put("old/thrice.txt", doubled(doubled(LATIN_FRENCH)).encode())
put("old/half.txt", (GERMAN + doubled(FRENCH) + SPANISH).encode())
put("old/no-end.txt", SPANISH.rstrip("\n").encode())
put("old/mixed-ends.txt", LATIN_FRENCH.replace(".\n", ".\r\n").encode("latin-1"))
put("data.bin", bytes(range(256)))
