"""What one version of a model is, and which specifications make sense.

A specification never changes: whoever wants another one adds another version. Its rules are those
that hold whatever the fleet; whether a node can load it is the node's to say. Worked example::

    check_spec(VersionSpec(version="v1", source="file:///m", gpu_memory=2**31))    # fine
    check_spec(VersionSpec(version="v1", source="file:///m"))
    # Invalid out_of_range: gpu_memory is from 1 to 1125899906842624.
"""

import re

import msgspec

from controlplane.domain.errors import Invalid
from controlplane.domain.ids import checked_name
from controlplane.domain.source import check_source

QUANTIZATIONS = ("none", "bf16", "int8", "int8-weight-only", "awq-int4")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
POLICIES = ("continuous", "static", "prefill-first")
SPECULATIONS = ("none", "ngram", "draft")
DISAGGREGATIONS = ("none", "prefill-decode")
MAX_WORDS = 100
PRIORITIES = ("high", "normal", "best-effort")
RESIDENCIES = ("resident", "swappable")
ENGINES = ("builtin", "vllm")
TASKS = ("generate", "embed")
MAX_INPUTS = 2048
_SHA256 = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


class Colocation(msgspec.Struct, frozen=True):
    """Labels this version wants beside it on a GPU, must not have beside it, and its isolation."""

    labels: tuple[str, ...] = ()
    affinity: tuple[str, ...] = ()
    anti_affinity: tuple[str, ...] = ()
    isolation: str = "shared"  # shared | dedicated


class Needs(msgspec.Struct, frozen=True):
    """What a replica needs beside memory on its devices; empty and 0 ask for nothing.

    ``gpu_classes``: words of a device's name, or its kind, any of which will do ("H100", "cuda").
    ``compute_percent``: of its devices' time that it typically keeps busy; a hint, no promise.
    ``cpu_milli`` (thousandths of a core) and ``host_memory`` (bytes): of its node.
    """

    gpu_classes: tuple[str, ...] = ()
    compute_percent: int = 0
    cpu_milli: int = 0
    host_memory: int = 0


class VersionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that placement, validation and loading need to know of one version. Memory in bytes.

    ``gpu_memory`` holds everything: weights, draft model, KV cache, ``swap_bytes`` for preempted
    requests (None: the node chooses) and workspace. ``draft_model`` is a source, as ``source``.
    ``guaranteed_percent`` is of the time of the device that a replica shares: what a version of
    high priority gets whenever it has work, whatever its neighbours want; 0 promises nothing.
    ``residency``: resident (its memory on the device is its own) or swappable (while it is idle,
    others of the device may have it, and its weights wait in the node's memory).
    ``engine``: builtin, or vllm, which a node has if its agent says so.
    ``task``: generate (chat and completions) or embed, which takes ``max_inputs`` texts in a
    request, each of ``max_prompt_tokens`` at most, and has no use for ``max_output_tokens``.
    """

    version: str
    source: str
    format: str = "safetensors"
    sha256: str = ""
    gpu_memory: int = 0
    tensor_parallel: int = 1
    max_batch: int = 16
    max_prompt_tokens: int = 2048
    max_output_tokens: int = 2048
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    priority: str = "normal"
    min_replicas: int = 1
    max_replicas: int = 1
    policy: str = "continuous"
    colocation: Colocation = Colocation()
    draft_model: str = ""
    speculation: str = "none"
    swap_bytes: int | None = None
    disaggregation: str = "none"
    guaranteed_percent: int = 0
    needs: Needs = Needs()
    residency: str = "resident"
    engine: str = "builtin"
    task: str = "generate"
    max_inputs: int = MAX_INPUTS

    @property
    def max_model_len(self) -> int:
        produced = self.max_output_tokens if self.task == "generate" else 0
        return self.max_prompt_tokens + produced


# --- rules ------------------------------------------------------------------------------------
def check_spec(spec: VersionSpec) -> None:
    """Raise Invalid for the first rule the specification breaks."""
    checked_name(spec.version, "version")
    check_source(spec.source, "source")
    _one_of(spec.quantization, QUANTIZATIONS, "quantization")
    _one_of(spec.kv_cache_dtype, KV_CACHE_DTYPES, "kv_cache_dtype")
    _one_of(spec.speculation, SPECULATIONS, "speculation")
    _one_of(spec.disaggregation, DISAGGREGATIONS, "disaggregation")
    _one_of(spec.priority, PRIORITIES, "priority")
    _one_of(spec.residency, RESIDENCIES, "residency")
    _one_of(spec.engine, ENGINES, "engine")
    _one_of(spec.task, TASKS, "task")
    _one_of(spec.format, ("safetensors",), "format")
    _one_of(spec.policy, POLICIES, "policy")
    _one_of(spec.colocation.isolation, ("shared", "dedicated"), "colocation.isolation")
    for param, value, low, high in (
        ("gpu_memory", spec.gpu_memory, 1, 2**50),
        ("tensor_parallel", spec.tensor_parallel, 1, 64),
        ("max_batch", spec.max_batch, 1, 4096),
        ("max_prompt_tokens", spec.max_prompt_tokens, 1, 2**24),
        ("max_output_tokens", spec.max_output_tokens, 1, 2**24),
        ("max_inputs", spec.max_inputs, 1, MAX_INPUTS),
        ("guaranteed_percent", spec.guaranteed_percent, 0, 100),
        ("needs.compute_percent", spec.needs.compute_percent, 0, 100),
        ("needs.cpu_milli", spec.needs.cpu_milli, 0, 2**24),
        ("needs.host_memory", spec.needs.host_memory, 0, 2**50),
    ):
        if not low <= value <= high:
            raise Invalid("out_of_range", f"{param} is from {low} to {high}.", param)
    check_replicas(spec.min_replicas, spec.max_replicas)
    if spec.swap_bytes is not None and not 0 <= spec.swap_bytes < spec.gpu_memory:
        raise Invalid("out_of_range", "swap_bytes is a part of gpu_memory.", "swap_bytes")
    if spec.sha256 and not _SHA256.fullmatch(spec.sha256):
        raise Invalid("out_of_range", "sha256 is 64 hexadecimal digits, or empty.", "sha256")
    _check_words(spec)
    _check_combination(spec)
    if spec.draft_model:
        check_source(spec.draft_model, "draft_model")


def _check_words(spec: VersionSpec) -> None:
    near = spec.colocation
    for param, words, longest in (
        ("colocation.labels", near.labels, 200),
        ("colocation.affinity", near.affinity, 200),
        ("colocation.anti_affinity", near.anti_affinity, 200),
        ("needs.gpu_classes", spec.needs.gpu_classes, 64),
    ):
        if len(words) > MAX_WORDS or not all(1 <= len(word) <= longest for word in words):
            rule = f"{param}: at most {MAX_WORDS} words of 1 to {longest} characters."
            raise Invalid("out_of_range", rule, param)


def _check_combination(spec: VersionSpec) -> None:
    """Refuse what no node could load, whatever its devices; the rest is the node's to refuse."""
    is_draft, is_bf16 = spec.speculation == "draft", spec.quantization == "bf16"
    is_simulated = spec.source.startswith("simulated://")
    is_split = spec.disaggregation != "none"
    is_group = spec.tensor_parallel > 1
    is_alone = is_split or is_group or spec.colocation.isolation == "dedicated"
    is_guaranteed, is_high = spec.guaranteed_percent > 0, spec.priority == "high"
    is_swappable = spec.residency == "swappable"
    rules = (
        (is_draft and not spec.draft_model, "draft_model", "is needed with speculation: draft"),
        (bool(spec.draft_model) and not is_draft, "draft_model", "goes with speculation: draft"),
        (spec.draft_model.startswith("simulated:"), "draft_model", "has weights"),
        (is_simulated and spec.speculation != "none", "speculation", "needs a model with weights"),
        (
            is_bf16 and spec.kv_cache_dtype == "float32",
            "kv_cache_dtype",
            "with quantization: bf16 is auto, bfloat16 or int8",
        ),
        (
            spec.quantization.startswith("int8") and spec.kv_cache_dtype == "bfloat16",
            "kv_cache_dtype",
            f"with quantization: {spec.quantization} is auto, float32 or int8",
        ),
        (is_split and spec.policy == "static", "disaggregation", "has no static batches"),
        (is_split and is_group, "disaggregation", "is for one device"),
        (is_guaranteed and not is_high, "guaranteed_percent", "goes with priority: high"),
        (is_swappable and is_high, "residency", "swappable goes with a priority below high"),
        (
            is_swappable and (is_split or is_group),
            "residency",
            "swappable is for one worker on one device",
        ),
        (is_guaranteed and is_alone, "guaranteed_percent", "is for versions that share a process"),
    )
    for is_broken, param, rule in (*rules, *_rules_of_vllm(spec), *_embedding_rules(spec)):
        if is_broken:
            raise Invalid("unsupported_combination", f"{param} {rule}.", param)


def _rules_of_vllm(spec: VersionSpec) -> tuple[tuple[bool, str, str], ...]:
    """What vLLM does otherwise, or not at all: its own queue, cache and process."""
    if spec.engine != "vllm":
        return ()
    only = "with engine: vllm is"
    return (
        (spec.source.startswith("simulated://"), "engine", "vllm needs a model with weights"),
        (spec.quantization not in ("none", "bf16"), "quantization", f"{only} none or bf16"),
        (spec.kv_cache_dtype != "auto", "kv_cache_dtype", f"{only} auto"),
        (spec.policy != "continuous", "policy", f"{only} continuous"),
        (spec.speculation != "none", "speculation", f"{only} none"),
        (spec.disaggregation != "none", "disaggregation", f"{only} none"),
        (spec.swap_bytes is not None, "swap_bytes", "is for the built-in engine"),
        (spec.residency != "resident", "residency", f"{only} resident"),
        (spec.guaranteed_percent > 0, "guaranteed_percent", "is for the built-in engine"),
        (spec.tensor_parallel > 1, "tensor_parallel", f"{only} 1"),
    )


def _embedding_rules(spec: VersionSpec) -> tuple[tuple[bool, str, str], ...]:
    """An encoder generates nothing, has no KV cache and stands on one device."""
    is_embed, ordinary = spec.task == "embed", "is for models that generate"
    return (
        (is_embed and spec.engine != "builtin", "engine", ordinary),
        (is_embed and spec.quantization not in ("none", "bf16"), "quantization", ordinary),
        (is_embed and spec.kv_cache_dtype != "auto", "kv_cache_dtype", ordinary),
        (is_embed and spec.speculation != "none", "speculation", ordinary),
        (is_embed and spec.disaggregation != "none", "disaggregation", ordinary),
        (is_embed and spec.policy != "continuous", "policy", ordinary),
        (is_embed and bool(spec.swap_bytes), "swap_bytes", ordinary),
        (is_embed and spec.tensor_parallel > 1, "tensor_parallel", ordinary),
    )


def check_replicas(low: int, high: int) -> None:
    """Raise Invalid unless a version may have ``low`` to ``high`` replicas."""
    if not 0 <= low <= high <= 1024 or high < 1:
        raise Invalid(
            "out_of_range",
            "max_replicas is from 1 to 1024, and min_replicas from 0 to max_replicas; "
            "a version that is to run nowhere is retired.",
            "min_replicas",
        )


def _one_of(value: str, allowed: tuple[str, ...], param: str) -> None:
    if value not in allowed:
        raise Invalid("invalid_choice", f"{param} is one of {', '.join(allowed)}.", param)
