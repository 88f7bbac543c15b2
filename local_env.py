"""A Harbor environment without Docker: Linux namespaces over the machine's own programs.

    harbor run -p tasks/local/python-bug -a oracle -e local_env:LocalEnvironment        # PYTHONPATH = this folder
    python local_env.py --check                     # does it work here, and with which limits?
    python local_env.py --check tasks/local/*       # ... and are the programs there that these tasks need?
    python local_env.py --run tasks/local/python-bug 'ls -la; ip addr'      # one command in a task's fresh environment

A trial gets a root of its own: /usr, /bin, /lib and /var/lib/dpkg of the machine through overlayfs (changes go to a
tmpfs and vanish), a copy of the world-readable part of /etc, and nothing else. /home, /root, /tmp, /run, /opt, /srv,
the runner's home, this folder, the tasks, the trials and the virtual environment are not there. The simple Dockerfile
of the task is obeyed: WORKDIR, ENV, ARG, USER, COPY and ADD of local files are done, packages of `apt-get install` are
expected on the machine (an error says which are missing), other RUN lines run inside. FROM is taken to mean "this
machine". Options, each as `--ek name=value`:

    size_mb=2048      room for all changes, in RAM (default: the task's storage_mb, at most a quarter of the RAM)
    upper_dir=/disk   keep changes on this disk instead (no size limit then)
    expose=/opt,/nix  further directories of the machine to show, also through overlayfs
    namespaces=user   "root" or "user": do not detect

Network: a private one with nothing but `lo`, unless task.toml says network_mode = "public" in so many words; then the
task shares the machine's network, its loopback included.

As root everything works. In an unprivileged user namespace there is one user (root), so `user`, `chown` to others
and apt do not work. CPU and memory limits of the task are enforced by cgroup v2 where one is writable, else by
CPU affinity and by RLIMIT_DATA per process; which one is said once. Like a container with dropped capabilities it keeps
an agent from harming the machine by accident; it is no fortress against hostile code (no seccomp filter).

When the runner ends, however it ends (kill -9 too), the environment ends with it: a small supervisor holds the other
end of a pipe, kills the namespace and removes what it left. Nothing is mounted in the machine's own mount namespace.
"""

import argparse
import asyncio
import contextlib
import fcntl
import glob
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

INSIDE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The machine's programs. /opt, /home, /root, /srv, /mnt and the rest of /var stay out: that is where secrets and work live.
HOST_DIRS = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/var/lib/dpkg", "/var/lib/apt"]
# In a user namespace only the top of an overlay belongs to its root, so these get one each: `make install` works there.
USER_MODE_DIRS = ["/usr/local", *(f"/usr/local/{d}" for d in ("bin", "etc", "include", "lib", "sbin", "share"))]
PSEUDO_FS = {"proc", "sysfs", "devtmpfs", "devpts", "tmpfs", "cgroup", "cgroup2", "overlay", "mqueue", "nsfs", "autofs", "fuse.lxcfs"}
# Docker's default capabilities without mknod (there is no device cgroup here).
KEPT = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "net_raw": 13,
    "sys_chroot": 18,
    "audit_write": 29,
    "setfcap": 31,
}
CAPS = ",".join(["-all", *(f"+{name}" for name in KEPT)])
DROPPED = ",".join(str(n) for n in range(64) if n not in KEPT.values())
# Commands that stand for a Debian package where dpkg cannot be asked; packages with no command of their own are empty.
PACKAGE_COMMANDS = {
    "build-essential": ["gcc", "make"],
    "procps": ["ps"],
    "coreutils": ["ls"],
    "iproute2": ["ip"],
    "util-linux": ["setpriv"],
    "findutils": ["find"],
    "python3-minimal": ["python3"],
    "python-is-python3": ["python"],
    "ripgrep": ["rg"],
    "netcat-openbsd": ["nc"],
    "locales": [],
    "libc6-dev": [],
    "ca-certificates": [],
}
# What a docker-compose.yaml may say of its main service without needing Docker: both hold here by themselves.
COMPOSE_HERE = {"network_mode": "none", "init": True}
OUTPUT_LIMIT = 16 << 20  # bytes of one command's stdout that are read into memory
NAME = "trajoule-env"
USER_MODE_LIMITS = "unprivileged user namespace: only root, the machine's own files cannot be changed inside, no apt, no chown"

# Runs outside the namespace. fd 3 is the read end of a pipe whose other end the runner holds; it closes when the runner dies.
# It is there before anything that could be left behind: it makes the scratch directory, and the runner makes the cgroup
# (called $name too) and tells its path in a line only once this listens.
SUPERVISOR = r"""
name=$1 scratch=$2; shift 2
clean() {  # what was killed may still finish the system call it is in, and make a directory behind rm's back
  for _ in {1..100}; do rm -rf --one-file-system -- "$scratch" && return; sleep 0.1; done 2>/dev/null
  rm -rf --one-file-system -- "$scratch"
}
trap '[ -z "$scratch" ] || clean' EXIT
[ -z "$scratch" ] || mkdir -p -- "$scratch" || exit 1
IFS= read -r cgroup <&3 || { find /sys/fs/cgroup -depth -type d -name "$name" -exec rmdir {} + 2>/dev/null; exit 1; }
setpriv --pdeathsig KILL -- bash -c '[ -z "$0" ] || echo $$ >"$0/cgroup.procs"; exec "$@"' "$cgroup" "$@" 3<&- &
child=$!
exec 4>&-
( read -r -N 1 _ <&3; kill -KILL $child 2>/dev/null ) &
watch=$!
wait $child; rc=$?
kill $watch 2>/dev/null
if [ -n "$cgroup" ]; then for _ in 1 2 3 4 5 6 7 8 9 10; do rmdir "$cgroup" 2>/dev/null && break; sleep 0.1; done; fi
exit $rc
"""

