"""What a gateway gets of a model's tokenizer."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.tokenizer_bundle import read_tokenizer_bundle
from tests.engine.real_model import real_model


def test_the_bundle_of_the_default_model():
    bundle = read_tokenizer_bundle(real_model().path)
    assert bundle.eos_token_id == (2,)
    assert bundle.bos_token_id == 1
    assert bundle.max_model_len == 8192
    assert bundle.vocab_size == 49152
    assert bundle.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in bundle.chat_template


def test_the_tokenizer_gives_transformers_tokens():
    """Digits one by one, contractions, scripts, spaces, and text that names special tokens."""
    mine = Tokenizer.from_str(read_tokenizer_bundle(real_model().path).tokenizer_json.decode())
    theirs = AutoTokenizer.from_pretrained(real_model().path)
    for text in [
        "Call 1234567, won't you?",
        "  two  spaces\n\n\ttab",
        "naïve 你好 🙂",
        "<|im_end|>",
    ]:
        assert mine.encode(text).ids == theirs(text)["input_ids"]
        assert mine.decode(mine.encode(text).ids, skip_special_tokens=False) == text
    assert len(mine.encode("1234567").ids) == 7
    assert mine.encode("<|im_start|>").ids == [1]


def write(folder, **files):
    defaults = {"tokenizer": {}, "config": {"max_position_embeddings": 64, "vocab_size": 9}}
    for name, content in {**defaults, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_several_end_tokens_and_missing_files(tmp_path):
    bundle = read_tokenizer_bundle(write(tmp_path, generation_config={"eos_token_id": [3, 4]}))
    assert bundle.eos_token_id == (3, 4)
    assert (bundle.bos_token_id, bundle.chat_template) == (None, "")


def test_a_template_of_several_or_in_a_file_of_its_own(tmp_path):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert read_tokenizer_bundle(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_tokenizer_bundle(tmp_path).chat_template == "file"


def test_no_known_limit_of_the_tokenizer_leaves_the_models(tmp_path):
    write(tmp_path, tokenizer_config={"model_max_length": 10**30})
    assert read_tokenizer_bundle(tmp_path).max_model_len == 64


@pytest.mark.parametrize(
    "files",
    [
        {"config": {}},
        {"config": []},
        {"generation_config": {"eos_token_id": "2"}},
        {"generation_config": {"eos_token_id": -2}},
        {"tokenizer_config": {"chat_template": 3}},
        {"tokenizer_config": {"chat_template": "x" * 300_000}},
    ],
    ids=lambda files: str(files)[:40],
)
def test_what_makes_no_sense_is_refused(tmp_path, files):
    with pytest.raises(ModelStoreError) as refusal:
        read_tokenizer_bundle(write(tmp_path, **files))
    assert refusal.value.code == "tokenizer_rejected"


def test_a_tokenizer_that_is_absent_or_huge_is_refused(tmp_path):
    write(tmp_path)
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelStoreError, match="too large"):
        read_tokenizer_bundle(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelStoreError, match="tokenizer_rejected"):
        read_tokenizer_bundle(tmp_path)
