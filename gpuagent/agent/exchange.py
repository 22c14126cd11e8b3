"""A worker's part in moving requests to, or taking them from, the replica's other worker.

The prefill worker offers every request that has a token as soon as the shared memory has room for
its keys and values; until then it goes on decoding it. The decode worker takes in what it is given
as soon as its host blocks have room, in order; a request that can never fit there (its engine has
nothing else to do and still there is no room) computes its keys and values anew.

    prefill    step: first token of "chat"  ->  StepOutputs, HandOver("chat", ...)
    decode     Adopt("chat", ...)           ->  Taken, and "chat" waits for a slot like any other
"""

from collections import deque
from collections.abc import Callable

from gpuagent.agent import ipc
from gpuagent.agent.arena import Arena, Region
from gpuagent.agent.translate import to_engine
from gpuagent.engine.request import Engine, HandOver, RequestRejected
from gpuagent.wire.messages import Delta

Send = Callable[[ipc.FromWorker], None]


class Exchange:
    """The arena, and requests on their way in."""

    def __init__(self, descriptor: int, send: Send) -> None:
        self._arena = Arena(descriptor)
        self._send = send
        self._arriving: deque[ipc.Adopt] = deque()

    @property
    def is_waiting(self) -> bool:
        """True while a request is on its way in."""
        return bool(self._arriving)

    def free(self, start: int) -> None:
        """The other worker has read what was there."""
        self._arena.give_back(start)

    def hand_over(self, replica_id: str, engine: Engine) -> None:
        """Offer what has a token, as far as there is room."""
        for name in engine.decoding():
            region = self._arena.take(engine.num_bytes_of(name))
            if region is None:
                return
            state = engine.detach(name, self._arena.view(region))
            facts = state.token_ids, state.seed, state.num_computed, state.num_cached
            moved = ipc.Continuation(*facts, *region)
            self._send(ipc.HandOver(replica_id, name, moved))

    def adopt(self, message: ipc.Adopt) -> None:
        """A request on its way in; ``settle`` takes it."""
        self._arriving.append(message)

    def settle(self, engine: Engine) -> None:
        """Take in what there is room for."""
        while self._arriving:
            message = self._arriving[0]
            try:
                if not self._take(engine, message):
                    return
            except RequestRejected as error:
                self._end(message, "error", error.code, error.message)
            self._arriving.popleft()
            self._send(ipc.Taken(message.request.replica_id, message.state.start))

    def cancel(self, request_id: str) -> None:
        """End a request that no engine has yet."""
        for message in [m for m in self._arriving if m.request.request_id == request_id]:
            self._arriving.remove(message)
            self._end(message, "cancelled")
            self._send(ipc.Taken(message.request.replica_id, message.state.start))

    def _take(self, engine: Engine, message: ipc.Adopt) -> bool:
        moved = message.state
        state = HandOver(moved.token_ids, moved.seed, moved.num_computed, moved.num_cached)
        contents = self._arena.view(Region(moved.start, moved.size))
        request = to_engine(message.request)
        if engine.adopt(request, state, contents):
            return True
        return not engine.has_work() and engine.adopt(request, state, None)

    def _end(self, message: ipc.Adopt, reason: str, code: str = "", text: str = "") -> None:
        request, num_tokens = message.request, len(message.state.token_ids)
        counts = len(request.prompt_token_ids), message.state.num_cached, num_tokens
        delta = Delta(request.request_id, num_tokens, (), "", reason, code, text, *counts)
        self._send(ipc.StepOutputs(request.replica_id, [delta]))