# Runs inside as pid 1. /sys serves as the building site: it exists everywhere, is never the source of a bind mount, and
# covering it in a private mount namespace leaves no directory behind on the machine.
BUILD = r"""
set -eu
note() { echo "note $*" >&4; }
fail() { echo "$*" >&2; exit 1; }
read -r pid _ </proc/self/stat          # still the machine's /proc: this is the pid as seen from outside
echo "pid $pid" >&4
mount --make-rprivate / 2>/dev/null || mount --make-rslave /
S=/sys
if [ -n "$DISK" ]; then mount --bind "$DISK" $S; else mount -t tmpfs -o "size=${SIZE_MB}m,mode=755" tmpfs $S || fail "tmpfs: refused"; fi
R=$S/root; mkdir -p $R $S/up $S/work; mount --bind $R $R
mkdir -p $R/{proc,sys,dev,etc,root,home,run/lock,tmp,opt,srv,mnt,media,var/{cache/apt/archives/partial,lib,log,mail,spool,tmp,local}}
chmod 700 $R/root; chmod 1777 $R/tmp $R/var/tmp $R/run/lock
ln -s /run $R/var/run; ln -s /run/lock $R/var/lock
n=0
show() {  # a directory of the machine, writable through an overlay where the kernel allows it, else read-only
  n=$((n + 1)); mkdir -p "$R$1" "$S/up/$n" "$S/work/$n"
  mount -t overlay overlay -o "lowerdir=$2,upperdir=$S/up/$n,workdir=$S/work/$n$XATTR" "$R$1" 2>/dev/null && return
  mount --rbind "$1" "$R$1" && mount -o remount,bind,ro "$R$1" 2>/dev/null || fail "cannot show $1: no overlayfs and no bind mount"
  note "$1 is read-only (overlayfs refused)"
}
link() { mkdir -p "$(dirname "$R$1")"; ln -sfn "$2" "$R$1"; }
mask() { [ ! -d "$R$1" ] || mount -t tmpfs -o size=4k,mode=755,ro tmpfs "$R$1"; }
bind() { if [ -d "$1" ]; then mkdir -p "$R$2"; else mkdir -p "$(dirname "$R$2")"; touch "$R$2"; fi
  mount --bind "$1" "$R$2"; [ -z "${3:-}" ] || mount -o remount,bind,ro "$R$2"; }
eval "$PLAN"
# Only what everybody may read: host keys, wifi passwords and password hashes stay outside.
cd /etc
find . -xdev \( -type d ! -perm -005 -prune \) -o \( -type f -perm -004 -o -type l -o -type d \) -print0 |
  tar --null --no-recursion -T - -cf - 2>/dev/null | tar -C $R/etc --no-same-owner -xf - || true
cd /
rm -f $R/etc/{mtab,hostname,hosts,resolv.conf,shadow,gshadow}
ln -s /proc/self/mounts $R/etc/mtab
echo "$HOSTNAME_" >$R/etc/hostname
printf '127.0.0.1\tlocalhost %s\n::1\tlocalhost\n' "$HOSTNAME_" >$R/etc/hosts
for f in passwd group; do [ -f $R/etc/$f ] || fail "/etc/$f cannot be read"; done
sed -E 's/^([^:]*):.*/\1:*:19000:0:99999:7:::/' $R/etc/passwd >$R/etc/shadow; chmod 600 $R/etc/shadow
if [ -z "$NONET" ]; then cat /etc/resolv.conf >$R/etc/resolv.conf 2>/dev/null || true; else : >$R/etc/resolv.conf; fi
for f in bashrc profile; do
  for from in /usr/share/base-files/dot.$f /etc/skel/.$f; do [ ! -f $from ] || { cp $from $R/root/.$f; break; }; done
done
mount -t proc proc $R/proc || fail "no fresh /proc: parts of /proc are masked (are we in a container?)"
mount -t sysfs -o ro sysfs $R/sys 2>/dev/null || note "/sys is empty"
mount -t tmpfs -o mode=755,size=64k tmpfs $R/dev; mkdir $R/dev/pts $R/dev/shm
for d in null zero full random urandom tty; do touch $R/dev/$d; mount --bind /dev/$d $R/dev/$d; done
mount -t devpts -o "newinstance,ptmxmode=0666,mode=620$PTS" devpts $R/dev/pts
mount -t tmpfs -o mode=1777,size=64m tmpfs $R/dev/shm
ln -s pts/ptmx $R/dev/ptmx; ln -s /proc/self/fd $R/dev/fd
for f in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${f%%:*} $R/dev/${f##*:}; done
if [ "$MODE" = root ]; then     # root in here is the machine's root: what Docker hides of /proc must be hidden too
  for p in sys sysrq-trigger irq bus fs; do
    [ ! -e $R/proc/$p ] || { mount --bind $R/proc/$p $R/proc/$p; mount -o remount,bind,ro $R/proc/$p; }
  done
  for p in kcore keys timer_list sched_debug latency_stats; do [ ! -e $R/proc/$p ] || mount --bind /dev/null $R/proc/$p; done
fi
hostname "$HOSTNAME_"
if [ -n "$NONET" ]; then ip link set lo up 2>/dev/null || "$PYTHON" -S -E -c '
import fcntl, socket, struct
s = socket.socket(); fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0x49))' || note "loopback is down"; fi
cd $R; mkdir .old; pivot_root . .old; umount -l /.old; rmdir /.old
exec 3<&-; echo ready >&4; exec 4>&-
# bash reaps orphans, which `sleep infinity` would leave as zombies
exec env -i PATH="$INSIDE_PATH" setpriv --bounding-set="$CAPS" -- \
  bash -c 'trap "" HUP INT TERM; while :; do sleep 86400 & wait $!; done' init
"""

# Enters the namespaces and starts a command there. Not nsenter: that would run a program of the inside, which an agent may
# have replaced, with all privileges. Here they are given up before anything from inside is read; hence no imports after setns.
ENTER = r"""
import ctypes, os, sys
pid, kinds, drop, n = sys.argv[1:5]
n = 5 + int(n)
env = dict(pair.split("=", 1) for pair in sys.argv[5:n])
libc = ctypes.CDLL(None, use_errno=True)
for fd in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds.split(",")]:
    if libc.setns(fd, 0):
        os.write(2, b"setns: " + os.strerror(ctypes.get_errno()).encode() + b"\n")
        os._exit(125)
child = os.fork()
if child == 0:
    for cap in drop.split(","):
        libc.prctl(24, int(cap), 0, 0, 0)
    os.chdir("/")
    os.execve("/bin/sh", ["sh", *sys.argv[n:]], env)
status = os.waitpid(child, 0)[1]
os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""
# Inside, as root: become $1 (a name, or a number that need not be in /etc/passwd), with its group, groups and home.
BECOME = r"""
u=$1; shift
if g=$(id -g "$u" 2>/dev/null); then
  HOME=${HOME:-$(getent passwd "$u" | cut -d: -f6)}; export HOME
  exec setpriv --reuid "$u" --regid "$g" --init-groups -- "$@"
