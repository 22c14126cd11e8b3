"""Text as it comes equals the text decoded at the end, and stops where it should."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpuagent.engine.detokenizer import MAX_HELD, Detokenizer, load_tokenizer
from gpuagent.models.errors import LoadError
from tests.engine.real_model import real_model
from tests.engine.tiny_model import byte_tokenizer

BYTES = byte_tokenizer()


def pushed(text, stop=(), tokenizer=BYTES):
    """The deltas of a text pushed token by token, and the detokenizer after them."""
    detokenizer = Detokenizer(tokenizer, (), stop)
    return [detokenizer.push(t) for t in tokenizer.encode(text).ids], detokenizer


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Evil"}}', "\x80"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(LoadError, match="tokenizer_rejected"):
        load_tokenizer(tmp_path, 100)


def test_a_tokenizer_that_is_absent_huge_or_knows_more_tokens_is_refused(tmp_path):
    with pytest.raises(LoadError, match="tokenizer_rejected"):
        load_tokenizer(tmp_path, 259)
    BYTES.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 259).get_vocab_size() == 259
    with pytest.raises(LoadError, match="not below 258"):
        load_tokenizer(tmp_path, 258)
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(LoadError, match="larger"):
        load_tokenizer(tmp_path, 259)


def test_an_incomplete_character_is_held_back():
    deltas, _ = pushed("a€b")
    assert deltas == ["a", "", "", "€", "b"]


def test_what_never_becomes_a_character_comes_out_at_the_end():
    deltas, detokenizer = pushed("€")
    cut = Detokenizer(BYTES, ())
    assert [cut.push(t) for t in BYTES.encode("€").ids[:2]] == ["", ""]
    assert cut.finish() == "\ufffd"
    assert deltas[-1] + detokenizer.finish() == "€"


def test_endless_broken_bytes_are_not_held_for_ever():
    detokenizer = Detokenizer(BYTES, ())
    lone = BYTES.encode("€").ids[1]
    deltas = [detokenizer.push(lone) for _ in range(3 * MAX_HELD)]
    assert "".join(deltas).count("\ufffd") >= MAX_HELD


def test_the_start_of_a_stop_string_is_held_and_released_if_it_is_none():
    deltas, _ = pushed("the ENding", stop=("END",))
    assert deltas == ["t", "h", "e", " ", "", "", "ENd", "i", "n", "g"]


def test_text_ends_before_the_earliest_stop_string():
    deltas, detokenizer = pushed("one two three", stop=("three", "two"))
    assert "".join(deltas) == "one "
    assert detokenizer.stopped
    assert detokenizer.finish() == ""


def test_a_held_tail_is_delivered_when_nothing_follows():
    deltas, detokenizer = pushed("the EN", stop=("END",))
    assert "".join(deltas) == "the "
    assert detokenizer.finish() == "EN"


def test_special_tokens_have_no_text():
    deltas, _ = pushed("a<eos>b")
    assert deltas == ["a", "", "b"]


def test_a_prompt_ending_inside_a_character_is_continued():
    ids = BYTES.encode("€uro").ids
    detokenizer = Detokenizer(BYTES, ids[:2])
    assert "".join(detokenizer.push(t) for t in ids[2:]).endswith("uro")


@cache
def smollm2_tokenizer():
    return Tokenizer.from_file(str(real_model().path / "tokenizer.json"))


@settings(deadline=None)
@given(st.text(max_size=40))
def test_deltas_add_up_to_the_text(text):
    for tokenizer in (smollm2_tokenizer(), BYTES):
        ids = tokenizer.encode(text).ids
        deltas, detokenizer = pushed(text, tokenizer=tokenizer)
        assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_like_a_search_in_the_whole_text(text, stop):
    deltas, detokenizer = pushed(text, tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    delivered = "".join(deltas) + detokenizer.finish()
    assert detokenizer.stopped == bool(ends)
    # The text is read as it comes, so the stop string that ends first decides; of those that
    # end together, the one that begins first.
    seen = text[: min(ends)] if ends else text
    assert delivered == seen[: min((seen.find(s) for s in stop if s in seen), default=None)]
