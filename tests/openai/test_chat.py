"""Chat completions through the official client, on a real gateway, bus and agent."""

import openai

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_chat_completion_has_every_field(client: openai.OpenAI) -> None:
    """Id, model, choice, finish reason and usage, as the client's types expect them."""
    answer = client.chat.completions.create(model="fast", messages=HELLO, max_tokens=4)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.model == "fast" and choice.index == 0
    assert choice.message.role == "assistant" and len(choice.message.content.split()) == 4
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


def test_a_stream_tells_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    """Same prompt, same text; the usage chunk agrees too."""
    asked = {"model": "fast", "messages": HELLO, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