fi
case $u in *[!0-9]*) echo "user $u: not known in here" >&2; exit 126 ;; esac
HOME=${HOME:-/} exec setpriv --reuid "$u" --regid 0 --clear-groups -- "$@"
"""
NO_ASCIINEMA = """#!/bin/sh
echo "asciinema is not installed on this machine"
[ "$1" = --version ]
"""
ADVICE = "use Docker (-e docker)"


class LocalEnvError(RuntimeError):
    """The environment cannot be had here; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------------- what this machine allows


def sysctl(path):
    try:
        return Path("/proc/sys", path).read_text().strip()
    except OSError:
        return None


def refusal(stderr):
    """Why `unshare` was refused, and the command that mends it (one line)."""
    said = stderr.strip().splitlines()[-1] if stderr.strip() else "no message"
    for path, bad, mend in [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=10000"),
    ]:
        if os.geteuid() != 0 and sysctl(path) == bad:
            return f"namespaces are refused ({said}): {path.replace('/', '.')} = {bad}; run `{mend}`, run as root, or {ADVICE}"
    if os.geteuid() == 0:
        return f"namespaces are refused ({said}): this root lacks CAP_SYS_ADMIN (a container?); run on the machine itself, or {ADVICE}"
    return f"namespaces are refused ({said}): run as root, or {ADVICE}"


def detect_mode():
    """Return "root" or "user"; raises LocalEnvError when neither kind of namespace can be had."""
    needed = {"unshare": "util-linux", "setpriv": "util-linux", "tar": "tar", "bash": "bash", "find": "findutils"}
    for tool, package in needed.items():
        if not shutil.which(tool):
            raise LocalEnvError(f"{tool} is missing: apt-get install -y {package}, or {ADVICE}")
    stderr = ""
    for mode in ["root", "user"] if os.geteuid() == 0 else ["user"]:
        p = subprocess.run(["unshare", *unshare_flags(mode, True), "true"], capture_output=True, text=True)
        if p.returncode == 0:
            return mode
        stderr = p.stderr
    raise LocalEnvError(refusal(stderr))


def unshare_flags(mode, private_network):
    flags = ["--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child=KILL"]
    return (["--user", "--map-root-user"] if mode == "user" else []) + flags + (["--net"] if private_network else [])


