"""What a computed model's engine counts and refuses, as telemetry, /metrics and states say it."""

from gpuagent.wire.messages import ReplicaSpec, Sampling
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Agent, Control, eventually, spec
from tests.engine.tiny_model import wide_tiny_model

PROMPT = tuple(range(40))
BLOCK_BYTES = 16 * 2 * 2 * 2 * (32 + 4)  # tokens, keys and values, layers, heads, int8 and a scale


def tiny(**fields: object) -> ReplicaSpec:
    shape = {"source": f"file://{wide_tiny_model()}", "max_model_len": 256}
    return spec(**{**shape, "memory_bytes": GIB // 2, **fields})


def start(start_agent: StartAgent) -> Agent:
    roots = ("--file-roots", str(wide_tiny_model().parent))
    return start_agent("n1", "--devices", "cpu:1GiB", *roots)


def value(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f"engine:{name}{{"))
    return float(line.split()[-1])


async def test_guesses_preemptions_swaps_and_cache_hits_are_counted(
    plane: Control, start_agent: StartAgent
) -> None:
    """One slot: a realtime request swaps a batch request out and in again, three blocks or more."""
    agent = start(start_agent)
    draft = {"speculation": "draft", "draft_model": f"file://{wide_tiny_model()}"}
    await plane.place("n1", tiny(kv_cache_dtype="int8", max_batch=1, **draft))
    await plane.replica("n1", "ready", deadline_s=90)
    greedy = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    bulk = await plane.generate(
        "n1", prompt_token_ids=PROMPT, sampling=greedy, latency_class="batch"
    )
    await plane.started(bulk, 5)
    short = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    urgent = await plane.generate(
        "n1", prompt_token_ids=PROMPT, sampling=short, latency_class="realtime"
    )
    for request_id in (bulk, urgent):
        assert (await plane.terminal(request_id)).finish_reason == "length"
    load = await eventually(
        lambda: (found := plane.load("n1")) and found.generated_tokens == 205 and found
    )
    assert (load.num_preemptions, load.num_swapped_out, load.num_recomputed) == (1, 1, 0)
    num_moved, rest = divmod(load.swapped_bytes, BLOCK_BYTES)
    assert num_moved >= 3 and rest == 0
    assert 0 < load.num_drafts <= load.num_draft_tokens
    assert 0 <= load.num_accepted_tokens <= load.num_draft_tokens
    assert 205 - load.num_accepted_tokens <= load.num_steps <= 210
    assert load.step_s > 0

    metrics = agent.get("/metrics")[1]
    assert value(metrics, "num_swapped_out_total") == 1
    assert value(metrics, "swapped_bytes_total") == load.swapped_bytes
    assert value(metrics, "num_steps_total") == load.num_steps
    assert value(metrics, "spec_decode_num_draft_tokens_total") == load.num_draft_tokens
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == load.num_accepted_tokens
    assert value(metrics, "prefix_cache_queries_total") == 80
    assert value(metrics, "prefix_cache_hits_total") == 32, "two full blocks of the same prompt"
    assert value(metrics, "step_seconds") > 0


async def test_what_the_node_cannot_load_is_a_typed_state_with_a_reason(
    plane: Control, start_agent: StartAgent
) -> None:
    """Found when the model's files are there, which no registration can know."""
    start(start_agent)
    draft = {"speculation": "draft", "draft_model": "file:///nowhere/small"}
    refused = {
        "checkpoint_mismatch": {"quantization": "awq-int4"},
        "insufficient_memory": {"swap_bytes": GIB // 4},
        "source_not_allowed": draft,
    }
    names = {code: f"{code.split('_')[0]}.1.g1.0" for code in refused}
    quarter = {"memory_bytes": GIB // 4}
    wanted = [tiny(replica_id=names[code], **quarter, **refused[code]) for code in refused]
    await plane.place("n1", *wanted)
    for code, replica_id in names.items():
        status = await plane.replica("n1", "failed", replica_id, deadline_s=90)
        assert status.reason_code == code, status
        assert len(status.reason) > 20
