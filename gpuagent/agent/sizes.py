"""Sizes in memory, as sentences say them."""

MIB = 1 << 20
UNITS = ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB"))


def size_text(num_bytes: int) -> str:
    """``size_text(1610612736) == "1.5 GiB"``."""
    size, unit = next((one for one in UNITS if num_bytes >= one[0]), (1, "bytes"))
    return f"{num_bytes} bytes" if size == 1 else f"{num_bytes / size:.1f} {unit}"


def at_least(num_bytes: int) -> str:
    """Whole MiB that hold ``num_bytes``: what to ask for."""
    return f"{-(-num_bytes // MIB)} MiB"