def start_time(pid):
    """Start of a process in clock ticks since boot, or None: with the pid it names a process for good."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def owned_name():
    """A directory name that says which process owns it, so that a later one can tell whether that process still lives."""
    return f"{NAME}-{os.getpid()}-{start_time(os.getpid())}-{os.urandom(4).hex()}"


def sweep(directory):
    """Remove what environments of dead runners left in `directory` (a disk for changes, or a cgroup). Returns the names."""
    gone = []
    for path in Path(directory).glob(f"{NAME}-*-*-*"):
        m = re.fullmatch(rf"{NAME}-(\d+)-(\d+)-[0-9a-f]+", path.name)
        if not m or start_time(int(m[1])) == int(m[2]):
            continue
        with contextlib.suppress(OSError):
            if (path / "cgroup.procs").exists():
                path.rmdir()
            else:
                shutil.rmtree(path)
            gone.append(path.name)
    return gone


# ---------------------------------------------------------------------------------------------------- limits


def make_cgroup(cpus, memory_mb, name, root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """A cgroup v2 `name` with these limits below the nearest ancestor that allows it, or None (not cgroup v2, not writable)."""
    root = Path(root)
    try:
        here = next(line.split("::", 1)[1].strip() for line in Path(own).read_text().splitlines() if line.startswith("0::"))
        if "memory" not in (root / "cgroup.controllers").read_text().split():
            return None
    except (OSError, StopIteration):
        return None
    base = root / here.lstrip("/")
    for parent in [base, *base.parents]:
        # a cgroup that holds processes cannot give controllers to children: climb
        if parent != root and root not in parent.parents:
            break
        with contextlib.suppress(OSError):
            sweep(parent)
            enabled = (parent / "cgroup.subtree_control").read_text().split()
            for controller in {"cpu", "memory", "pids"} - set(enabled):
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
            group = parent / name
            group.mkdir()
            try:
                if memory_mb:
                    (group / "memory.max").write_text(str(memory_mb << 20))
                    with contextlib.suppress(OSError):
                        (group / "memory.swap.max").write_text("0")
                if cpus:
                    (group / "cpu.max").write_text(f"{round(cpus * 100000)} 100000")
                (group / "pids.max").write_text("8192")
                return group
            except OSError:
                group.rmdir()
    return None


def soft_limits(cpus, memory_mb):
    """Shell lines and a sentence for machines without a writable cgroup v2."""
    lines, said = [], []
    allowed = sorted(os.sched_getaffinity(0))
    count = max(1, int(cpus or 0))
    if cpus and count < len(allowed) and shutil.which("taskset"):
        # at random, so that trials side by side do not all sit on the first CPU
        lines.append(f"taskset -pc {','.join(map(str, random.sample(allowed, count)))} $$ >/dev/null")
        said.append(f"{count} CPU(s) by affinity")
    if memory_mb:
        lines.append(f"ulimit -d {memory_mb << 10}")
        said.append(f"{memory_mb} MB of data per process (not per task)")
    return lines, "; ".join(said)


def ram_mb():
    return int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) >> 10


# ---------------------------------------------------------------------------------------------------- what is shown and hidden


def mounts_below(directories, mountinfo="/proc/self/mountinfo"):
    """Disks mounted below the shown directories (a separate /usr/local): an overlay does not look into them by itself."""
    found = []
    for line in Path(mountinfo).read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        if rest.split()[0] not in PSEUDO_FS and any(is_below(point, d) for d in directories):
            found.append(point)
    return sorted(set(found))


def is_below(path, directory):
    return str(path).startswith(str(directory).rstrip("/") + "/")


def hidden_paths(private, shown):
    """Of the private paths those that lie inside a shown directory and so need a mask."""
    out = set()
    for path in private:
        for p in {os.path.abspath(path), os.path.realpath(path)}:
            if any(is_below(p, d) for d in shown):
                out.add(p)
    return sorted(p for p in out if not any(is_below(p, q) for q in out))


def plan(expose=(), private=(), binds=(), mountinfo="/proc/self/mountinfo"):
    """The shell lines that furnish the new root: directories shown, links, masks, bind mounts."""
    q, lines, shown = shlex.quote, [], []
    for d in [*HOST_DIRS, *expose]:
        if os.path.islink(d):
            lines.append(f"link {q(d)} {q(os.readlink(d))}")
        elif os.path.isdir(d):
            shown.append(d)
    for d in sorted({*shown, *mounts_below(shown, mountinfo)}):
        if any(c in d for c in ",:\\"):
            raise LocalEnvError(f"{d}: overlayfs cannot take a directory with ',', ':' or a backslash in its name; leave it out of expose")
        lines.append(f"show {q(d)} {q(d)}")
    lines += [f"mask {q(p)}" for p in hidden_paths(private, shown)]
    lines += [f"bind {q(str(s))} {q(str(t))}{' ro' if ro else ''}" for s, t, ro in binds]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- the namespace


class Namespace:
    """One environment. `start()` builds it, `argv()` wraps a command so that it runs inside, `stop()` ends everything in it.

    expose, private: directories to show, and paths to hide. binds: (source, target, read_only). `notes` says, after
    start(), what is limited here.
    """

    def __init__(
        self,
        name="trajoule",
        mode=None,
        private_network=True,
        size_mb=1024,
        upper_dir=None,
        expose=(),
        private=(),
        binds=(),
        cpus=None,
        memory_mb=None,
    ):
        self.name, self.mode, self.private_network, self.size_mb = name, mode, private_network, size_mb
        self.upper_dir, self.expose, self.private, self.binds = upper_dir, list(expose), list(private), list(binds)
        self.cpus, self.memory_mb = cpus, memory_mb
        self.notes, self.pid, self._supervisor, self._owner_fd, self._prefix = [], None, None, None, []

    def start(self, timeout_s=60):
        self.mode = self.mode or detect_mode()
        self.notes = [USER_MODE_LIMITS] if self.mode == "user" else []
        name, scratch = owned_name(), ""
        if self.upper_dir:
            sweep(self.upper_dir)
            scratch = os.path.join(os.path.abspath(self.upper_dir), name)
        hostname = re.sub(r"[^A-Za-z0-9-]", "-", self.name)[:63].strip("-") or "task"
        env = {
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin",
            "MODE": self.mode,
            "SIZE_MB": str(self.size_mb),
            "DISK": scratch,
            "XATTR": ",userxattr" if self.mode == "user" else "",
            "PTS": "" if self.mode == "user" else ",gid=5",
            "HOSTNAME_": hostname,
            "NONET": "1" if self.private_network else "",
            "PYTHON": sys.executable,
            "INSIDE_PATH": INSIDE_PATH,
            "CAPS": CAPS,
            "LC_ALL": "C",
            "PLAN": plan([*(USER_MODE_DIRS if self.mode == "user" else []), *self.expose], self.private, self.binds),
        }
        owner_r, self._owner_fd = os.pipe()
        ready_r, ready_w = os.pipe()
        # above 10, so that the supervisor can put them on its fds 3 and 4 whatever their numbers were
        passed = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (owner_r, ready_w)]
        take = "exec 3<&{0} 4>&{1} {0}<&- {1}>&-\n".format(*passed)
        inner = ["unshare", *unshare_flags(self.mode, self.private_network), "bash", "-c", BUILD, "build"]
        with tempfile.TemporaryFile() as err:
            try:
                self._supervisor = subprocess.Popen(
                    ["bash", "-c", take + SUPERVISOR, NAME, name, scratch, *inner],
                    env=env,
                    pass_fds=passed,
                    cwd="/",
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                )
            finally:
                for fd in (owner_r, ready_w, *passed):
                    os.close(fd)
            self._limit(make_cgroup(self.cpus, self.memory_mb, name))
            ready = self._read_ready(ready_r, time.monotonic() + timeout_s)
            if not ready:
                self.stop()
                err.seek(0)
                said = err.read().decode(errors="replace").strip().replace("\n", " | ")
                raise LocalEnvError(f"the environment did not start as {self.mode}: {said or f'nothing said in {timeout_s} s'}; {ADVICE}")
        return self

    def _limit(self, cgroup):
        """Tell the supervisor the cgroup (or none), and choose what commands that enter later do to have the same limits."""
        if cgroup:
            lines = [f"echo $$ >{shlex.quote(str(cgroup / 'cgroup.procs'))}"]
        else:
            lines, said = soft_limits(self.cpus, self.memory_mb)
            if said:
                self.notes.append(f"no writable cgroup v2, so limits are {said}")
        self._prefix = ["bash", "-c", "; ".join([*lines, 'exec "$@"']), "limits"] if lines else []
        with contextlib.suppress(BrokenPipeError):  # a supervisor that ended says why itself
            os.write(self._owner_fd, f"{cgroup or ''}\n".encode())

    def _read_ready(self, fd, deadline):
        """Take in "pid N", "note text" and "ready" lines; False when the builder ends or time runs out before "ready"."""
        text = b""
        try:
            while (left := deadline - time.monotonic()) > 0 and select.select([fd], [], [], left)[0]:
                chunk = os.read(fd, 4096)
                text += chunk
                for line in text.decode().splitlines():
                    if line.startswith("pid "):
                        self.pid = int(line[4:])
                if text.endswith(b"ready\n"):
                    self.notes += [line[5:] for line in text.decode().splitlines() if line.startswith("note ")]
                    return True
                if not chunk:
                    return False
            return False
        finally:
            os.close(fd)

    @property
    def alive(self):
        return self._supervisor is not None and self._supervisor.poll() is None

    def argv(self, command, cwd="/", env=None, user=None):
        """The argument list that runs `command` (a list) inside, in `cwd`, with exactly this environment, as this user."""
        if not self.alive:
            raise LocalEnvError("the environment is not running (any more)")
        become = []
        if user in (None, "", "root", 0, "0"):
            env = {"HOME": "/root", **(env or {})}
        elif self.mode == "user":
            raise LocalEnvError(f"user {user!r}: an unprivileged user namespace has only root; run as root, or {ADVICE}")
        else:
            become = ["sh", "-c", BECOME, "become", str(user)]
        kinds = ["user"] * (self.mode == "user") + ["net"] * self.private_network + ["uts", "ipc", "pid", "mnt"]
        pairs = [f"{k}={v}" for k, v in {"PATH": INSIDE_PATH, "LANG": "C.UTF-8", **(env or {})}.items()]
        enter = [sys.executable, "-I", "-S", "-c", ENTER, str(self.pid), ",".join(kinds), DROPPED, str(len(pairs)), *pairs]
        return [*self._prefix, *enter, "-c", 'exec "$@"', "sh", *become, "sh", "-c", 'cd "$0" || exit 126; exec "$@"', cwd, *command]

    async def run(self, command, cwd="/", env=None, user=None, timeout_s=None, stdin=None, stdout=None):
        """Run a command inside: a shell line (bash) or a list. Returns (exit status, stdout, stderr); raises TimeoutError."""
        script = None
        if isinstance(command, str):
            if len(command) > 100_000:  # one argument of execve holds 128 KB
                script = stdin = tempfile.TemporaryFile()  # noqa: SIM115
                script.write(command.encode())
                script.seek(0)
                command = ["bash", "-c", 'eval "$(cat)"']
            else:
                command = ["bash", "-c", command]
        try:
            return await run_to_files(self.argv(command, cwd, env, user), timeout_s, stdin, stdout)
        finally:
            if script:
                script.close()

    async def must(self, what, command, **kwargs):
        """run(), with a LocalEnvError that begins with `what` when the command fails."""
        rc, out, err = await self.run(command, **kwargs)
        if rc:
            raise LocalEnvError(f"{what}: ended with {rc}: {(err or out).strip()[-500:] or 'no output'}")
        return out

    async def put(self, entries, directory, chmod=None):
        """Copy (path, name) entries into a directory inside, owned by root."""
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(pack, archive, entries, chmod)
            q = shlex.quote(directory)
            await self.must(f"copying to {directory}", f"mkdir -p {q} && exec tar -C {q} --no-same-owner -xpf -", stdin=archive)

    async def get(self, directory, name, target):
        """Copy `directory`/`name` from inside to the directory `target`. Returns the names left out (they point outside)."""
        Path(target).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            await self.must(f"fetching {directory}/{name}", ["tar", "-C", directory, "-cf", "-", "--", name], stdout=archive)
            archive.seek(0)
            return await asyncio.to_thread(unpack, archive, target)

    async def build(self, image, context):
        """Do the steps that read_dockerfile() found. `context` is the task's environment/ folder."""
        if not shutil.which("asciinema", path=INSIDE_PATH):
            # without it Terminus-2 spends minutes on apt-get, pip and GitHub, none of which can be reached
            self.notes.append("asciinema is missing, so there is no recording.cast (apt-get install -y asciinema)")
            await self.must("asciinema", f"cd /usr/local/bin; printf %s {shlex.quote(NO_ASCIINEMA)} >asciinema; chmod 755 asciinema")
        for kind, *step in image["steps"]:
            if kind == "mkdir":
                await self.must("WORKDIR", ["mkdir", "-p", *step])
            elif kind == "copy":
                sources, target, workdir, flags = step
                entries, directory = copy_entries(context, sources, target, workdir)
                await self.put(entries, directory, flags.get("chmod"))
                if flags.get("chown"):
                    names = [os.path.join(directory, name) for _, name in entries]
                    await self.must("COPY --chown", ["chown", "-R", flags["chown"], *names])
            else:
                command, workdir, user, env = step
                await self.must(f"{context}/Dockerfile: RUN {command}", ["sh", "-c", command], cwd=workdir, user=user, env=env)

    def stop(self):
        """End everything inside and wait until the supervisor has cleaned up. May be called twice."""
        if self._owner_fd is not None:
            os.close(self._owner_fd)  # the supervisor sees the end of the pipe, as it would if this process died
            self._owner_fd = None
        if self._supervisor is not None:
            try:
                self._supervisor.wait(20)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()  # parent-death signals take the rest; sweep() takes the directory
                self._supervisor.wait()
            self._supervisor = None


