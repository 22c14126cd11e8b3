"""What can be wrong with an order; each surface maps ``kind`` to its own status."""


class DomainError(Exception):
    """An order that must not be carried out. ``code`` is stable, ``message`` is for people."""

    kind = "invalid"
    recorded = False  # that it was refused stands in the log already

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class Invalid(DomainError):
    """The order contradicts itself or a stated rule (400 or 422)."""


class NotFound(DomainError):
    """There is no such thing, or none that the caller may know of (404)."""

    kind = "not_found"

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what}_not_found", f"There is no {what} '{name}'.")


class Conflict(DomainError):
    """The state forbids it: already exists, in use, wrong phase (409)."""

    kind = "conflict"


class VersionConflict(Conflict):
    """Somebody else wrote first; ``actual`` is the version now (409, or 412 with If-Match)."""

    def __init__(self, stream: str, expected: int, actual: int) -> None:
        super().__init__("version_conflict", f"{stream} is at version {actual}, not {expected}.")
        self.stream, self.expected, self.actual = stream, expected, actual


class Forbidden(DomainError):
    """The caller is known but may not do this (403)."""

    kind = "forbidden"
