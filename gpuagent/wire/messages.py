"""Every message that crosses the bus between the control plane and the nodes.

The structs here are the whole contract: both sides import this module and nothing else of each
other. A message carries ``v``, its schema version; a receiver drops what it does not know and
counts it. Times are Unix seconds (UTC) unless a name ends in ``_ms``; memory is in bytes.

Desired state travels as **one whole value per node** (level-triggered): whoever missed ten
messages needs only the last. Example: generation 7 says ``replicas=[a, b]``; an agent that runs
``[a, c]`` stops ``c``, starts ``b``, and ignores anything below generation 7 from then on.
"""

import msgspec

WIRE_VERSION = 1
BUILTIN, VLLM = "builtin", "vllm"  # engines


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all wire messages; ``v`` is the schema version."""

    v: int = WIRE_VERSION


# --- desired state: control plane -> node (KV bucket "desired", key = node id) -----------------


class GroupPart(Message, frozen=True, kw_only=True):
    """A node's part of a group over several nodes: the ``ranks`` that it runs, in the order of its
    ``device_indices``. ``address``: host:port, of the agent that has rank 0, where the others meet
    it. ``secret`` is known to the agents of this one placement."""

    ranks: tuple[int, ...]
    address: str = ""
    secret: bytes = b""


class ReplicaSpec(Message, frozen=True, kw_only=True):
    """One replica the node should run; a ``replica_id`` is never reused for another placement.

    ``memory_bytes`` holds all of it, a draft model and ``swap_bytes`` (None: the node chooses)
    included. ``speculation`` is none | ngram | draft, ``disaggregation`` none | prefill-decode.
    ``guaranteed_percent`` is of the device's time, whatever the replicas beside it want.
    ``engine`` is builtin | vllm, which a node has if it says so (``ObservedState.engines``).
    A group of ``tensor_parallel`` devices takes an equal part of ``memory_bytes`` on each of
    ``device_indices``, the first of which is ``device_index``; from control planes that do not say,
    on neighbours from there on. Where others are of another node, ``group`` says which these are.
    ``task`` is generate | embed: what it serves.
    """

    replica_id: str
    version_id: str
    model: str
    version: str
    device_index: int
    memory_bytes: int
    source: str
    sha256: str = ""
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    isolation: str = "shared"
    priority: str = "normal"
    max_batch: int = 16
    max_batch_tokens: int = 512
    max_model_len: int = 2048
    policy: str = "continuous"
    tensor_parallel: int = 1
    speculation: str = "none"
    draft_model: str = ""
    swap_bytes: int | None = None
    disaggregation: str = "none"
    guaranteed_percent: int = 0
    engine: str = BUILTIN
    device_indices: tuple[int, ...] = ()
    task: str = "generate"
    group: GroupPart | None = None

    @property
    def leads(self) -> bool:
        """Whether this node has the first rank, which speaks for the replica."""
        return self.group is None or 0 in self.group.ranks


class DesiredState(Message, frozen=True, kw_only=True):
    """Everything one node should run. Order: compare ``(epoch, generation)`` lexicographically.

    ``replicas`` may be more than the devices hold at once: the node keeps what is used on the
    device and the rest in its host memory or on disk (``ReplicaStatus.tier``). ``warm`` names the
    replicas that requests are expected for, the most expected first: they are brought onto the
    device as far as memory is free, and nobody is put out for them. ``tiers`` says of replicas that
    share a device by turns what is intended: warm (prepared once, then swapped in when it is asked
    for), storage (loaded when it is asked for; the first to go), swappable (may be put out, the
    last to go) or resident (never put out for another); without one, the node decides as it sees
    fit.
    """

    cluster_id: str
    epoch: int
    generation: int
    node_id: str
    drain: bool = False
    replicas: tuple[ReplicaSpec, ...] = ()
    warm: tuple[str, ...] = ()
    tiers: dict[str, str] = {}


# --- observed state: node -> control plane (KV bucket "observed", key = node id) ---------------


class Device(Message, frozen=True, kw_only=True):
    """One accelerator; on a machine without GPUs a share of the CPU's memory."""

    index: int
    kind: str  # "cpu" | "cuda"
    name: str
    memory_bytes: int
    uuid: str = ""
    link: str = ""  # the NVLink domain it shares with others of this node


