"""Vectors are kept to be sent again, but no more of them than fit."""

import msgspec

from gpuagent.agent.generation import Generation
from gpuagent.agent.kept_vectors import KeptVectors


def ended(name: str, num_bytes: int) -> Generation:
    generation = Generation(name, "gw", "r", 1, 4, 0.0)
    end = msgspec.structs.replace(generation.ending("stop"), embeddings=(bytes(num_bytes),))
    generation.record(end if num_bytes else generation.ending("stop"))
    return generation


def test_the_worked_example() -> None:
    kept = KeptVectors(3_000)
    a, b, c = ended("a", 2_000), ended("b", 1_000), ended("c", 1_000)
    for one in (a, b, c):
        kept.keep(one)
    assert kept.num_bytes == 2_000
    (lost,) = a.since(0)
    assert (lost.finish_reason, lost.error_code, lost.embeddings) == ("error", "engine_lost", ())
    (found,) = c.since(0)
    assert (found.finish_reason, len(found.embeddings[0])) == ("stop", 1_000)


def test_the_newest_is_kept_however_large() -> None:
    kept = KeptVectors(10)
    large = ended("large", 1_000)
    kept.keep(large)
    assert large.terminal is not None and large.terminal.embeddings


def test_what_is_forgotten_takes_no_room() -> None:
    """Also among generations of text, which hold no vectors, and after some were dropped."""
    kept = KeptVectors(2_500)
    all_of_them = [ended("t", 0), ended("a", 1_000), ended("b", 1_000), ended("c", 1_000)]
    for one in all_of_them:
        kept.keep(one)
    assert kept.num_bytes == 2_000
    for one in all_of_them:
        kept.forget(one)
    assert kept.num_bytes == 0
