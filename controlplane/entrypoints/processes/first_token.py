"""The demo's proof that it works: a replica is loaded, then one token is asked for.

Nothing is asked of the gateway before a node says that the model is ready: a probe that gives up
while it loads would leave a cancelled request in the ledger. What is waited for is said in words,
each thing once, and there is time for it as long as something new is said::

    smollm2: waiting for a place
    smollm2: downloading and converting on node-1
    smollm2: loading on node-1
    None                                             # ready; the probe is sent

A load that fails goes round and says the same again; half an hour of that is a TimeoutError.
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STALL_S = 1800.0  # the first start downloads and converts the model
ANSWER_S = 300.0  # for one token of a loaded model
PAUSE_S = 0.2

_DOING = {
    "assigned": "waiting for {node}",
    "accepted": "waiting for {node} to begin",
    "pending": "waiting for {node} to begin",
    "downloading": "downloading and converting on {node}",
    "loading": "loading on {node}",
    "stopping": "stopping on {node}",
}
_open: Callable[..., Any] = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Probe:
    """Whom to ask, as whom, and about which model."""

    web_url: str
    admin_token: str
    api_url: str
    api_key: str
    model: str

    def waits_for(self) -> str | None:
        """What is still missing, in words; None once a token has come."""
        return self._why_not_ready() or self._why_no_token()

    def _why_not_ready(self) -> str | None:
        try:
            url = f"{self.web_url}/api/v1/placements/?model={self.model}"
            replicas = _asked(url, self.admin_token, None, 30.0)["results"]
        except OSError as error:
            return f"{self.model}: {_said(error)}"
        return loading(self.model, replicas)

    def _why_no_token(self) -> str | None:
        question = {"role": "user", "content": "Hi"}
        body = {"model": self.model, "max_tokens": 1, "messages": [question]}
        try:
            url = f"{self.api_url}/v1/chat/completions"
            used = _asked(url, self.api_key, body, ANSWER_S)["usage"]["completion_tokens"]
            return None if used >= 1 else f"{self.model}: no token in the answer"
        except OSError as error:
            return f"{self.model}: {_said(error)}"


def loading(model: str, replicas: list[dict[str, Any]]) -> str | None:
    """What the replicas are doing, as the admin API lists them; None if one is ready."""
    if any(one["state"] == "ready" for one in replicas):
        return None
    if not replicas:
        return f"{model}: waiting for a place"
    return f"{model}: " + "; ".join(sorted({_doing(one) for one in replicas}))


def _doing(replica: dict[str, Any]) -> str:
    node, state, reason = replica["node_id"], replica["state"], replica["reason"]
    if state in _DOING:
        return _DOING[state].format(node=node)
    return f"{state} on {node}: {reason}" if reason else f"{state} on {node}"


async def first_token(
    waits_for: Callable[[], str | None], say: Callable[[str], None], stall_s: float = STALL_S
) -> None:
    """Return once ``waits_for`` says None; TimeoutError if it says nothing new for ``stall_s``."""
    told: set[str] = set()
    since = time.monotonic()
    while reason := await asyncio.to_thread(waits_for):
        if reason not in told:
            say(reason)
            told.add(reason)
            since = time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise TimeoutError(f"nothing new in {stall_s:.0f} s: {reason}")
        await asyncio.sleep(PAUSE_S)


def _asked(url: str, token: str, body: dict[str, Any] | None, timeout: float) -> Any:
    request = urllib.request.Request(
        url,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with _open(request, timeout=timeout) as response:
        return json.load(response)


def _said(error: OSError) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code}, {message_of(error.read(10_000))}"
    return f"no answer ({error})"


def message_of(body: bytes) -> str:
    """The sentence in an error body of the OpenAI form, else the start of the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
