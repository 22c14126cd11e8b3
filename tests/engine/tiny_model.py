"""A small random model with a byte-level tokenizer, made by transformers: a second or less."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 259
EOS = 258


@cache
def tiny_model() -> Path:
    """The folder of a 2-layer Llama with 256 byte tokens and three special ones."""
    folder = Path(mkdtemp(prefix="tiny-llama-"))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token per byte, in the alphabet's order, then <bos>, <pad> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<pad>", "<eos>"])
    return tokenizer


@cache
def wide_tiny_model() -> Path:
    """Like `tiny_model`, of a shape that the native kernels accept, with biases."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        attention_bias=True,
        bos_token_id=256,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    return _saved_with_noise(config, "wide-llama-", 2)


@cache
def uneven_tiny_model() -> Path:
    """Like `tiny_model`, with 3 KV heads and an MLP of 65, a head of its own, and biases."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=72,
        intermediate_size=65,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    return _saved_with_noise(config, "uneven-llama-", 3)


def _saved_with_noise(config: LlamaConfig, prefix: str, seed: int) -> Path:
    """Biases start at 0 and norms at 1, which would hide mistakes."""
    folder = Path(mkdtemp(prefix=prefix))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
