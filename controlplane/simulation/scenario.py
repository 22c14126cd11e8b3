"""What is simulated: a fleet, its models, who asks for what, what fails, under which policies.

Plain values, as a scenario's file has them (``application.scenario_file`` reads it); ``check``
refuses what cannot be. Worked example, two nodes of 8 GPUs and one that is lost for an hour::

    Scenario(
        name="two",
        seconds=3600.0,
        nodes=(NodeGroup("h100", "h100-80gb", count=2),),
        models=(ModelEntry("chat", "8b", min_replicas=2, max_replicas=4),),
        arrivals=Arrivals(per_second=20.0),
        failures=Failures(schedule=(Outage("h100-1", at=600.0, seconds=3600.0),)),
    )

A ``catalogue`` stands for many models: sizes by ``mix``, shared out evenly over the order of
popularity, so that no size is the popular one; replicas and priority by ``tiers``, the most popular
first. The n-th model is asked for in proportion to 1 / n^zipf.
"""

from collections.abc import Iterator

import msgspec

from controlplane.domain.errors import Invalid
from controlplane.domain.version_spec import Colocation, VersionSpec
from controlplane.simulation.hardware import GIB, GPU_CLASSES, Efficiency, ModelShape

HOLD_S = {"realtime": 10.0, "standard": 60.0, "batch": 300.0}  # as application.hold
BATCHING = ("continuous", "static", "prefill-first")
SHARING = ("shared", "one_model_per_gpu")
MODES = ("exact", "coarse")
MONDAY = 1_767_571_200.0  # 2026-01-05T00:00:00Z
MAX_SECONDS, MAX_PER_SECOND, MAX_NODES, MAX_MODELS = 31 * 86400.0, 1e4, 1000, 5000


class Size(msgspec.Struct, frozen=True):
    """A kind of model: its shape, and the memory that a replica of it is given."""

    shape: ModelShape
    gpu_memory: int


def _size(billions: float, bytes_per_param: float, kv_kib: int, gpu_gib: int) -> Size:
    params = billions * 1e9
    return Size(ModelShape(params, int(params * bytes_per_param), kv_kib * 1024), gpu_gib * GIB)


# Weights in int8, the two large ones in int4; keys and values in bf16, as Llama 3.2 1B and 3B,
# Llama 3.1 8B, Qwen 2.5 14B and 32B and Llama 3.1 70B have them.
SIZES = {
    "1b": _size(1.24, 1.0, 32, 5),
    "3b": _size(3.2, 1.0, 112, 9),
    "8b": _size(8.0, 1.0, 128, 15),
    "14b": _size(14.8, 1.0, 192, 24),
    "32b": _size(32.8, 0.55, 256, 30),
    "70b": _size(70.6, 0.55, 320, 56),
}


class NodeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` nodes alike, named ``<name>-1``, ``<name>-2``, …, in one zone."""

    name: str
    gpu: str
    count: int = 1
    gpus: int = 8
    zone: str = ""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model. ``share``: of all requests, against the other models' shares."""

    name: str
    size: str
    share: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 1
    priority: str = "normal"
    max_batch: int = 32


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` models of a catalogue."""

    count: int
    min_replicas: int = 1
    max_replicas: int = 1
    priority: str = "normal"


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Many models at once; as many as its tiers count. ``mix``: shares of the sizes."""

    mix: dict[str, float]
    tiers: tuple[Tier, ...]
    zipf: float = 1.0
    prefix: str = "m"
    max_batch: int = 32


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    tier: str = "premium"
    share: float = 1.0


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``per_second`` in the mean over a week. ``day`` and ``weekend``: see ``arrivals``.

    Lengths come from the trace if there is one, else log-normal with these medians and spreads.
    ``classes``: shares of the latency classes. Longer prompts and answers are cut to the maxima.
    """

    per_second: float
    day: float = 0.0
    weekend: float = 1.0
    prompt_median: float = 1000.0
    prompt_spread: float = 0.8
    output_median: float = 130.0
    output_spread: float = 0.8
    max_prompt: int = 14_336
    max_output: int = 2048
    classes: dict[str, float] = msgspec.field(default_factory=lambda: {"standard": 1.0})


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds from the beginning, and how long the node is away."""

    node: str
    at: float
    seconds: float = 3600.0


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By schedule and at random: each node fails after a time drawn from an exponential
    distribution of mean ``mtbf_hours`` (0: never) and is back after one of mean ``mttr_hours``."""

    schedule: tuple[Outage, ...] = ()
    mtbf_hours: float = 0.0
    mttr_hours: float = 2.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it. ``sample``: one of so many stretches of the time is simulated (``sampling``).
    ``warm``: what may be scaled to zero is loaded too when the time begins, as if just used."""

    name: str
    seconds: float
    nodes: tuple[NodeGroup, ...]
    arrivals: Arrivals
    models: tuple[ModelEntry, ...] = ()
    catalogue: Catalogue | None = None
    tenants: tuple[Tenant, ...] = (Tenant("tenant"),)
    failures: Failures = Failures()
    batching: str = "continuous"
    sharing: str = "shared"
    mode: str = "exact"
    sample: int = 1
    warm: bool = False
    seed: int = 1
    start: float = MONDAY
    efficiency: Efficiency = Efficiency()

    def entries(self) -> tuple[ModelEntry, ...]:
        """Every model, those of the catalogue after those that are named."""
        return (*self.models, *(_expanded(self.catalogue) if self.catalogue else ()))

    def node_ids(self) -> dict[str, NodeGroup]:
        """Every node's group by its id."""
        return {f"{g.name}-{n}": g for g in self.nodes for n in range(1, g.count + 1)}


