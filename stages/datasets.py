"""Tasks from anywhere: what a line of a task list means, and what its tasks need that this machine may lack.

    python stages/datasets.py expand tasks/tb2.txt                 # whole data sets and folders of tasks become one line a task
    python stages/datasets.py check tasks/tb2.txt                  # what 00_env_check.sh --tasks prints

A line is a task (a folder with a task.toml, a name in TASKS_DIR, DATASET@VERSION/NAME such as terminal-bench@2.0/fix-git, or
ORG/DATASET@REF/NAME for a package) or many: a folder of tasks, DATASET@VERSION, ORG/DATASET@REF. Data sets are looked up in Harbor's registry,
or in the one that TASK_REGISTRY names: a JSON file (its tasks may be local folders: no network) or a URL.
Exit code: 0, 1 something is missing, 2 bad input.
"""

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this folder, whose files are no packages
from stages import plan  # noqa: E402

DATASET = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)@(?P<version>[\w.-]+)")
DOWNLOADS = re.compile(r"\b(?:curl|wget|apt-get install|apt install|pip3? install|uvx|uv (?:run|pip|tool)|npm (?:i|install|ci)|cargo install|git clone)\b")
HARBOR_S = {"build": 600.0, "setup": 360.0, "verifier": 600.0}  # what Harbor allows where a task says nothing
ENVIRONMENT = {  # what a task.toml may say there -> its types, in words
    "docker_image": (str, "the name of an image, in quotes"), "memory_mb": (int | float, "MB, a number"), "cpus": (int | float, "a number"),
    "gpus": (int, "a whole number"),
}  # fmt: skip
HOST = re.compile(r"https?://([\w.-]+)")


def dataset(text, registry="", task=None):
    """Harbor's description of a data set NAME@VERSION, restricted to one task; None when the text is of another form."""
    m = DATASET.fullmatch(text)
    if not m:
        return None
    part = {"name": m["name"], "ref" if "/" in m["name"] else "version": m["version"]}
    if registry and "/" not in m["name"]:
        part["registry_url" if re.match(r"https?://", registry) else "registry_path"] = registry
    if task:
        part["task_names"] = [f"*/{task}" if "/" in m["name"] else task]
    return part


def folder_of(task, tasks_dir):
    """The folder that a line names, of one task or of many; None when it names none."""
    return next((p for p in (Path(task), Path(tasks_dir) / task) if p.is_dir()), None)


def inside(folder):
    """The folders of the tasks below a folder that is no task itself."""
    return sorted(p.parent for p in folder.glob("*/task.toml")) if folder and not (folder / "task.toml").is_file() else []


async def names_of(part):
    """Task names of a data set. Raises ValueError with the way out when it cannot be had."""
    from harbor.models.job.config import DatasetConfig

    try:
        return [t.get_task_id().get_name() for t in await DatasetConfig(**part).get_task_configs()]
    except Exception as e:  # noqa: BLE001 - whatever the registry's client raises
        raise ValueError(
            f"data set {part['name']}: {e}; without a network take a folder of its tasks, or a registry file in TASK_REGISTRY"
        ) from e


def expand(lines, tasks_dir, registry=""):
    """Single tasks, from what stands in the lines of a list (plan.read_list). Raises ValueError for a line that names nothing that is there."""
    from stages import trial

    tasks = []
    for line, where in lines.items():
        folder, part = folder_of(line, tasks_dir), dataset(line, registry)
        try:
            if part and not folder:
                tasks += [f"{line}/{name.rpartition('/')[2]}" for name in asyncio.run(names_of(part))]
            elif below := inside(folder):
                tasks += [str(p) for p in below]
            else:
                trial.find_task(line, tasks_dir, registry)
                tasks.append(line)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
    return tasks