class ReplicaStatus(Message, frozen=True, kw_only=True):
    """``state`` is pending | downloading | loading | ready | stopping | failed.

    A ready replica with a reason serves, but less well than it could. ``tier`` is where its weights
    are: resident (on the device), host (ready in the node's memory) or storage (files, or not even
    those); "" from nodes that have no tiers. A generation for a replica in any tier is taken as
    long as it is ready, or pending with the code ``not_resident``: the node holds it until the
    replica is resident. ``estimate_bytes`` is the device memory it was expected to need,
    ``peak_bytes`` what was measured, and ``charged_bytes`` what the node counts; of a group, on
    each of its devices. ``swap_in_s`` is what becoming resident took last, from whichever tier.
    ``retry_s``: of a failed one, until the node tries again by itself, as of this report.
    """

    replica_id: str
    version_id: str
    device_index: int
    state: str
    reason_code: str = ""
    reason: str = ""
    since: float = 0.0
    weights_bytes: int = 0
    kv_bytes: int = 0
    peak_bytes: int = 0
    load_seconds: float = 0.0
    sha256: str = ""
    max_model_len: int = 0
    tier: str = ""
    estimate_bytes: int = 0
    charged_bytes: int = 0
    swap_in_s: float = 0.0
    retry_s: float = 0.0