async def run_to_files(argv, timeout_s=None, stdin=None, stdout=None):
    """Run a command; its output goes to files, because a background child that keeps a pipe open would block the caller."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin = stdin or asyncio.subprocess.DEVNULL
        p = await asyncio.create_subprocess_exec(*argv, stdin=stdin, stdout=stdout or out, stderr=err, start_new_session=True)
        try:
            await asyncio.wait_for(p.wait(), timeout_s)
        except BaseException as e:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            await asyncio.shield(p.wait())
            if isinstance(e, asyncio.TimeoutError):
                raise TimeoutError(f"Command timed out after {timeout_s} seconds") from None
            raise
        texts = []
        for f in (out, err):
            f.seek(0)
            text = f.read(OUTPUT_LIMIT).decode(errors="replace")
            texts.append(text + "\n[more output was cut off]\n" if f.read(1) else text)
        # as a shell reports it: 128 + signal
        return (128 - p.returncode if p.returncode < 0 else p.returncode), *texts


# ---------------------------------------------------------------------------------------------------- Dockerfile


def read_environment(context):
    """read_dockerfile() of a task's environment/ folder, refusing what only Docker can do."""
    import yaml

    compose = Path(context, "docker-compose.yaml")
    if compose.exists():
        try:
            services = yaml.safe_load(compose.read_text())["services"]
            asked = services["main"]
            needs_docker = len(services) > 1 or asked["network_mode"] != "none" or not asked.items() <= COMPOSE_HERE.items()
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
            needs_docker = True
        if needs_docker:
            raise LocalEnvError(f"{compose}: more than a main service without network; {ADVICE}")
    if not Path(context, "Dockerfile").exists():
        raise LocalEnvError(f"{context}/Dockerfile: not found, and an image by name cannot be had without Docker; {ADVICE}")
    return read_dockerfile(Path(context, "Dockerfile"))


def instructions(text):
    """[(line number, NAME, rest)] of a Dockerfile: comments dropped, continued lines joined. As in Docker an empty line does not end an
    instruction that goes on, and the end of the file does."""
    found, held, first = [], "", 0
    for n, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (held and not line.strip()):
            continue
        first = first if held else n
        held += line.rstrip()
        if re.search(r"(^|[^\\])\\$", held):
            held = held[:-1] or " "
            continue
        found.append((first, held))
        held = ""
    words = [(n, *whole.split(None, 1), "") for n, whole in [*found, (first, held)] if whole.strip()]
    return [(n, name.upper(), rest.strip()) for n, name, rest, *_ in words]


def strings(text):
    """The strings of a JSON array, None where Docker takes the text for words. Raises ValueError for an array of something else, as Docker does."""
    try:
        found = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return None
    if found is not None and not all(isinstance(x, str) for x in found):
        raise ValueError(f"found {text}, expected strings only in a JSON array")
    return found


def expand(text, variables):
    """$NAME, ${NAME} and ${NAME:-default} as Docker expands them."""

    def value(m):
        name, default = m[1] or m[2], m[3]
        return variables.get(name) or default or ""

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text)