def spec_of(entry: ModelEntry, scenario: Scenario, is_served: bool = True) -> VersionSpec:
    """What the log has of a model: with one model per GPU, one that bears no other beside it."""
    is_alone = scenario.sharing == "one_model_per_gpu"
    near = Colocation(labels=("alone",), anti_affinity=("alone",)) if is_alone else Colocation()
    low, high = entry.min_replicas, entry.max_replicas
    return VersionSpec(
        version="v1",
        source=f"s3://models/{entry.name}",
        gpu_memory=SIZES[entry.size].gpu_memory,
        max_batch=entry.max_batch,
        max_prompt_tokens=scenario.arrivals.max_prompt,
        max_output_tokens=scenario.arrivals.max_output,
        quantization="int8" if SIZES[entry.size].shape.params < 20e9 else "awq-int4",
        priority=entry.priority,
        min_replicas=int(is_served) if is_alone else low,
        max_replicas=1 if is_alone else high,
        policy=scenario.batching,
        colocation=near,
    )


def _expanded(catalogue: Catalogue) -> Iterator[ModelEntry]:
    tiers = [tier for tier in catalogue.tiers for _ in range(tier.count)]
    sizes = _evenly(catalogue.mix, len(tiers))
    for number, (tier, size) in enumerate(zip(tiers, sizes, strict=True), 1):
        yield ModelEntry(
            f"{catalogue.prefix}{number:03d}-{size}",
            size,
            number**-catalogue.zipf,
            tier.min_replicas,
            tier.max_replicas,
            tier.priority,
            catalogue.max_batch,
        )


def _evenly(mix: dict[str, float], number: int) -> list[str]:
    """Each place to the size that is most behind its share: {a: 2, b: 1} gives a b a, a b a."""
    total = sum(mix.values())
    given = dict.fromkeys(mix, 0)
    found = []
    for place in range(1, number + 1):
        size = max(mix, key=lambda one: (mix[one] / total * place - given[one], one))
        given[size] += 1
        found.append(size)
    return found


# --- what cannot be -----------------------------------------------------------------------------
def check(scenario: Scenario) -> Scenario:
    """The scenario itself; raises Invalid ``invalid_scenario`` with the path of what is wrong."""
    for is_right, path, rule in _rules(scenario):
        if not is_right:
            raise Invalid("invalid_scenario", f"{path}: {rule}", path)
    return scenario


def _rules(one: Scenario) -> Iterator[tuple[bool, str, str]]:
    yield 0 < one.seconds <= MAX_SECONDS, "seconds", "more than 0, at most 31 days."
    yield one.batching in BATCHING, "batching", f"one of {', '.join(BATCHING)}."
    yield one.sharing in SHARING, "sharing", f"one of {', '.join(SHARING)}."
    yield one.mode in MODES, "mode", f"one of {', '.join(MODES)}."
    yield 1 <= one.sample <= 1000, "sample", "from 1 to 1000."
    yield one.seed >= 0, "seed", "not negative."
    yield one.start >= 0, "start", "seconds since 1970, not negative."
    yield bool(one.tenants), "tenants", "at least one."
    yield from _of_nodes(one)
    yield from _of_models(one)
    yield from _of_arrivals(one.arrivals)
    yield from _of_failures(one)
    for name in Efficiency.__struct_fields__:
        is_right = getattr(one.efficiency, name) > 0
        yield is_right, f"efficiency.{name}", "more than 0."
    for number, tenant in enumerate(one.tenants):
        yield tenant.share > 0, f"tenants[{number}].share", "more than 0."


