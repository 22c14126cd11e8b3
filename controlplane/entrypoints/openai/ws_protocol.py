"""The websocket half of the server: uvicorn's protocol, with bounds that it leaves open.

Flow control covers what the application sends. What the protocol answers by itself does not pass
through it: a client that sends pings and never reads would make the pongs pile up in memory, and
empty fragments of a message that never ends count towards no size. Both end the connection here.
"""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MAX_UNSENT_BYTES = 256 * 1024
MAX_FRAGMENTS = 16 * 1024
INVALID_DATA, TOO_BIG = 1007, 1009


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """One connection; see the module."""

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(TOO_BIG)
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """uvicorn, too, closes with 1007 what is no UTF-8, but logs a stack trace for it."""
        if self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self._fail(INVALID_DATA)
        else:
            super().send_receive_event_to_app()

    def _fail(self, code: int) -> None:
        self.frames = []
        if not self.close_sent:
            self.conn.fail(code)
            self.handle_parser_exception()

    async def send(self, message: Any) -> None:
        """A refused handshake is complete with its response; uvicorn would log an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
