"""A checkpoint: how long a log was at a time, and its Merkle root, signed and chained.

The text is C2SP's tlog-checkpoint, so its tools read it; the lines after the root are ours::

    engine/events                                  origin: the installation and the log
    2048                                           records so far
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=   Merkle root over them
    time 1700000060.250                            Unix seconds, when it was sealed
    first 1049                                     the segment that it adds: 1049 to 2048
    record event/1                                 the shape of that segment's leaves
    previous 6Qx…=                                 SHA-256 of the checkpoint before; "-" at first
    chain dO2…=                                    the hash chain's value at 2048 (events only)

Since each names the one before by its hash, the newest signature stands for all of them: whoever
trusts its key needs no older key to check what older ones had signed.
"""

import re
from base64 import b64encode
from dataclasses import dataclass

from controlplane.application.notes import NoteError, unbase64

_TEXT = re.compile(
    r"(?P<origin>[^\s+]+)\n(?P<size>[1-9][0-9]{0,18})\n(?P<root>[A-Za-z0-9+/=]+)\n"
    r"time (?P<at>[0-9]{1,12}\.[0-9]{3})\nfirst (?P<first>[1-9][0-9]{0,18})\n"
    r"record (?P<record>[a-z]+/[0-9]+)\nprevious (?P<previous>-|[A-Za-z0-9+/=]+)\n"
    r"(?:chain (?P<chain>[A-Za-z0-9+/=]+)\n)?"
)


@dataclass(frozen=True)
class Checkpoint:
    """``root``, ``previous`` and ``chain`` are 32 bytes each, or empty where there is none."""

    origin: str
    size: int
    root: bytes
    at: float
    first: int
    record: str
    previous: bytes = b""
    chain: bytes = b""

    @property
    def log(self) -> str:
        return self.origin.rpartition("/")[2]

    @property
    def text(self) -> str:
        previous = _base64(self.previous) if self.previous else "-"
        lines = [self.origin, str(self.size), _base64(self.root), f"time {self.at:.3f}"]
        lines += [f"first {self.first}", f"record {self.record}", f"previous {previous}"]
        if self.chain:
            lines.append(f"chain {_base64(self.chain)}")
        return "\n".join(lines) + "\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """From a note's text; raises NoteError for anything but what ``Checkpoint.text`` writes."""
    found = _TEXT.fullmatch(text)
    if not found:
        raise NoteError("not a checkpoint")
    checkpoint = Checkpoint(
        origin=found["origin"],
        size=int(found["size"]),
        root=unbase64(found["root"]),
        at=float(found["at"]),
        first=int(found["first"]),
        record=found["record"],
        previous=b"" if found["previous"] == "-" else unbase64(found["previous"]),
        chain=unbase64(found["chain"]) if found["chain"] else b"",
    )
    hashes = (checkpoint.root, checkpoint.previous, checkpoint.chain)
    if any(len(one) not in (0, 32) for one in hashes) or checkpoint.text != text:
        raise NoteError("not a checkpoint")
    return checkpoint


def _base64(raw: bytes) -> str:
    return b64encode(raw).decode()
