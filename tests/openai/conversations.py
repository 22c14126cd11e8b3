"""Many conversations at once with one model, and how much of each turn was found cached."""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

REPORTED_S = 3.0  # until every node has reported
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be")


@dataclass
class Turns:
    """Of all turns after the first: tokens that a replica could have cached, that it had, and the
    seconds that each turn took."""

    repeated: int = 0
    cached: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, before: int, num_cached: int, began: float) -> None:
        """A turn that repeats ``before`` tokens and was sent at ``began``."""
        self.repeated += before
        self.cached += min(before, num_cached)
        self.seconds.append(time.perf_counter() - began)

    @property
    def share(self) -> float:
        return self.cached / self.repeated

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


async def converse(
    url: str,
    key: str,
    model: str,
    number: int,
    turns: int,
    think_s: tuple[float, float],
    seed: int = 0,
    opening: int = 80,
) -> Turns:
    """``number`` conversations of ``turns`` turns, each ``think_s`` (from, to) after a reply;
    the first has ``opening`` words of its own."""
    found, chance = Turns(), random.Random(seed)
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=number)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=60, limits=limits
    ) as client:
        await asyncio.gather(
            *(_one(client, model, turns, think_s, opening, random.Random(chance.random()), found)
              for _ in range(number))
        )  # fmt: skip
    return found


async def apart(url: str, key: str, model: str, number: int, seed: int = 0) -> Turns:
    """The second turns of ``number`` conversations, one after the other and on idle replicas, whose
    first turns came at once: where they go is then no matter of load."""
    found, chance = Turns(), random.Random(seed)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        begun = [[_said("user", _text(chance, 160))] for _ in range(number)]
        before = await asyncio.gather(*(_turn(client, model, messages) for messages in begun))
        await asyncio.sleep(REPORTED_S)
        for messages, (num_tokens, _) in zip(begun, before, strict=True):
            messages.append(_said("user", _text(chance, 12)))
            began = time.perf_counter()
            found.add(num_tokens, (await _turn(client, model, messages))[1], began)
    return found


async def _one(
    client: httpx.AsyncClient,
    model: str,
    turns: int,
    think_s: tuple[float, float],
    opening: int,
    chance: random.Random,
    found: Turns,
) -> None:
    messages = [_said("user", _text(chance, opening))]
    before = 0
    await asyncio.sleep(chance.uniform(0, think_s[1]))
    for turn in range(turns):
        began = time.perf_counter()
        num_tokens, num_cached = await _turn(client, model, messages)
        if turn:
            found.add(before, num_cached, began)
        before = num_tokens
        messages.append(_said("user", _text(chance, 12)))
        await asyncio.sleep(chance.uniform(*think_s))


async def _turn(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, str]]
) -> tuple[int, int]:
    """Tokens of the prompt, and of them those that were cached; the reply is appended."""
    body = {"model": model, "messages": messages, "max_tokens": 8}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    messages.append(_said("assistant", said["choices"][0]["message"]["content"]))
    usage = said["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))
