"""A group's sums in the middle of a step of the native kernels.

A step is one call into C++, which calls back twice a layer (see decoder.cpp): the thread that made
the call sums the hidden states over the ranks, while the others wait. An exception cannot pass
through C++, so it is kept, the rest of the step is computed without sums, and `check` raises it::

    layer 7, output   total(hidden) raises: another rank is gone     kept
    layer 7, down     total is not called any more; the numbers are nobody's
    end               check() raises
"""

import ctypes

import torch
from torch import Tensor

from gpuagent.models.sharding import Shard

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class Sums:
    """What the kernels call; `hidden` is the workspace that holds the hidden states."""

    def __init__(self, shard: Shard, hidden: Tensor) -> None:
        self.shard = shard
        self._flat = hidden.view(-1)
        self._failure: Exception | None = None
        self._callback = _Callback(self._total)

    @property
    def address(self) -> int | None:
        """Of the function, for `structs.Model.total`."""
        return ctypes.cast(self._callback, ctypes.c_void_p).value

    def check(self) -> None:
        """Raise what went wrong in the step."""
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def any(self, marks: Tensor) -> Tensor:
        """Of marks (T,) those that any rank has set: a key or value may be unsound in one rank."""
        return (self.shard.total(marks.float()) > 0).to(torch.uint8)

    def _total(self, _: int, count: int) -> None:
        if self._failure:
            return
        try:
            part = self._flat[:count]
            part.copy_(self.shard.total(part))
        except Exception as error:
            self._failure = error
