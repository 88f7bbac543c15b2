"""Harbor's Docker environment that notes how long pull and build took (docker.json in the trial's folder), apart from the start.

No program: Harbor imports it, as oracle.py tells it to.
"""

import asyncio
import sys
import time

if __name__ == "__main__":
    print(__doc__.rstrip())
    sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
from harbor.environments.docker.docker import DockerEnvironment

import energylib


async def digest(image):
    """name@sha256:… of an image that a registry served, its own id when it is of this machine."""
    form = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    p = await asyncio.create_subprocess_exec("docker", "image", "inspect", "--format", form, image, stdout=asyncio.subprocess.PIPE)
    return (await p.communicate())[0].decode().strip() or None


class TimedDocker(DockerEnvironment):
    """Differs from Harbor's own in one thing: a prebuilt image is pulled by a command of its own, not on the way by `up`."""

    async def _run_docker_compose_command(self, command, *args, **kwargs):
        if command[0] == "up" and self._use_prebuilt:
            await self._timed("pull", ["pull", "--policy", "missing"])
        if command[0] == "build":
            return await self._timed("build", command, *args, **kwargs)
        return await super()._run_docker_compose_command(command, *args, **kwargs)

    async def _timed(self, phase, command, *args, **kwargs):
        begin, failed = time.monotonic(), phase
        try:
            result = await super()._run_docker_compose_command(command, *args, **kwargs)
            failed = None
            return result
        finally:
            note = {"phase": phase, "seconds": round(time.monotonic() - begin, 3), "failed": failed is not None}
            if phase == "pull" and not failed:
                note["image"] = await digest(self.task_env_config.docker_image)
            energylib.write_json_atomic(self.trial_paths.trial_dir / "docker.json", note)
