"""Why a caller gets no answer, in the words that every inference surface puts into its own form."""

from typing import Any


class Refused(Exception):
    """The caller gets no answer: ``code`` is stable, ``param`` names the field at fault.

    ``retry_after`` is in seconds. ``limits`` are the caller's rate limits at that moment.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        limits: Any = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.retry_after, self.limits = retry_after, limits
