"""The structs of decoder.cpp, linear.h and attention.h, field by field."""

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p


class Linear(Structure):
    """A packed matrix; `scales` is null for float32, `group` is not 0 for rounded weights alone."""

    _fields_ = (
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("zeros", c_void_p),
        ("group", c_int64),
    )


class Layer(Structure):
    """One decoder layer."""

    _fields_ = (
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
    )


class Model(Structure):
    """All that stays the same from step to step."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("head", Linear),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("middle", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("total", c_void_p),
        ("is_later_rank", c_int64),
    )


class Workspace(Structure):
    """Buffers for the activations of one step."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("hidden", "normed", "qkv", "attended", "activated"),
            *("quantised", "scales", "starts", "seconds"),
        )
    )


class Batch(Structure):
    """The tokens of one step and where their keys and values are."""

    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
        ("spans", c_void_p),
        ("num_spans", c_int64),
        ("tables", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("num_blocks", c_int64),
        ("null_block", c_int64),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("unsound", c_void_p),
    )
