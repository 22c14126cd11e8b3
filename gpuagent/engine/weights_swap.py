"""A model's weights out of the device's memory and back: the host tier where there is a GPU.

    offload(model)             each tensor is copied into pinned host memory, which the bus reads
                               at its full speed, and the model refers to the copy; the device's
                               memory is free as soon as nobody else refers to it
    restore(model, "cuda:0")   the same back; a model that ran there computes the same bits again

Nothing is read from disk, converted or packed on the way back, so it costs bytes over bandwidth:
16 GB of bfloat16 at 50 GB/s are 0.32 s. A tensor that two parts share (an embedding that is the
head too) is moved once and still shared after. Models are plain objects (`models.layers`), so what
they hold is found by walking through their attributes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]


def offload(model: object) -> int:
    """Move a model's tensors into host memory, pinned if there is a GPU; the bytes moved."""
    is_pinned = torch.cuda.is_available()

    def move(tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return copy.copy_(tensor)

    return _moved(model, move)


def restore(model: object, device: torch.device | str) -> int:
    """Move them onto a device; the bytes moved."""
    return _moved(model, lambda tensor: tensor.to(device, non_blocking=True, copy=True))


def _moved(model: object, move: Move) -> int:
    """Put what `move` gives in the place of every tensor; bytes of all of them."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, or its id could be used again
    for holder, name, tensor in list(_tensors(model)):
        if id(tensor) not in done:
            done[id(tensor)] = tensor, move(tensor)
        setattr(holder, name, done[id(tensor)][1])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor, _ in done.values())


def _tensors(part: Any) -> Iterator[tuple[object, str, Tensor]]:
    """Each tensor that an object or its parts hold: the holder, the name there, the tensor."""
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            yield part, name, value
        elif isinstance(value, list | tuple):
            for each in value:
                yield from _tensors(each) if hasattr(each, "__dict__") else ()
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _tensors(value)