def read_dockerfile(path):
    """What of a Dockerfile can be done on the machine's own root.

    Returns {"steps": [(kind, ...)], "workdir", "user", "env", "packages"}; steps are ("mkdir", dir),
    ("copy", sources, target, workdir, {"chmod", "chown"}) and ("run", command, workdir, user, env), in order.
    Raises LocalEnvError (file, line, way out) for what needs a real image.
    """
    workdir, user, env, arguments, packages, steps, stages, shell = "/", None, {}, {}, [], [], 0, None

    def refuse(n, what):
        return LocalEnvError(f"{path}:{n}: {what} needs a container image; {ADVICE}")

    data = b""
    try:
        data = Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        n = data[: e.start].count(b"\n") + 1
        raise LocalEnvError(f"{path}:{n}: found the byte {data[e.start]:#04x}, expected text in UTF-8; mend it") from None
    except OSError as e:
        raise LocalEnvError(f"{path}: {e.strerror}") from None
    for n, name, rest in instructions(text):
        variables = {**arguments, **env}
        try:
            if name == "FROM":
                stages += 1
                if stages > 1:
                    raise refuse(n, "a second build stage")
            elif name == "WORKDIR":
                workdir = os.path.normpath(os.path.join(workdir, expand(rest.strip("\"'"), variables)))
                steps.append(("mkdir", workdir))
            elif name in ("ENV", "ARG"):
                into = env if name == "ENV" else arguments
                if name == "ENV" and not re.match(r"\w+=", rest):
                    key, _, value = rest.partition(" ")
                    into[key] = expand(value.strip(), variables)
                else:
                    for word in shlex.split(rest):
                        key, _, value = word.partition("=")
                        into[key] = expand(value, variables)
            elif name == "USER":
                user = expand(rest, variables).split(":")[0]
            elif name in ("COPY", "ADD"):
                flags, words = {}, rest
                while words.startswith("--"):
                    flag, words = (words.split(None, 1) + [""])[:2]
                    key, _, value = flag[2:].partition("=")
                    flags[key] = expand(value, variables)
                listed = strings(words)
                if listed is None and re.match(r'\[\s*"', words):
                    raise ValueError(f'found {words}, expected a JSON array of strings such as ["a", "b"]')
                words = [expand(w, variables) for w in (shlex.split(words) if listed is None else listed)]
                if unknown := set(flags) - {"chmod", "chown"}:
                    raise refuse(n, f"{name} --{min(unknown)}")
                if "chmod" in flags and not re.fullmatch("[0-7]{3,4}", flags["chmod"]):
                    raise ValueError(f"--chmod: found '{flags['chmod']}', expected an octal number such as 755")
                if name == "ADD" and any("://" in w or re.search(r"\.(tar|tgz|tar\.\w+)$", w) for w in words[:-1]):
                    raise refuse(n, "ADD of an address or an archive")
                if len(words) < 2 or any(w.startswith("<<") for w in words):
                    raise refuse(n, f"this form of {name}")
                steps.append(("copy", words[:-1], words[-1], workdir, flags))
            elif name == "RUN":
                if rest.startswith("--") or "<<" in rest:
                    raise refuse(n, "RUN with options or a here-document")
                listed = strings(rest)
                wanted, rest = split_apt(rest if listed is None else shlex.join(listed))
                packages += [p for p in wanted if p not in packages]
                if rest:
                    rest = shlex.join([*shell, rest]) if shell and listed is None else rest
                    steps.append(("run", rest, workdir, user, {**variables}))
            elif name == "SHELL":
                if not (shell := strings(rest)):
                    raise ValueError(f'found {rest}, expected a JSON array of strings such as ["/bin/bash", "-c"]')
            elif name not in ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "MAINTAINER"):
                raise LocalEnvError(f"{path}:{n}: {name}: not a Dockerfile instruction known here; {ADVICE}")
        except ValueError as e:
            raise LocalEnvError(f"{path}:{n}: {name}: {e}; mend the line, or {ADVICE}") from None
    return {"steps": steps, "workdir": workdir, "user": user, "env": env, "packages": packages}


