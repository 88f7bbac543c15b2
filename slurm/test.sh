#!/usr/bin/env bash
# Tests slurm/ against a real Slurm: a controller, one node and munge of its own, in a temporary folder on this machine; the small model server,
# its calibration, an array of two shards, collection and evaluation. Needs root, Debian's slurm-wlm and munge, and some minutes.
#
#   apt-get install -y slurm-wlm munge && bash slurm/test.sh
#
# Exit code: 0 everything as expected; 77 (skipped) when Slurm is not installed.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PROFILE=cpu-smollm2
# shellcheck source=common.sh
source common.sh
for command in slurmctld slurmd sbatch munged; do
	command -v "$command" >/dev/null || { log "SKIPPED: $command is not installed (apt-get install -y slurm-wlm munge)" && exit 77; }
done
[[ $(id -u) == 0 ]] || { log "SKIPPED: a Slurm of its own needs root" && exit 77; }
free_port() { "$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

HERE=$(mktemp -d /tmp/trajoule-slurm.XXXXXX)
NODE=$(hostname -s)
chmod 755 "$HERE"
finish() {
	stop_spawned
	if ((FAILED)); then log "FAILED; everything is left in $HERE"; else rm -rf "$HERE"; fi
}
FAILED=1
trap finish EXIT
mkdir -p "$HERE"/{state,spool,log}
dd if=/dev/urandom of="$HERE/munge.key" bs=1024 count=1 status=none
chmod 600 "$HERE/munge.key"
cat >"$HERE/slurm.conf" <<CONF
ClusterName=trajoule
SlurmctldHost=$NODE(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$HERE/munge.socket
CredType=cred/munge
StateSaveLocation=$HERE/state
SlurmdSpoolDir=$HERE/spool
SlurmctldPidFile=$HERE/slurmctld.pid
SlurmdPidFile=$HERE/slurmd.pid
SlurmctldLogFile=$HERE/log/slurmctld.log
SlurmdLogFile=$HERE/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=$NODE NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$NODE Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$HERE/slurm.conf
spawn MUNGED --log "$HERE/log/munged.out" -- munged --foreground --force --socket "$HERE/munge.socket" --key-file "$HERE/munge.key" \
	--log-file "$HERE/log/munged.log" --pid-file "$HERE/munged.pid" --seed-file "$HERE/munge.seed"
spawn CTLD --log "$HERE/log/slurmctld.out" -- slurmctld -D
spawn SLURMD --log "$HERE/log/slurmd.out" -- slurmd -D
for ((i = 0; i < 120; i++)); do
	[[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && break
	kill -0 "$CTLD" "$SLURMD" || die "Slurm did not start: $(tail -n 2 "$HERE"/log/*.log)"
	sleep 0.5
done
[[ $(sinfo -h -o %T) == idle ]] || die "the node does not become idle: $(sinfo 2>&1)"
log "Slurm $(sinfo --version | cut -d' ' -f2) is up: node $NODE is idle"

export DATA_DIR=$HERE/data RESULTS_DIR=$HERE/results ORACLE_DIR=$HERE/data ENVIRONMENT=local_env MODE=replay DRIFT_EVERY=1
export SERVER_THREADS=1 IDLE_S=3 BATCH_IDLE_S=1 CALIB_CONTEXTS=64,160 CALIB_OUTPUTS=4,12 CALIB_REPS=1 APPEND_CACHED=64 APPEND_UNCACHED=32 APPEND_OUTPUTS=4 MIN_FREE_MB=100
printf 'nested-archive\ntidy-files\n' >"$HERE/list.txt"
jobs=$(bash slurm/run.sh "$HERE/list.txt" summarize-off 1 --nodes 2 -- --output "$HERE/log/job-%j.log")
read -r array collect <<<"$jobs"
log "submitted: array $array, collection $collect"
state() { scontrol show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p' | sort -u | tr '\n' ' '; }
seen=
while [[ $(state "$collect") =~ PENDING|RUNNING|COMPLETING|CONFIGURING ]]; do
	now="array: $(state "$array")collection: $(state "$collect")"
	[[ $now == "$seen" ]] || log "$now"
	seen=$now
	sleep 2
done
log "array: $(state "$array")collection: $(state "$collect")"

check() { # WHAT COMMAND...: one line of the result
	if "${@:2}"; then echo "ok    $1"; else
		echo "NOT   $1"
		exit 1
	fi
}
check "both shards and the collection completed" test "$(state "$array") $(state "$collect")" == "COMPLETED  COMPLETED "
check "one calibration, of this node" test -e "$RESULTS_DIR/calib.$NODE/params.json"
check "each trajectory was measured once, by a shard of its own" "$PY" - "$DATA_DIR" "$RESULTS_DIR" "$NODE" <<'PYTHON'
import csv, json, sys
from pathlib import Path
import energylib
data, results, node = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
trials = [json.loads(p.read_text()) for p in sorted(data.glob("traj/*/trial.json"))]
assert [t["task"] for t in trials] == ["nested-archive", "tidy-files"], trials
sha = energylib.sha256(results / f"calib.{node}" / "params.json")
assert {t["calib_sha256"] for t in trials} == {sha}
rows = list(csv.DictReader(open(results / "trials.csv")))
assert sorted(r["trajectory"] for r in rows) == [t["trajectory"] for t in trials]
assert {r["calib_sha256"] for r in rows} == {sha} and all(float(r["cpu_total_j"]) > 0 for r in rows)
assert len(list(csv.DictReader(open(data / "traj/plan.csv")))) == 2
logs = [p.read_text() for p in Path(data.parent, "log").glob("job-*.log")]
assert sum("calibrated already" in x for x in logs) == 1 and sum("shard 1 of 2" in x for x in logs) == 1 and sum("shard 2 of 2" in x for x in logs) == 1
assert (results / "eval" / "report.html").stat().st_size > 10000
PYTHON
check "the second shard used the first one's calibration and checked it by the reference cell" test -s "$DATA_DIR/batch.$NODE/drift.csv"
check "a rerun has nothing to do and says so" grep -q "are measured already" <(bash 06_run_batch.sh "$HERE/list.txt" summarize-off 1 --shard 1/2 2>&1)
check "nothing of it is left running" test -z "$(pgrep -f -- "$HERE/data" || true)"
FAILED=0
log "Slurm: all as expected"
