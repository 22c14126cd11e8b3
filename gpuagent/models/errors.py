"""The exception of everything that reads a model from disk."""


class LoadError(Exception):
    """A model folder cannot be loaded; `code` is stable, the message is for people.

    Codes: config_invalid, config_rejected, weights_malformed, weights_rejected,
    manifest_invalid, format_not_allowed, tokenizer_rejected, draft_model_unsupported,
    quantization_unsupported, kv_cache_dtype_unsupported, checkpoint_mismatch,
    tensor_parallel_unsupported, group_incomplete, group_mismatch.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
