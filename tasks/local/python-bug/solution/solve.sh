#!/bin/bash
cd /app || exit 1
python3 - <<'PY'
text = open("stats.py").read()
text = text.replace("    values.sort()\n", "    values = sorted(values)\n")
text = text.replace("    return values[middle]\n", "    if len(values) % 2:\n        return values[middle]\n    return (values[middle - 1] + values[middle]) / 2\n")
text = text.replace("range(len(values) - width)", "range(len(values) - width + 1)")
open("stats.py", "w").write(text)
PY