def one_folder(task, tasks_dir, registry):
    """A task's folder, downloaded into Harbor's cache when it is of a data set. Raises ValueError."""
    folder = folder_of(task, tasks_dir)
    if folder:
        return folder
    from stages import trial

    part = trial.find_task(task, tasks_dir, registry)[1]

    async def fetch():
        from harbor.job_plan import JobPlan
        from harbor.models.job.config import JobConfig

        configs = (await JobPlan.from_config(JobConfig(agents=[{"name": "oracle"}], **part))).task_configs
        return configs[0].get_local_path()

    try:
        return asyncio.run(fetch())
    except Exception as e:  # noqa: BLE001
        raise ValueError(f"cannot be fetched: {e}; without a network take a folder of its tasks (git clone elsewhere)") from e


def config_of(folder):
    """A task's task.toml as a dict. Raises OSError, and ValueError that says what in which file Harbor could not use."""
    path = Path(folder) / "task.toml"
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except ValueError as e:
        why = "it begins with a byte order mark" if not isinstance(e, UnicodeDecodeError) and text.startswith("\ufeff") else e
        raise ValueError(f"{path}: {why}; expected TOML in UTF-8 without a byte order mark; mend the file, or leave the task out") from None
    for section, key in (("environment", "build_timeout_sec"), ("agent", "timeout_sec"), ("verifier", "timeout_sec")):
        table = config.get(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {section}: found {table!r:.60}, expected a table [{section}]")
        value = table.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{path}: {key} of [{section}]: found {value!r:.60}, expected seconds, a number above 0")
    for key, (kinds, what) in ENVIRONMENT.items():
        value = config.get("environment", {}).get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ValueError(f"{path}: {key} of [environment]: found {value!r:.60}, expected {what}")
    return config


def limit_s(folder, agent_s=None):
    """Seconds that a task allows itself: build, agent (or `agent_s`), verifier, and Harbor's own limit for setting the agent up. Raises as
    config_of does."""
    config = config_of(folder)
    build = config.get("environment", {}).get("build_timeout_sec", HARBOR_S["build"])
    agent = agent_s or config.get("agent", {}).get("timeout_sec") or 0
    return build + HARBOR_S["setup"] + agent + config.get("verifier", {}).get("timeout_sec", HARBOR_S["verifier"])


def needs(folder):
    """What a task's folder says that it needs, as a dict."""
    config = config_of(folder)
    environment = config.get("environment", {})
    script = "\n".join(p.read_text(errors="replace") for p in sorted((folder / "tests").glob("*.sh")))
    memory = environment.get("memory_mb")
    if memory is None and (m := re.fullmatch(r"(\d+)\s*([GM])i?B?", str(environment.get("memory", "")).strip(), re.IGNORECASE)):
        memory = int(m[1]) * (1024 if m[2].upper() == "G" else 1)
    return {
        "image": environment.get("docker_image"), "memory_mb": memory, "gpus": environment.get("gpus") or 0,
        "cpus": environment.get("cpus"), "limit_s": limit_s(folder),
        "verifier_downloads": bool(DOWNLOADS.search(script)), "hosts": sorted(set(HOST.findall(script))),
        "network": environment.get("network_mode", "public") != "no-network" and environment.get("allow_internet", True),
    }  # fmt: skip


def reachable(host):
    """Does this machine reach a host by HTTPS? What it answers does not matter. curl, so that the proxy settings of the environment count."""
    return subprocess.run(["curl", "-sS", "-o", "/dev/null", "--max-time", "8", f"https://{host}/"], capture_output=True).returncode == 0


def findings(found, deadline_s, memory_mb, docker=True, reach=reachable):
    """[(ok|note|missing, text, mending)] about `found`, {task: needs}."""
    out = []
    images = {n["image"] for n in found.values() if n["image"]}
    if images and docker:
        absent = {i for i in images if subprocess.run(["docker", "image", "inspect", i], capture_output=True).returncode}
        part = f"{len(absent)} of {len(images)} prebuilt images"
        if not absent:
            out.append(("ok", f"{len(images)} prebuilt image(s) are on this machine", ""))
        elif reach("registry-1.docker.io"):
            limit = "Docker Hub allows 100 pulls in 6 h without a login: docker login raises that"
            out.append(("note", f"{part} are pulled by 05_oracle_check.sh ({limit})", ""))
        else:
            text = f"{part}, such as {min(absent)}, and Docker Hub is not reachable"
            out.append(("missing", text, "docker save them where there is a network, docker load them here"))
    elif images:
        text = f"Docker: {len(images)} task(s) use prebuilt images, such as {min(images)}"
        out.append(("missing", text, "start a Docker engine; ENVIRONMENT=docker"))
    tagged = sorted(i for i in images if "@sha256:" not in i)
    if tagged:
        text = f"{len(tagged)} image(s) are named by tag, not by digest, such as {tagged[0]}: another pull may bring another image"
        out.append(("note", f"{text}; oracle_times.csv records the digest", ""))
    loading = sorted(t for t, n in found.items() if n["verifier_downloads"])
    if loading:
        hosts = sorted({h for t in loading for h in found[t]["hosts"]})
        gone = [h for h in hosts if not reach(h)]
        text = f"the verifiers of {len(loading)} of {len(found)} tasks install packages at test time"
        if gone:
            way = "give the containers a network (proxy, DNS of the Docker daemon), or take tasks whose verifiers are offline"
            out.append(("missing", f"{text}, and {', '.join(gone)} cannot be reached: they would judge right solutions wrong", way))
        else:
            source = f" (from {', '.join(hosts)} and package mirrors)" if hosts else ""
            text += f"{source}: a mirror's bad day looks like a wrong solution"
            out.append(("note", f"{text}; 05_oracle_check.sh says `network` then", ""))
    shut = sorted(t for t in loading if not found[t]["network"])
    if shut:
        text = f"a network for the verifier of {', '.join(shut[:3])}: the task forbids it and its verifier downloads"
        out.append(("missing", text, "leave it out of the list"))
    for what, key, scale, limit, way in (
        ("minutes for build, agent and verifier", "limit_s", 60, deadline_s, "raise TRIAL_DEADLINE_S, which would cut them short"),
        ("MB of memory", "memory_mb", 1, memory_mb, "take a larger machine"),
    ):
        over = sorted(t for t, n in found.items() if n[key] and n[key] > limit)
        if over:
            most = max(found[t][key] for t in over)
            out.append(("missing", f"{len(over)} task(s) want up to {most / scale:.0f} {what}, here are {limit / scale:.0f} ({', '.join(over[:3])})", way))
    wanting = sorted(t for t, n in found.items() if n["gpus"])
    if wanting:
        text = f"a GPU for the tasks themselves: {', '.join(wanting[:3])}"
        out.append(("missing", text, "leave them out: the GPUs here serve the model"))
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["expand", "check"])
    p.add_argument("list")
    p.add_argument("--tasks-dir", default="tasks/local")
    p.add_argument("--registry", default="")
    p.add_argument("--deadline", type=float, default=7200.0)
    a = p.parse_args()
    try:
        tasks = expand(plan.read_list(a.list), a.tasks_dir, a.registry)
    except (OSError, ValueError) as e:
        if a.what == "check" and isinstance(e, ValueError):
            print("missing", e, "see above", sep="\t")
            sys.exit(1)
        print(f"datasets: {e}", file=sys.stderr)
        sys.exit(2)
    if a.what == "expand":
        print("\n".join(tasks))
        return
    found, said = {}, []
    for task in tasks:
        try:
            found[Path(task).name] = needs(one_folder(task, a.tasks_dir, a.registry))
        except (OSError, ValueError) as e:
            text = str(e) if "/task.toml: " in str(e) else f"{task}: {e}"  # a file names its task
            said.append(("missing", text, "mend the task, or leave it out of the list"))
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    docker = shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    said += findings(found, a.deadline, memory_mb, docker)
    if found and not said:
        said.append(("ok", f"{len(found)} task(s): nothing is missing", ""))
    for level, text, way in said:
        print(level, text, way, sep="\t")
    sys.exit(any(level == "missing" for level, _, _ in said))


if __name__ == "__main__":
    main()
