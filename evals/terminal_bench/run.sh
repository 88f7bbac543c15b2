#!/usr/bin/env bash
# Runs Terminal-Bench against a local LLM server from one TOML file: the runner, in the environment that setup.sh made. --help and --dry-run
# need no environment, any Python from 3.11 on does.
#
#   bash run.sh --config ../configs/terminal-bench.local.toml [--dry-run] [--task NAME]... [--output DIR]
#
# Everything else is in `bash run.sh --help` and in README.md.
set -euo pipefail
cache=${EXECUTORCH_EVAL_CACHE:-$HOME/.cache/executorch-evals}
[[ $cache != "~"* ]] || cache=$HOME${cache#"~"}
python=$cache/terminal-bench/venv/bin/python
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -x $python && " $* " =~ \ (-h|--help|--dry-run)\  ]]; then
	for candidate in python3 python3.{11..19} "$here/../../.venv/bin/python"; do
		"$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
		exec "$candidate" "$here/runner.py" "$@"
	done
fi
if [[ ! -x $python ]]; then
	echo "run.sh: $python is missing: run \`bash setup.sh\` first (EXECUTORCH_EVAL_CACHE, now '${EXECUTORCH_EVAL_CACHE:-}', says where)" >&2
	exit 2
fi
# Just added to the docker group, but this shell is older than that: enter the group instead of asking for a new login.
if [[ $(uname) == Linux && -z ${TRAJOULE_IN_GROUP:-} ]] && ! docker info >/dev/null 2>&1 && command -v sg >/dev/null &&
	id -nG "$(id -un)" | grep -qw docker && ! id -nG | grep -qw docker; then
	printf -v command '%q ' "$python" "$here/runner.py" "$@"
	TRAJOULE_IN_GROUP=1 exec sg docker -c "exec $command"
fi
exec "$python" "$here/runner.py" "$@"
