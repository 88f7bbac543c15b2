"""What runs inside Harbor: mini-SWE-agent with a session of its own per trial, and the hook that closes it.

    harbor run --agent harbor_side:SessionAgent --plugin harbor_side:CloseSessions --plugin-kwarg url=http://127.0.0.1:8000 ...

A server that keeps KV state per session is told by the header x-session-affinity which one a call belongs to: Harbor's trial UUID, which is
also `id` in the trial's result.json. Harbor calls the END hook before it gives the trial's slot to the next one, so a server with room for
N sessions is never asked for N + 1. TRAJOULE_SESSIONS=trial switches both on; without it they do nothing.
"""

import asyncio
import json

from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.models.job.plugin import BaseJobPlugin
from harbor.trial.hooks import TrialEvent
from kv_sessions import HEADER, by_trial, close_session


class SessionAgent(MiniSweAgent):
    """mini-SWE-agent whose calls carry the trial's UUID."""

    async def run(self, instruction, environment, context):
        if by_trial():
            config = json.loads(self._config_yaml or "{}")  # the runner writes it, as JSON
            kwargs = config.setdefault("model", {}).setdefault("model_kwargs", {})
            kwargs["extra_headers"] = {**(kwargs.get("extra_headers") or {}), HEADER: str(self.context_id)}
            self._config_yaml = json.dumps(config)
        await super().run(instruction, environment, context)


class PreinstalledAgent(SessionAgent):
    """The same for task images that bring mini-SWE-agent: nothing is installed, so containers need no network but to the server."""

    async def install(self, environment):
        found = await environment.exec("command -v mini-swe-agent || ls /root/.local/bin/mini-swe-agent")
        if found.return_code:
            raise RuntimeError(
                "mini-swe-agent is not in the task's image, but [terminal_bench] agent_preinstalled = true: "
                "install it in the image's Dockerfile, or remove the key"
            )

    def get_version_command(self):
        return "MSWEA_CONFIGURED=true mini-swe-agent --help 2>&1 | grep -o 'version [0-9][0-9.]*[0-9]' | head -n 1"


class CloseSessions(BaseJobPlugin):
    """Closes each trial's session at the server before the trial's slot is given on; a session that stays open stops the job."""

    def __init__(self, url, deadline_s=120.0, **kwargs):
        super().__init__(**kwargs)
        self.url, self.deadline_s = url, float(deadline_s)

    async def on_job_start(self, job):
        if by_trial():
            job.add_hook(TrialEvent.END, self.close)

    async def close(self, event):
        await asyncio.to_thread(close_session, self.url, str(event.trial_id), self.deadline_s)

    async def on_job_end(self, job_result):
        pass
