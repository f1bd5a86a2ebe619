"""Tokenizers of the kinds that models have, small and made on the spot: each writes a folder's tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quickstart.tiny_model import build_tokenizer

SPECIAL = ["<pad>", "<eos>"]
_CORPUS = [
    "to be or not to be",
    "2 + 2 = 4, doesn't it?",
    "\u00fcber \u00e9t\u00e9 \u4f60\u597d \U0001f600\U0001f680",
    "#### 42",
] * 4


def quickstart(folder: Path) -> None:
    """The quick start's bytes."""
    build_tokenizer().save_pretrained(folder)


def byte_level(folder: Path) -> None:
    """BPE over bytes with merges: a character may be cut anywhere."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    made.save(str(folder / "tokenizer.json"))


def word_piece(folder: Path) -> None:
    """Words and their ## parts; its decoder tidies up spaces before punctuation."""
    made = Tokenizer(models.WordPiece(unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.train_from_iterator(_CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    made.save(str(folder / "tokenizer.json"))


def metaspace(folder: Path) -> None:
    """Unigram in which a word's space is a letter: the first one is left out."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(_CORPUS, trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<pad>"))
    made.save(str(folder / "tokenizer.json"))


def byte_fallback(folder: Path) -> None:
    """As Llama 2 and Gemma: pieces with a letter for the space, and single bytes for what no piece says."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc\u00e9", "\u2581to", "\u2581be"]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))


def letters(folder: Path) -> None:
    """Words without a decoder: they are joined by spaces."""
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))


KINDS: list[Callable[[Path], None]] = [quickstart, byte_level, word_piece, metaspace, byte_fallback, letters]
