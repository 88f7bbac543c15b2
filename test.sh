#!/usr/bin/env bash
# Passes the tests: style checks, unit tests, integration tests with the real small server and real Harbor trials (in Linux namespaces, and in
# Docker where an engine answers), and the two analysis programs on pandas 2 beside pandas 3. About 10 minutes on 2 cores.
#
#   bash test.sh             # everything
#   bash test.sh --quick     # style and unit tests: a minute or two
#   bash test.sh -k proxy    # other arguments go to pytest
export PROFILE=cpu-smollm2
source "$(dirname "$0")/common.sh"
QUICK=
if [[ ${1:-} == --quick ]]; then
	QUICK=1
	shift
fi

bash 01_setup.sh --with-tests
VENV=$ROOT/.venv/bin
log "style"
"$VENV/ruff" check .
mapfile -t scripts < <(git ls-files '*.sh' .ci/run 2>/dev/null || printf '%s\n' ./*.sh profiles/*.sh)
"$VENV/shellcheck" -x "${scripts[@]}"
"$VENV/shfmt" -d "${scripts[@]}"

log "unit tests"
"$VENV/python" -m pytest -q -n "$(($(nproc) + 1))" -m "not integration" "$@"
[[ -z $QUICK ]] || exit 0

log "the analysis programs on pandas 2"
UV=$VENV/uv
[[ -x .venv-pandas2/bin/python ]] || "$UV" venv --quiet --python "$VENV/python" .venv-pandas2
"$UV" pip install --quiet --python .venv-pandas2/bin/python 'pandas<3' 'numpy<2' matplotlib pytest pytest-timeout pytest-xdist
.venv-pandas2/bin/python -m pytest -q -n "$(nproc)" -m "not integration" tests/test_calibrate.py tests/test_evaluate.py

log "integration tests"
timeout 10 docker info >/dev/null 2>&1 || printf '\n%s\n%s\n\n' '************ NO DOCKER ENGINE ANSWERS: the Docker trials are SKIPPED ************' '(start one, or ignore this where tasks run in namespaces)' >&2
"$VENV/python" -m pytest -q -m integration "$@"
log "all tests passed"
