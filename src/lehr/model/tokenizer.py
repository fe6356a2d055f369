"""Text to token ids and back, on the ``tokenizers`` library alone.

:func:`load_tokenizer` opens the tokenizer of a model folder. :class:`ByteTokenizer` needs no files; it
serves the tiny model. To add a kind, implement ``model.base.Tokenizer`` and name it in
:func:`load_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lehr.core.errors import ConfigError
from lehr.model.values import read_json

BYTE_CLASS = "lehr.ByteTokenizer"


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level BPE writes for each byte, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    return table | {chr(256 + i): b for i, b in enumerate(others)}


class HfTokenizer:
    """A ``tokenizer.json`` of the Hugging Face format.

    specials: the text of every special token, with its id. template: the chat template, or None. prefix: ids
    that stand before a text that is no chat, such as the beginning-of-sequence token.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        path = folder / "tokenizer.json"
        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ConfigError(
                f"cannot read {path}: {error}", expected="a Hugging Face tokenizer.json"
            ) from error
        self._fast.encode_special_tokens = True
        self._folder = folder
        settings = read_json(folder / "tokenizer_config.json")
        added = self._fast.get_added_tokens_decoder()
        self.specials: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = frozenset(self.specials.values())
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self.eos_id: int = self._eos(settings)
        self.template: str | None = _template(folder, settings)
        around = self._fast.encode("", add_special_tokens=True).ids
        self.prefix: tuple[int, ...] = tuple(i for i in around if i != self.eos_id)
        self._alphabet = _byte_alphabet()
        self._byte_level = '"ByteLevel"' in str(self._fast.decoder) or "ByteLevel" in str(self._fast.decoder)

    def _eos(self, settings: Mapping[str, Any]) -> int:
        name = settings.get("eos_token")
        text = name.get("content") if isinstance(name, dict) else name
        found = self._fast.token_to_id(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(
                f"{self._folder / 'tokenizer_config.json'} names no usable eos_token (found {name!r})",
                hint="Copy tokenizer_config.json from the model's own repository.",
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; text that looks like a special token is encoded as plain text.

        Raises :class:`ConfigError` for half of a surrogate pair.

        Other threads go on meanwhile: a batch, unlike a single text, is encoded without the interpreter's lock.
        """
        try:
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise ConfigError(
                f"cannot encode {text[:80]!r}", expected="text without halves of surrogate pairs"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, special tokens left out; incomplete bytes become U+FFFD."""
        return self._fast.decode([i for i in ids if i not in self._special_ids], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the raw bytes of one token, b"" for a special token or an unused id."""
        text = None if token in self._special_ids else self._fast.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level and all(c in self._alphabet for c in text):
            return bytes(self._alphabet[c] for c in text)
        if text.startswith("<0x") and len(text) == 6:
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode()

    def vocabulary(self) -> dict[str, int]:
        """Return every token as it is spelt in the file, with its id."""
        return self._fast.get_vocab(with_added_tokens=True)

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files into ``folder``."""
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        ):
            source = self._folder / name
            if source.exists() and source.resolve() != (folder / name).resolve():
                (folder / name).write_bytes(source.read_bytes())


class ByteTokenizer:
    """One id per byte, and three special tokens after them. Chats are rendered as ChatML."""

    END, IM_START, IM_END = 256, 257, 258

    def __init__(self) -> None:
        self.vocab_size = 259
        self.eos_id = self.IM_END
        self.specials = {"<|endoftext|>": self.END, "<|im_start|>": self.IM_START, "<|im_end|>": self.IM_END}
        self.template: str | None = None
        self.prefix: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, special tokens left out; incomplete bytes become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of one token, b"" for a special token or an unused id."""
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> dict[str, int]:
        """Return every token with its id."""
        return {f"<0x{byte:02X}>": byte for byte in range(256)} | self.specials

    def save(self, folder: Path) -> None:
        """Write what :func:`load_tokenizer` needs into ``folder``."""
        text = json.dumps({"tokenizer_class": BYTE_CLASS, "eos_token": "<|im_end|>"}, indent=2)
        (folder / "tokenizer_config.json").write_text(text)


AnyTokenizer = HfTokenizer | ByteTokenizer


def load_tokenizer(folder: Path) -> AnyTokenizer:
    """Return the tokenizer of a model folder, or raise :class:`ConfigError` naming what is missing."""
    if read_json(folder / "tokenizer_config.json").get("tokenizer_class") == BYTE_CLASS:
        return ByteTokenizer()
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(
            f"no tokenizer in {folder}",
            expected="tokenizer.json and tokenizer_config.json beside the weights",
            hint="Copy both from the model's repository.",
        )
    return HfTokenizer(folder)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