# A line of shell, as far as commands must be told apart: what is quoted or substituted is part of a word.
SHELL_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* | (?P<redirect>(?:\d+|&)?(?:>>|>\||[<>]&|<>|[<>])\s*) | (?P<operator>&&|\|\||;;|[;|&()])
    | (?P<word>(?: [^\s;|&()<>"'\\`$] | \\. | '[^']*' | "(?:\\.|\$\((?:[^()]|\([^()]*\))*\)|[^"\\`])*"
                 | \$\((?:[^()]|\([^()]*\))*\) | `[^`]*` | \$)+)""",
    re.VERBOSE | re.DOTALL,
)
CLOSES = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}", "(": ")"}
RESERVED = {*CLOSES, *CLOSES.values(), "then", "else", "elif", "do", "!"}
APT_VALUE = re.compile(r"-[yqdfmsubV]*[otcaP]|--(option|target-release|default-release|config-file|host-architecture|build-profiles)")
APT_FILES = re.compile(r"/var/(lib|cache)/apt(/|$)")


def commands_of(line):
    """([(text, words, [words of a command inside it])], [operator between two]) of a line of shell: the commands of its outermost list, an if, a
    loop or parentheses being one; words without redirections. Raises ValueError for what cannot be taken apart."""
    commands, operators, open_ = [], [], []
    at = begin = end = 0
    words, inside, redirected = [], [], False
    while at < len(line):
        m = SHELL_TOKEN.match(line, at)
        if not m:
            raise ValueError(f"found no end of a quote or bracket from {line[at : at + 30]!r} on")
        at = m.end()
        word, operator = m["word"], m["operator"]
        first = operator or (word if not redirected and set(words) <= RESERVED else None)  # only there a word may be the shell's own
        if open_ and first == open_[-1]:
            open_.pop()
        elif first in CLOSES:
            open_.append(CLOSES[first])
        if operator and not open_ and operator != ")":
            commands.append((line[begin:end].strip(), words, inside))
            operators.append(operator)
            begin, end, words, inside, redirected = at, at, [], [], False
        elif operator:
            inside, words, end, redirected = [*inside, words], [], at, False
        elif m["redirect"]:
            redirected, end = True, at
        elif word:
            words, end, redirected = words if redirected else [*words, word], at, False
    if open_:
        raise ValueError(f"found no '{open_[-1]}'")
    return [*commands, (line[begin:end].strip(), words, inside)], operators


def apt_call(words):
    """(what apt-get is to do, [what with]) of a command's words; (None, []) where it is another command."""
    while words and (words[0] in RESERVED or re.match(r"\w+=", words[0])):
        words = words[1:]
    if words[:1] not in (["apt-get"], ["apt"]):
        return None, []
    rest, plain = iter(words[1:]), []
    for w in rest:
        if APT_VALUE.fullmatch(w):
            next(rest, None)
        elif not w.startswith("-"):
            plain.append(w)
    return (plain or [""])[0], plain[1:]


def split_apt(command):
    """(packages that apt-get installs, what remains of the RUN line): the machine's packages are checked, not installed.

    What remains is the line as it was, without apt-get's commands and their cleaning up; where one's success decides what else runs (||, a pipe),
    `:` stands for it. Raises ValueError for an apt-get inside if, for or parentheses and for packages whose names only a shell can tell."""
    if not re.search(r"\bapt(-get)?\s", command):
        return [], command
    try:
        commands, operators = commands_of(command)
    except ValueError:
        if re.search(r"\bapt(-get)?\b.*\binstall\b", command):
            raise
        return [], command
    packages, kept = [], []
    for text, words, inside in commands:
        if any(apt_call(w)[0] in ("install", "update", "upgrade") for w in ([*inside, words] if inside else [])):
            raise ValueError(f"found apt-get in '{text:.60}', expected it outside of if, loops, braces and parentheses")
        verb, names = apt_call(words) if not inside else (None, [])
        if verb == "install":
            for name in (shlex.split(n)[0] for n in names):
                if not re.match(r"[A-Za-z0-9]", name) or re.search(r"[$`*?]", name):
                    raise ValueError(f"apt-get install: found '{name}', expected the name of a package")
                packages.append(re.split("[=:/]", name)[0])
        if words[:1] == ["rm"] and any(APT_FILES.match(w) for w in words):
            words = [w for w in words if not APT_FILES.match(w)]
            text = " ".join(words) if any(not w.startswith("-") for w in words[1:]) else None
        kept.append(None if verb is not None else text)
    if not set(operators) <= {"&&", ";"}:
        kept = [":" if text is None else text for text in kept]
    rest, joint = "", None
    for text, before in zip(kept, ["", *operators], strict=True):
        joint = before if joint in (None, "&&", "") else joint  # a ; on either side of what is left out stays one
        if text is None:
            continue
        rest += (f"{'' if joint == ';' else ' '}{joint} " if rest else "") + text
        joint = None
    return packages, rest.strip()


def missing_packages(packages):
    """Those that the machine has neither as an installed Debian package nor as commands on the path inside."""
    if not packages:
        return []
    installed = set()
    if shutil.which("dpkg-query"):
        p = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages], capture_output=True, text=True)
        installed = {line.split()[0] for line in p.stdout.splitlines() if line.endswith(" installed")}
    return [p for p in packages if p not in installed and not all(shutil.which(c, path=INSIDE_PATH) for c in PACKAGE_COMMANDS.get(p, [p]))]


def used_packages(packages, task):
    """Those of an image's packages that a task uses: `packages` under [metadata] of its task.toml, else all. Images of many tasks share layers,
    and a machine need not have what a task never calls."""
    try:
        declared = tomllib.loads((Path(task) / "task.toml").read_text()).get("metadata", {}).get("packages")
    except (OSError, tomllib.TOMLDecodeError):
        declared = None
    return packages if declared is None else [p for p in packages if p in declared or p == "tmux"]


def check_packages(packages, where):
    """Raise LocalEnvError when the machine lacks packages that a task uses. asciinema may be missing (no recording then)."""
    packages = used_packages(packages, where)
    if missing := [p for p in missing_packages(packages) if p != "asciinema"]:
        raise LocalEnvError(f"{where}: this machine lacks {', '.join(missing)}: apt-get install -y {' '.join(missing)}, or {ADVICE}")


# ---------------------------------------------------------------------------------------------------- files in and out


def pack(into, entries, chmod=None):
    """Write a tar of (path, name inside) entries, all owned by root; directories with all they hold."""

    def own(member):
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if chmod:
            member.mode = int(chmod, 8)
        return member

    with tarfile.open(fileobj=into, mode="w") as tar:
        for path, name in entries:
            tar.add(path, arcname=name, filter=own)
    into.seek(0)


def unpack(archive, target):
    """Extract what came from inside: no devices, nothing that points outside of `target`. Returns the names left out."""
    left_out = []

    def safe(member, destination):
        if member.isdev():
            return None
        try:
            return tarfile.data_filter(member, destination)
        except tarfile.FilterError:
            left_out.append(member.name)
            return None

    with tarfile.open(fileobj=archive, mode="r|") as tar:
        tar.extractall(target, filter=safe)
    return left_out


def copy_entries(context, sources, target, workdir):
    """(entries for pack(), directory they go to) of a COPY line, by Docker's rules."""
    entries = []
    found = []
    for source in sources:
        hits = sorted(glob.glob(os.path.join(glob.escape(str(context)), source.lstrip("/"))))
        if not hits:
            raise LocalEnvError(f"{context}: COPY {source}: no such file in the task's environment/ folder")
        found += hits
    to_directory = target.endswith("/") or target in (".", "..") or len(found) > 1
    destination = os.path.normpath(os.path.join(workdir, target))
    for hit in found:
        if not is_below(os.path.realpath(hit), os.path.realpath(context)) and os.path.realpath(hit) != os.path.realpath(context):
            raise LocalEnvError(f"{hit}: COPY from outside the task's environment/ folder")
        if os.path.isdir(hit):
            entries += [(os.path.join(hit, name), name) for name in sorted(os.listdir(hit))]
            to_directory = True
        else:
            entries.append((hit, os.path.basename(hit)))
    if not to_directory:
        return [(found[0], os.path.basename(destination))], os.path.dirname(destination)
    return entries, destination


# ---------------------------------------------------------------------------------------------------- Harbor

_said = set()


def say_once(text):
    if text not in _said:
        _said.add(text)
        print(f"local_env: {text}", file=sys.stderr)


def private_paths(task):
    """What of the runner must not be seen inside, should it lie below a directory that is shown."""
    home = os.environ.get("HOME") or "/root"
    paths = [Path.home(), home, Path(__file__).parent, os.getcwd(), tempfile.gettempdir(), task, Path(task).parent]
    return paths + ([sys.prefix] if sys.prefix != sys.base_prefix else [])


def default_size_mb(storage_mb):
    return min(storage_mb or 4096, ram_mb() // 4)


def _harbor_class():
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
    from harbor.models.task.config import NetworkMode

    class LocalEnvironment(BaseEnvironment):
        """See the module's text. Start it with Harbor: `-e local_env:LocalEnvironment`."""

        def __init__(self, *args, size_mb=None, upper_dir=None, expose="", namespaces=None, **kwargs):
            if namespaces not in (None, "root", "user"):
                raise ValueError(f"namespaces={namespaces!r}: expected root or user")
            self._size_mb, self._upper_dir, self._namespaces = size_mb, upper_dir, namespaces
            self._expose = [d for d in (expose.split(",") if isinstance(expose, str) else expose) if d]
            self._ns = self._image = None
            super().__init__(*args, **kwargs)  # validates, and reads self.capabilities

        @staticmethod
        def type():
            return "local"

        @property
        def capabilities(self):
            return EnvironmentCapabilities(mounted=True, disable_internet=True)

        @classmethod
        def preflight(cls):
            try:
                detect_mode()
            except LocalEnvError as e:
                raise SystemExit(f"local_env: {e}") from None

        def _validate_definition(self):
            self._image = read_environment(self.environment_dir)

        def _private_network(self):
            # Harbor's default is "public"; here a task has to ask for it
            asked = "network_mode" in self.task_env_config.model_fields_set
            return not (asked and self._network_policy.network_mode == NetworkMode.PUBLIC)

        @property
        def _workdir(self):
            return self.task_env_config.workdir or self._image["workdir"]

        async def start(self, force_build):
            task, config = self.environment_dir.parent, self.task_env_config
            check_packages(self._image["packages"], task)
            trial = Path(self.trial_paths.trial_dir)
            mounts = getattr(self, "_host_mounts", self._mounts)  # Harbor 0.25's name, 0.24's
            self._ns = Namespace(
                name=self.environment_name,
                mode=self._namespaces,
                private_network=self._private_network(),
                size_mb=int(self._size_mb or default_size_mb(config.storage_mb)),
                upper_dir=self._upper_dir,
                expose=self._expose,
                private=[*private_paths(task), trial, trial.parent],
                binds=[(m["source"], m["target"], m.get("read_only")) for m in mounts if m["type"] == "bind"],
                cpus=self._resource_value("cpu"),
                memory_mb=self._resource_value("memory"),
            )
            try:
                await asyncio.to_thread(self._ns.start)
                await self._ns.build(self._image, self.environment_dir)
                await self._ns.must("working directory", ["mkdir", "-p", self._workdir])
                await self.ensure_dirs(self._mount_targets(writable_only=True))
                await self._upload_environment_dir_after_start()
            except BaseException:
                await asyncio.shield(asyncio.to_thread(self._ns.stop))
                raise
            say_once(f"namespaces of {self._ns.mode}" + "".join(f"; {n}" for n in self._ns.notes))
            if not self._ns.private_network:
                say_once(f"{task.name} asked for the network: it shares this machine's, loopback included")

        async def stop(self, delete):
            if self._ns is not None:
                await asyncio.to_thread(self._ns.stop)

        async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
            user = self._resolve_user(user)
            env = {**self._image["env"], **(self._merge_env(env) or {})}
            user = self._image["user"] if user is None else user
            rc, out, err = await self._ns.run(command, cwd or self._workdir, env, user, timeout_sec)
            return ExecResult(stdout=out, stderr=err, return_code=rc)

        async def upload_file(self, source_path, target_path):
            directory, name = os.path.split(str(target_path))
            await self._ns.put([(source_path, name)], directory or "/")

        async def upload_dir(self, source_dir, target_dir):
            await self._ns.put([(os.path.join(source_dir, name), name) for name in sorted(os.listdir(source_dir))], str(target_dir))

        async def download_file(self, source_path, target_path):
            directory, name = os.path.split(str(source_path))
            with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as d:
                await self._ns.get(directory or "/", name, d)
                got = Path(d, name)
                if got.is_symlink() or not got.is_file():
                    raise LocalEnvError(f"{source_path}: not a plain file")
                Path(target_path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(got, target_path)

        async def download_dir(self, source_dir, target_dir):
            for name in await self._ns.get(str(source_dir), ".", target_dir):
                self.logger.warning(f"{source_dir}: {name} left out: it points outside")

    return LocalEnvironment


def __getattr__(name):
    # Harbor is imported only when its class is asked for: --check must work before Harbor is installed
    if name == "LocalEnvironment":
        globals()[name] = _harbor_class()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------------- command line


def task_folder(task):
    """A task's folder: as named, or of tasks/local. Raises LocalEnvError when there is none."""
    found = [p for p in (Path(task), Path(__file__).resolve().parent / "tasks" / "local" / task) if (p / "environment").is_dir()]
    if not found:
        raise LocalEnvError(f"task '{task}': no folder of this name with an environment/ in it, neither here nor in tasks/local")
    return found[0]


def check(tasks):
    """Print what works here; returns the exit status."""
    bad = []
    try:
        ns = Namespace(size_mb=64, cpus=1, memory_mb=512).start()
        rc, out, err = asyncio.run(ns.run("echo ok >/usr/local/x && cat /usr/local/x && tmux -V"))
        ns.stop()
        print(f"local_env: works, namespaces of {ns.mode}" + "".join(f"\nlimited: {n}" for n in ns.notes))
        if rc:
            print(f"limited: {err.strip()}")
    except LocalEnvError as e:
        bad.append(f"local_env: {e}")
    for task in tasks:
        try:
            check_packages(read_environment(task_folder(task) / "environment")["packages"], task)
        except LocalEnvError as e:
            bad.append(f"local_env: {e}")
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


async def run_once(task, command):
    """Build a task's environment and run one command in it; returns the exit status."""
    task = task_folder(task)
    context = task / "environment"
    image = read_environment(context)
    check_packages(image["packages"], task)
    ns = Namespace(name=task.name, private=private_paths(task.resolve()), size_mb=default_size_mb(None)).start()
    try:
        await ns.build(image, context)
        rc, out, err = await ns.run(command, image["workdir"], image["env"], image["user"])
    finally:
        ns.stop()
    print(out, end="")
    print(err, end="", file=sys.stderr)
    return rc


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", metavar="TASK", help="say how it works here, and whether these tasks find their programs")
    parser.add_argument("--run", nargs=2, metavar=("TASK", "COMMAND"), help="run one command in the environment of a task")
    args = parser.parse_args(argv)
    try:
        if args.run:
            return asyncio.run(run_once(*args.run))
        if args.check is not None:
            return check(args.check)
    except LocalEnvError as e:
        print(f"local_env: {e}", file=sys.stderr)
        return 1
    parser.print_usage(sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
