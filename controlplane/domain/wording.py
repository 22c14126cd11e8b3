"""Numbers of things in sentences for people."""


def count_of(number: int, noun: str) -> str:
    """``count_of(1, "key") == "1 key"``, ``count_of(2, "key") == "2 keys"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
