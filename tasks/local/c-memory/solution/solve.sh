#!/bin/bash
set -e
cd /app/kv
python3 - <<'PY'
import pathlib


def edit(name, *pairs):
    path = pathlib.Path(name)
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    path.write_text(text)


edit(
    "strbuf.c",
    ("  if (b->length + n > b->room) {\n", "  if (b->length + n + 1 > b->room) {\n"),
    ("while (b->length + n > b->room)", "while (b->length + n + 1 > b->room)"),
    ("void strbuf_clear(struct strbuf *b) {\n  b->length = 0;\n", "void strbuf_clear(struct strbuf *b) {\n  b->length = 0;\n  b->text[0] = 0;\n"),
)
edit(
    "table.c",
    ("malloc(strlen(text))", "malloc(strlen(text) + 1)"),
    ("malloc(size * sizeof *buckets)", "calloc(size, sizeof *buckets)"),
    (
        "  struct entry **slot = &t->buckets[hash(key) % t->size];\n  if (t->used + 1 > t->size)\n    grow(t);\n",
        "  if (t->used + 1 > t->size)\n    grow(t);\n  struct entry **slot = &t->buckets[hash(key) % t->size];\n",
    ),
    (
        "  if (e)\n    e->value = copy(value);\n  else\n",
        "  if (e) {\n    char *fresh = copy(value);\n    free(e->value);\n    e->value = fresh;\n  } else\n",
    ),
    ("strlen(e->value) + strlen(text))", "strlen(e->value) + strlen(text) + 1)"),
    ("      drop(gone);\n      *slot = gone->next;\n", "      *slot = gone->next;\n      drop(gone);\n      t->used--;\n"),
    (
        "  for (size_t i = 0; i < t->size; i++)\n    for (struct entry *e = t->buckets[i]; e; e = e->next)\n      drop(e);\n",
        "  for (size_t i = 0; i < t->size; i++) {\n    for (struct entry *e = t->buckets[i], *next; e; e = next) {\n      next = e->next;\n      drop(e);\n    }\n"
        "    t->buckets[i] = NULL;\n  }\n",
    ),
)
edit(
    "main.c",
    ("all[i]->value);\n    } else if", "all[i]->value);\n      free(all);\n    } else if"),
    ("    } else {\n      printf", "    } else if (*command) {\n      printf"),
    ("  table_free(&t);\n", "  table_free(&t);\n  strbuf_free(&line);\n"),
)
PY
make check
