"""Named sessions of an LLM server, as its clients see them: whether they are in use, and how one is closed for certain."""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request

HEADER = "x-session-affinity"
TRY_AGAIN = (408, 425, 429)  # and every 5xx
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0


def by_trial():
    return os.environ.get("TRAJOULE_SESSIONS") == "trial"


def close_session(url, session, deadline_s=120.0, clock=time.monotonic, sleep=time.sleep):
    """DELETE a session, again and again until the server says that it is closed. Raises RuntimeError.

    Closing twice does no harm, so whatever may pass (no connection, no answer in time, 408, 425, 429, 5xx) is tried again until
    `deadline_s` after the first try; any other answer is final.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/sessions/{urllib.parse.quote(session, safe='')}", method="DELETE")
    end, pause, tries = clock() + deadline_s, FIRST_PAUSE_S, 0
    while True:
        tries += 1
        try:
            with direct.open(request, timeout=max(0.1, min(30.0, end - clock()))) as r:
                status, text = r.status, r.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as e:
            status, text = e.code, e.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as e:
            status, text = None, str(getattr(e, "reason", e))
        if status is not None and 200 <= status < 300 and says_closed(text):
            return tries
        passing = status is None or status in TRY_AGAIN or status >= 500
        if not passing or clock() + pause > end:
            found = "no answer" if status is None else f"HTTP {status}"
            raise RuntimeError(
                f"session {session} was not closed: DELETE {request.full_url} gave {found} ({text.strip()[:200]}) at try {tries}; "
                f"expected 200 with \"closed\": true; the job stops, since the server may still hold the session's slot"
            )
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def says_closed(text):
    try:
        return json.loads(text).get("closed") is True
    except (ValueError, AttributeError):
        return False
