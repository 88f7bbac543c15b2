#!/usr/bin/env bash
# Passes the tests: style checks, unit tests, integration tests with the real small server and real Harbor trials (in Linux namespaces, and in
# Docker where an engine answers), and the two analysis programs on pandas 2 beside pandas 3. About 20 minutes on 2 cores.
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

NESTED="test.sh"                         # there is nothing that an interrupted test would go on with
unset TRAJOULE_RUN_DIR TRAJOULE_LOCK_DIR # the tests have locks of their own
TRAJOULE_CALLER=$STAGE bash 01_setup.sh --with-tests || exit $?
VENV=$ROOT/.venv/bin
log "style"
"$VENV/ruff" check .
mapfile -t scripts < <(git ls-files '*.sh' .ci/run 2>/dev/null || printf '%s\n' ./*.sh profiles/*.sh)
"$VENV/shellcheck" -x "${scripts[@]}"
"$VENV/shfmt" -d "${scripts[@]}"

EMPTY=0
run_pytest() { # ARGS: one of two runs may have none of the tests that were asked for (pytest's exit code 5), not both
	local code=0
	"$VENV/python" -m pytest -q "$@" || code=$?
	((code == 5)) || return "$code"
	EMPTY=$((EMPTY + 1))
}

log "unit tests"
run_pytest -n "$(($(nproc) + 1))" -m "not integration" "$@"
if [[ -n $QUICK ]]; then
	((EMPTY == 0)) || die "no unit test is selected by '$*'" 2
	exit 0
fi

log "the analysis programs on pandas 2"
UV=$VENV/uv
[[ -x .venv-pandas2/bin/python ]] || "$UV" venv --quiet --python "$VENV/python" .venv-pandas2
"$UV" pip install --quiet --python .venv-pandas2/bin/python 'pandas<3' 'numpy<2' matplotlib pytest pytest-timeout pytest-xdist
.venv-pandas2/bin/python -m pytest -q -n "$(nproc)" -m "not integration" tests/test_calibrate.py tests/test_evaluate.py

log "integration tests"
timeout 10 docker info >/dev/null 2>&1 || printf '\n%s\n%s\n\n' '************ NO DOCKER ENGINE ANSWERS: the Docker trials are SKIPPED ************' '(start one, or ignore this where tasks run in namespaces)' >&2
run_pytest -m integration "$@"
((EMPTY < 2)) || die "no test is selected by '$*'" 2
log "all tests passed"