class ObservedState(Message, frozen=True, kw_only=True):
    """What the node really runs; ``acked_*`` is the newest desired state it has accepted.

    ``cpu_milli`` and ``host_memory`` are the node's own, 0 if not told; ``fabric`` names the
    network that joins its devices to other nodes', and ``fabric_address`` (host:port) is where
    agents on it meet this one for groups over nodes; "": it takes no part in any. Of such a group
    the node of rank 0 alone reports a replica. ``engines`` are those that it can load.
    ``refusal``: why it has not accepted the desired state that it read last; "" if it has.
    ``labels`` are of agents of earlier releases, and read by nothing: nodes are told apart by zone,
    fabric, devices and engines.
    """

    node_id: str
    boot_id: str
    acked_epoch: int
    acked_generation: int
    devices: tuple[Device, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    zone: str = ""
    labels: dict[str, str] = {}
    version: str = ""
    at: float = 0.0
    cpu_milli: int = 0
    host_memory: int = 0
    fabric: str = ""
    engines: tuple[str, ...] = (BUILTIN,)
    refusal: str = ""
    fabric_address: str = ""


# --- telemetry: node -> everyone, core NATS, every 2 s (it is the heartbeat) -------------------


class DeviceLoad(Message, frozen=True, kw_only=True):
    """One device now. ``weights_bytes``, ``kv_pool_bytes`` and ``workspace_bytes`` are the parts of
    what its resident replicas are counted with; ``kv_used_bytes`` is what unfinished requests hold
    of the pool.
    ``host_*`` is the memory that holds swapped-out weights, which all devices of the node share.
    """

    index: int
    utilization: float  # busy fraction of the step loop since the last report, 0..1
    memory_used_bytes: int
    memory_total_bytes: int
    foreign_bytes: int = 0
    temperature_c: float = 0.0
    power_w: float = 0.0
    reserved_bytes: int = 0
    weights_bytes: int = 0
    kv_pool_bytes: int = 0
    kv_used_bytes: int = 0
    workspace_bytes: int = 0
    host_used_bytes: int = 0
    host_total_bytes: int = 0


class ReplicaLoad(Message, frozen=True, kw_only=True):
    """Live figures of one replica; rates are per second over the last report interval.

    ``tier`` as in ``ReplicaStatus``, since ``tier_since`` (Unix seconds, by the node's clock).
    ``num_held`` generations wait in the agent for it to become
    resident, which is expected in ``expected_wait_s``; 0 for a resident one.
    ``charged_bytes`` as in ``ReplicaStatus`` once it was measured, else 0. ``prefix_filter`` says
    which blocks of ``block_size`` tokens are cached, as ``gpuagent.engine.prefix_filter`` has it.
    ``load_work``: while it downloads or loads, what its worker has done, in seconds of processor
    and units of 16 MiB read or written; it grows as long as the load goes on.
    """

    replica_id: str
    version_id: str
    device_index: int
    state: str
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 16
    prefill_tokens_per_s: float = 0.0  # measured rate while prefilling
    decode_step_s: float = 0.0
    generated_tokens: int = 0  # counters since the replica became ready
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    last_step_age_s: float = 0.0
    step_s: float = 0.0  # mean of the last interval in which it stepped
    num_steps: int = 0
    num_swapped_out: int = 0  # preempted and kept in host memory
    num_recomputed: int = 0  # preempted and computed anew
    swapped_bytes: int = 0  # moved to host memory or back
    num_drafts: int = 0  # guesses made ahead, their tokens, those accepted
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waiting_by_class: dict[str, int] = {}
    busy_seconds: float = 0.0  # of the device's time, since the replica became ready
    tier: str = ""
    num_held: int = 0
    expected_wait_s: float = 0.0
    charged_bytes: int = 0
    prefix_filter: bytes = b""
    load_work: float = 0.0
    tier_since: float = 0.0


class Telemetry(Message, frozen=True, kw_only=True):
    node_id: str
    boot_id: str
    seq: int
    at: float
    acked_epoch: int = 0
    acked_generation: int = 0
    draining: bool = False
    devices: tuple[DeviceLoad, ...] = ()
    replicas: tuple[ReplicaLoad, ...] = ()


# --- inference: gateway -> node --------------------------------------------------------------


class Sampling(Message, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class Generate(Message, frozen=True, kw_only=True):
    """Start one generation. A gateway names itself in ``gateway``; frames go to its subject.

    ``lease_s``: the node ends the generation once it has heard nothing of the gateway for that
    many seconds; 0 (older gateways) means never. ``cache_salt`` is the tenant's, and tenants of one
    class share by ``weight``: one with 4 gets four times the tokens of one with 1. ``record_id``
    is the request on record that this is one of several choices of; "": it is the only one.

    A generation that another replica began is continued from ``sent_token_ids``, of which the
    client has the text: the first delta's index is their number, and ``max_tokens`` and penalties
    count them. ``num_cached_tokens`` is what that replica had found of the prompt in its cache.

    With ``input_lengths`` nothing is generated: the prompt is so many inputs side by side, and
    their vectors come with the terminal delta. A node that does not know the field refuses it,
    since ``max_tokens`` is 0 then.
    """

    request_id: str
    gateway: str
    replica_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    latency_class: str = "standard"
    cache_salt: bytes = b""
    attempt: int = 1
    lease_s: float = 0.0
    weight: float = 1.0
    record_id: str = ""
    sent_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    input_lengths: tuple[int, ...] = ()


class Cancel(Message, frozen=True, kw_only=True):
    gateway: str
    request_ids: tuple[str, ...]


class Resend(Message, frozen=True, kw_only=True):
    """A gateway saw a gap: send again everything of these requests from the given token index.

    Without requests it only says that the gateway lives, which renews its leases.
    """

    gateway: str
    requests: dict[str, int]


# --- a lost gateway's generations: another gateway -> node, and back -----------------------------


class Close(Message, frozen=True, kw_only=True):
    """End what ``gateway`` asked for under these records, take no more of it, and say what it was.

    ``asker`` names itself as a gateway does; the answer carries its ``number``.
    """

    asker: str
    number: int
    gateway: str
    record_ids: tuple[str, ...]


class Produced(msgspec.Struct, frozen=True, array_like=True):
    """One generation's counts; ``finish_reason`` is "" while it still runs.

    ``age_s`` is the time since the node accepted it, ``ran_s`` the time from then to its end.
    """

    record_id: str
    request_id: str
    attempt: int
    replica_id: str
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: str
    error_code: str
    queue_ms: float | None
    age_s: float
    ran_s: float


class Closed(Message, frozen=True, kw_only=True):
    """All generations that the node knows of the records it was asked for; none: it knows none.

    ``more``: the rest follows, in as many messages as its size demands. ``sent``, by request id:
    how many of the output tokens are those of another replica, which the generation continued.
    ``computed``, by request id: how many tokens of inputs to embed were computed.
    """

    node_id: str
    number: int
    generations: tuple[Produced, ...] = ()
    more: bool = False
    sent: dict[str, int] = {}
    computed: dict[str, int] = {}


# --- frames: node -> gateway, one message per engine step and gateway --------------------------


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one request.

    ``index`` counts generated tokens from 0 and is the index of the first id in ``token_ids``.
    ``finish_reason`` is "" while running, else stop | length | cancelled | error; a terminal
    delta may carry no token. ``num_*`` are totals so far. ``embeddings``: a vector for each input,
    as little-endian float32, in the delta that ends a request for them. ``num_computed_tokens``: of
    those inputs, the ones computed by then, also in the delta of one that was cancelled.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_ms: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    embeddings: tuple[bytes, ...] = ()
    num_computed_tokens: int = 0


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """All deltas of one step for one gateway. ``seq`` counts frames per (boot, gateway) from 1."""

    node_id: str
    boot_id: str
    seq: int
    deltas: tuple[Delta, ...]
    v: int = WIRE_VERSION


# --- what a gateway needs to know of a loaded version (object store "tokenizers") --------------


class TokenizerBundle(Message, frozen=True, kw_only=True):
    """Published by the first agent that loads a version; name = ``version_id``.

    ``dimensions`` is the length of an embedding model's vectors, 0 for a model that generates.
    """

    version_id: str
    tokenizer_json: bytes
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    max_model_len: int = 0
    sha256: str = ""
    dimensions: int = 0
