"""Why a request is not sent anywhere, typed; each surface maps them to its own status."""


class DispatchError(Exception):
    """Base. ``code`` is stable; ``retry_after`` in seconds, None where waiting does not help."""

    code = "refused"
    retry_after: float | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ModelNotFound(DispatchError):
    """There is no such model, route, alias or version (404)."""

    code = "model_not_found"


class NoAccess(ModelNotFound):
    """There is, but not for this tenant. Said to the client exactly as ModelNotFound says it."""


class NotReady(DispatchError):
    """The version is known, but no replica can take the request now (503)."""

    code = "model_not_ready"

    def __init__(self, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvalidRequest(DispatchError):
    """The request breaks a limit of the model (400); ``param`` is the field to blame."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code, self.param = code, param
