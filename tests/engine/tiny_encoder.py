"""A small random encoder with a WordPiece tokenizer, made by transformers: a second or less."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "cat", "dog", "sat", "slept", "##s", "tax", "law", "a", "b", "c", "d", "e", "##e")
VOCAB = {word: i for i, word in enumerate((*SPECIALS, *WORDS))}
DIMENSIONS, POSITIONS = 32, 40


@cache
def tiny_encoder() -> Path:
    """The folder of a 2-layer BERT of 32 dimensions and 40 positions, without pooling files."""
    folder = Path(mkdtemp(prefix="tiny-bert-"))
    torch.manual_seed(6)
    config = BertConfig(
        vocab_size=len(VOCAB),
        hidden_size=DIMENSIONS,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    word_pieces().save(str(folder / "tokenizer.json"))
    return folder


def word_pieces() -> Tokenizer:
    """As of BERT, with the padding and truncation that such files hold and that serve nobody."""
    tokenizer = Tokenizer(models.WordPiece(vocab=VOCAB, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer
