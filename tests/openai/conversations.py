"""Many conversations at once with one model, and how much of each turn was found cached."""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be")


@dataclass
class Turns:
    """Of all turns after the first: tokens that a replica could have cached, that it had, and the
    seconds that each turn took."""

    repeated: int = 0
    cached: int = 0
    seconds: list[float] = field(default_factory=list)

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


async def _one(
    client: httpx.AsyncClient,
    model: str,
    turns: int,
    think_s: tuple[float, float],
    opening: int,
    chance: random.Random,
    found: Turns,
) -> None:
    messages = [{"role": "user", "content": _text(chance, opening)}]
    before = 0
    await asyncio.sleep(chance.uniform(0, think_s[1]))
    for turn in range(turns):
        began = time.perf_counter()
        body = {"model": model, "messages": messages, "max_tokens": 8}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        if turn:
            found.repeated += before
            found.cached += min(before, said["usage"]["prompt_tokens_details"]["cached_tokens"])
            found.seconds.append(time.perf_counter() - began)
        before = said["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": _text(chance, 12)})
        await asyncio.sleep(chance.uniform(*think_s))


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))
