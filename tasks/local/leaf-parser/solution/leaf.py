"""leaf.py FILE: prints a Leaf file as JSON; see SPEC.md."""

import json
import pathlib
import re
import sys


class Fault(Exception):
    pass


class Text:
    """The value part of one line, read character by character."""

    def __init__(self, text, line, root):
        self.s, self.line, self.root, self.i = text, line, root, 0

    def fault(self, code):
        return Fault(f"line {self.line}: {code}")

    def skip(self):
        while self.s[self.i : self.i + 1] == " ":
            self.i += 1

    def comment(self):
        return self.s[self.i : self.i + 1] == "#" and (self.i == 0 or self.s[self.i - 1] == " ")

    def whole(self):
        v = self.value(top=True)
        self.skip()
        if self.i < len(self.s) and not self.comment():
            raise self.fault("E-SYNTAX")
        return v

    def value(self, top):
        self.skip()
        c = self.s[self.i : self.i + 1]
        if c == '"':
            return self.string()
        if c == "[":
            return self.list()
        start = self.i
        while self.i < len(self.s) and not self.comment() and (top or self.s[self.i] not in ",[]"):
            self.i += 1
        return self.plain(self.s[start : self.i].strip(" "))

    def string(self):
        self.i += 1
        out = ""
        while True:
            c = self.s[self.i : self.i + 1]
            if c == "":
                raise self.fault("E-QUOTE")
            self.i += 1
            if c == '"':
                return out
            if c == "\\":
                m = re.compile(r'[nt"\\]|u\{([0-9A-Fa-f]{1,6})\}').match(self.s, self.i)
                if not m or (m[1] and int(m[1], 16) > 0x10FFFF):
                    raise self.fault("E-ESCAPE" if self.s[self.i :] else "E-QUOTE")
                out += chr(int(m[1], 16)) if m[1] else {"n": "\n", "t": "\t"}.get(m[0], m[0])
                self.i = m.end()
            else:
                out += c

    def list(self):
        self.i += 1
        out = []
        self.skip()
        if self.s[self.i : self.i + 1] == "]":
            self.i += 1
            return out
        while True:
            self.skip()
            if self.i >= len(self.s) or self.comment() or self.s[self.i] in ",]":
                raise self.fault("E-SYNTAX")
            out.append(self.value(top=False))
            self.skip()
            c = self.s[self.i : self.i + 1]
            self.i += 1
            if c == "]":
                return out
            if c != ",":
                raise self.fault("E-SYNTAX")

    def plain(self, text):
        if text in ("true", "false", "null", ""):
            return {"true": True, "false": False}.get(text)
        if re.fullmatch(r"-?\d+(_\d+)*", text):
            return int(text)
        if re.fullmatch(r"-?\d+(_\d+)*\.\d+", text):
            return float(text)
        if text[0] == "@":
            at = self.root
            for key in text[1:].split("."):
                if not isinstance(at, dict) or key not in at:
                    raise self.fault("E-REF")
                at = at[key]
            return json.loads(json.dumps(at))
        return text


def parse(text):
    lines = text.split("\n")
    root, n = {}, 0
    # a level is [container or None (not known yet), its parent, the key in it]
    levels = [[root, None, None]]
    opened, opened_at = False, None  # the line before opened a group or a list; where it goes
    while n < len(lines):
        line, n = lines[n].rstrip("\r"), n + 1
        if not line.strip(" \t") or line.lstrip(" ").startswith("#"):
            continue
        indent = re.match(r"[ \t]*", line)[0]
        if "\t" in indent:
            raise Fault(f"line {n}: E-TAB")
        depth = len(indent) // 2
        if len(indent) % 2 or depth > len(levels) - 1 + opened:
            raise Fault(f"line {n}: E-INDENT")
        body = line[len(indent) :]
        item = re.match(r"-(?: +|$)(.*)", body)
        if opened and depth == len(levels):
            parent, key = opened_at
            parent[key] = [] if item else {}
            levels.append([parent[key]])
        del levels[depth + 1 :]
        opened, here = False, levels[depth][0]
        if isinstance(here, list):
            if not item:
                raise Fault(f"line {n}: E-SYNTAX")
            here.append(None)
            key, rest = len(here) - 1, item[1]
        else:
            entry = re.match(r"([A-Za-z_][A-Za-z0-9_-]*):(?: +|$)(.*)", body)
            if not entry:
                raise Fault(f"line {n}: E-SYNTAX")
            key, rest = entry[1], entry[2]
            if key in here:
                raise Fault(f"line {n}: E-DUP")
        bare = "" if rest.startswith("#") else re.sub(r" +#.*", "", rest).strip(" ")
        if bare in ("|", ">"):
            block, pad = [], "  " * (depth + 1)
            while n < len(lines) and (not lines[n].strip() or lines[n].startswith(pad)):
                block.append(lines[n].rstrip("\r")[len(pad) :])
                n += 1
            while block and not block[-1].strip():
                block.pop()
                n -= 1
            here[key] = "\n".join(block) if bare == "|" else fold(block)
        elif bare == "":
            here[key] = None
            if isinstance(here, dict):
                opened, opened_at = True, (here, key)
        else:
            value = Text(rest, n, root).whole()
            here[key] = value
    return root


def fold(block):
    out = ""
    for i, line in enumerate(block):
        if not line.strip():
            out += "\n"
        else:
            out += (" " if i and block[i - 1].strip() else "") + line
    return out


try:
    print(json.dumps(parse(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")), indent=1))
except Fault as fault:
    print(fault)
    sys.exit(1)