def _of_nodes(one: Scenario) -> Iterator[tuple[bool, str, str]]:
    yield bool(one.nodes), "nodes", "at least one group."
    for number, group in enumerate(one.nodes):
        path = f"nodes[{number}]"
        yield group.gpu in GPU_CLASSES, f"{path}.gpu", f"one of {', '.join(GPU_CLASSES)}."
        yield 1 <= group.count <= MAX_NODES, f"{path}.count", f"from 1 to {MAX_NODES}."
        yield 1 <= group.gpus <= 64, f"{path}.gpus", "from 1 to 64."
    total = sum(group.count for group in one.nodes)
    yield len(one.node_ids()) == total, "nodes", "two have one name."


def _of_models(one: Scenario) -> Iterator[tuple[bool, str, str]]:
    if one.catalogue:
        yield from _of_catalogue(one.catalogue)
    entries = one.entries()
    yield 1 <= len(entries) <= MAX_MODELS, "models", f"from 1 to {MAX_MODELS}, catalogue included."
    yield len({entry.name for entry in entries}) == len(entries), "models", "two have one name."
    for number, entry in enumerate(one.models):
        path = f"models[{number}]"
        yield entry.size in SIZES, f"{path}.size", f"one of {', '.join(SIZES)}."
        yield entry.share > 0, f"{path}.share", "more than 0."
    longest = one.arrivals.max_prompt + one.arrivals.max_output
    for name in {entry.size for entry in entries} & SIZES.keys():
        size = SIZES[name]
        held = size.shape.num_kv_tokens(size.gpu_memory) // 16 * 16  # whole blocks
        rule = (
            f"prompt and output together are at most {held} tokens: more does not fit a '{name}'."
        )
        yield longest <= held, "arrivals.max_prompt", rule


def _of_catalogue(one: Catalogue) -> Iterator[tuple[bool, str, str]]:
    yield bool(one.mix), "catalogue.mix", "at least one size."
    for size, share in one.mix.items():
        yield size in SIZES, f"catalogue.mix.{size}", f"one of {', '.join(SIZES)}."
        yield share > 0, f"catalogue.mix.{size}", "more than 0."
    total = 0
    for number, tier in enumerate(one.tiers):
        total += tier.count
        is_right = tier.count >= 1 and total <= MAX_MODELS
        yield is_right, f"catalogue.tiers[{number}].count", f"from 1, {MAX_MODELS} in all."
    yield 0 <= one.zipf <= 5, "catalogue.zipf", "from 0 to 5."


def _of_arrivals(one: Arrivals) -> Iterator[tuple[bool, str, str]]:
    yield 0 < one.per_second <= MAX_PER_SECOND, "arrivals.per_second", "more than 0, at most 10000."
    yield 0 <= one.day < 1, "arrivals.day", "from 0 to below 1."
    yield 0 < one.weekend <= 1, "arrivals.weekend", "more than 0, at most 1."
    for name in ("prompt_median", "output_median"):
        yield getattr(one, name) >= 1, f"arrivals.{name}", "at least 1."
    for name in ("prompt_spread", "output_spread"):
        yield 0 <= getattr(one, name) <= 3, f"arrivals.{name}", "from 0 to 3."
    for name in ("max_prompt", "max_output"):
        yield 1 <= getattr(one, name) <= 1 << 20, f"arrivals.{name}", "from 1 to 1048576."
    yield bool(one.classes), "arrivals.classes", "at least one."
    for name, share in one.classes.items():
        path = f"arrivals.classes.{name}"
        yield name in HOLD_S, path, f"one of {', '.join(HOLD_S)}."
        yield share > 0, path, "more than 0."


def _of_failures(one: Scenario) -> Iterator[tuple[bool, str, str]]:
    failures, nodes = one.failures, one.node_ids()
    yield failures.mtbf_hours >= 0, "failures.mtbf_hours", "not negative."
    yield failures.mttr_hours > 0, "failures.mttr_hours", "more than 0."
    for number, outage in enumerate(failures.schedule):
        path = f"failures.schedule[{number}]"
        yield outage.node in nodes, f"{path}.node", "no node has this name."
        yield 0 <= outage.at < one.seconds, f"{path}.at", "a time of the simulation."
        yield outage.seconds > 0, f"{path}.seconds", "more than 0."
