#!/usr/bin/env bash
# Makes what run.sh needs: a Docker engine that answers, uv, and two Python environments in a cache folder. Linux and macOS. Idempotent.
#
#   bash setup.sh
#   SERVER_REQUIREMENTS=~/executorch/examples/llm_server/python/requirements.txt bash setup.sh   # also fills the server's environment
#   EXECUTORCH_EVAL_CACHE=/big/disk/evals bash setup.sh                                          # elsewhere than ~/.cache/executorch-evals
#
# Leaves CACHE/terminal-bench/venv (Harbor, proxy, sampler), CACHE/server-venv (for a server that is a Python module; empty unless
# SERVER_REQUIREMENTS names a file), CACHE/bin/uv where uv was missing. Neither models nor tasks are downloaded, no start-up file is touched.
set -euo pipefail
say() { printf 'setup.sh: %s\n' "$*" >&2; }
die() {
	say "$1"
	exit "${2:-1}"
}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
case ${1:-} in
-h | --help)
	awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
	exit 0
	;;
esac
(($# == 0)) || die "unknown argument '$1' (see --help)" 2
system=$(uname)
[[ $system == Linux || $system == Darwin ]] || die "this runs on Linux and macOS, not on $system" 2
cache=${EXECUTORCH_EVAL_CACHE:-$HOME/.cache/executorch-evals}
[[ $cache != "~"* ]] || cache=$HOME${cache#"~"}
[[ -z ${SERVER_REQUIREMENTS:-} || -r $SERVER_REQUIREMENTS ]] || die "SERVER_REQUIREMENTS='$SERVER_REQUIREMENTS': no such file" 2
command -v git >/dev/null || die "git is missing: install it and rerun" 2

# A working engine is used as it is, whatever it is.
if ! docker info >/dev/null 2>&1; then
	if [[ $system == Darwin ]]; then
		command -v brew >/dev/null || die "no Docker engine answers and Homebrew is missing: start Docker Desktop, or install https://brew.sh and rerun" 2
		say "no Docker engine answers: installing Colima"
		brew install colima docker docker-compose >&2
		rosetta=()
		[[ $(uname -m) != arm64 ]] || rosetta=(--vm-type vz --vz-rosetta)
		colima start --cpu 4 --memory 8 ${rosetta[@]+"${rosetta[@]}"} >&2
	elif command -v docker >/dev/null && id -nG "$(id -un)" | grep -qw docker && ! id -nG | grep -qw docker; then
		say "this shell is older than your membership in the group docker: run.sh enters the group by itself"
	else
		die "no Docker engine answers: install Docker Engine, or start it (\`sudo systemctl start docker\`), and be in the group docker (\`sudo bash $root/sudo_setup.sh\`)" 2
	fi
	[[ $system == Linux ]] || docker info >/dev/null 2>&1 || die "Colima was started, but \`docker info\` still fails"
fi
if command -v docker >/dev/null && ! docker compose version >/dev/null 2>&1; then
	if [[ $system == Darwin ]] && command -v brew >/dev/null; then
		brew list docker-compose >/dev/null 2>&1 || brew install docker-compose >&2
		mkdir -p "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins"
		ln -sfn "$(brew --prefix)/opt/docker-compose/bin/docker-compose" "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins/docker-compose"
	fi
	docker compose version >/dev/null 2>&1 || die "the plugin \`docker compose\` is missing: install it (Ubuntu: docker-compose-v2; Debian 13: docker-compose; Debian 12 and others: docker-compose-plugin of Docker's own packages, https://docs.docker.com/engine/install)" 2
fi

uv=$(command -v uv || true)
if [[ -z $uv ]] || ! "$uv" --version >/dev/null 2>&1; then
	uv=$cache/bin/uv
	if [[ ! -x $uv ]]; then
		say "uv is not here: into $cache/bin"
		mkdir -p "$cache/bin"
		pin=$(sed -n 's/^uv==//p' "$root/env_freeze.txt" | head -n 1)
		if python3 -m pip install --quiet --disable-pip-version-check --target "$cache/uv" "uv==$pin" 2>/dev/null; then
			ln -sfn "$cache/uv/bin/uv" "$uv"
		else
			curl -LsSf "https://astral.sh/uv/$pin/install.sh" | UV_UNMANAGED_INSTALL="$cache/bin" sh >&2
		fi
	fi
	"$uv" --version >/dev/null || die "uv could not be installed: install it by hand (https://docs.astral.sh/uv) and rerun"
fi
[[ -z ${PIP_FIND_LINKS:-} || -n ${UV_FIND_LINKS:-} ]] || export UV_FIND_LINKS=$PIP_FIND_LINKS
[[ -z ${PIP_INDEX_URL:-} || -n ${UV_DEFAULT_INDEX:-} ]] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL

# The first Python of this machine that Harbor accepts, pyenv's and that of the repository's environment included; none: uv brings one.
python=3.12
for candidate in python3.12 python3.13 python3 "$root/.venv/bin/python" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
	if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
		python=$("$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))')
		break
	fi
done
make_venv() {
	[[ ! -x $1/bin/python ]] || return 0
	say "making $1"
	"$uv" venv --quiet --python "$python" "$1" || die "no Python 3.12 or newer here, and uv could not fetch one: install python3.12 and rerun"
}
venv=$cache/terminal-bench/venv
make_venv "$venv"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
awk '$0 == "[harness]" { on = 1; next } /^\[/ { on = 0 } on && /^[A-Za-z]/ { print $1 }' "$root/env_freeze.txt" >"$constraints"
"$uv" pip install --quiet --python "$venv/bin/python" --requirement "$here/requirements.txt" --constraint "$constraints"
make_venv "$cache/server-venv"
[[ -z ${SERVER_REQUIREMENTS:-} ]] || "$uv" pip install --quiet --python "$cache/server-venv/bin/python" --requirement "$SERVER_REQUIREMENTS"
say "ready. Interpreter for [server] python, where the server is a Python module: $cache/server-venv/bin/python"
configs=$(cd "$here/../configs" && pwd)
say "next: cp $configs/terminal-bench.example.toml $configs/terminal-bench.local.toml, adapt it, and"
say "      bash $here/run.sh --config $configs/terminal-bench.local.toml --dry-run"
