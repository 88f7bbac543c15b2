#!/bin/bash
python3 - <<'PY'
import pathlib
import unicodedata

texts, clean = pathlib.Path("/app/texts"), pathlib.Path("/app/clean")
LETTERS = set("äöüßÄÖÜéèêëàâçîïôùûœæÉÈÀÇñÑáíóúÁÍÓÚ¿¡„“”’–…€»«")


def undone(text):
    """Line by line; a line that is no second conversion stays."""
    out = []
    for line in text.split("\n"):
        while True:
            try:
                # Windows-1252 leaves five bytes undefined, which are passed through
                before = b"".join(c.encode("cp1252") if c not in "\x81\x8d\x8f\x90\x9d" else c.encode("latin-1") for c in line).decode()
            except ValueError:
                break
            if before == line:
                break
            line = before
        out.append(line)
    return "\n".join(out)


names = {}
for path in sorted(p for p in texts.rglob("*") if p.is_file()):
    name, data = str(path.relative_to(texts)), path.read_bytes()
    (clean / name).parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".bin":
        (clean / name).write_bytes(data)
        continue
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        kind, text = "utf-16", data.decode("utf-16")
    else:
        try:
            kind, text = "utf-8", data.decode("utf-8-sig")
        except ValueError:
            # the reading with the fewest characters that no text of these languages has
            readings = []
            for kind, codec in (("latin-1", "latin-1"), ("windows-1252", "cp1252"), ("mac-roman", "mac-roman")):
                try:
                    text = data.decode(codec)
                except ValueError:
                    continue
                readings.append((sum(ord(c) > 126 and c not in LETTERS for c in text), len(readings), kind, text))
            _, _, kind, text = min(readings)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if kind == "utf-8" and (fixed := undone(text)) != text:
        kind, text = "double-utf-8", fixed
    names[name] = kind
    (clean / name).write_text(unicodedata.normalize("NFC", text).rstrip("\n") + "\n" if not text.endswith("\n") else unicodedata.normalize("NFC", text))
pathlib.Path("/app/encodings.tsv").write_text("".join(f"{n}\t{k}\n" for n, k in sorted(names.items())))
PY
