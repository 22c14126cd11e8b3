"""The one exception of the model store."""


class ModelStoreError(Exception):
    """A model could not be made available; `code` is stable, the message is for people.

    Codes: source_not_allowed, download_failed, checksum_mismatch, archive_rejected,
    format_not_allowed, too_large, conversion_failed, tokenizer_rejected; of a bucket also
    source_missing, access_denied, credentials_missing, insufficient_disk.
    download_failed and insufficient_disk may pass; the others last until somebody acts.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
