import threading
import time
from pathlib import Path

import pytest

from lehr.core.errors import ConfigError
from lehr.model.tokenizer import ByteTokenizer, load_tokenizer


def test_text_round_trips_and_bytes_add_up(smollm: Path) -> None:
    tokenizer = load_tokenizer(smollm)
    for text in ("Add 123 and 45.67 — déjà vu 😀\n\t  x", "", "   ", "<|im_start|>user"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert not set(ids) & set(tokenizer.specials.values())


def test_digits_are_single_tokens(smollm: Path) -> None:
    assert len(load_tokenizer(smollm).encode("123456")) == 6


def test_special_tokens_have_no_bytes(smollm: Path) -> None:
    tokenizer = load_tokenizer(smollm)
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    assert tokenizer.decode([tokenizer.eos_id]) == ""
    assert tokenizer.vocab_size == 49152


def test_a_character_split_over_tokens(smollm: Path) -> None:
    tokenizer = load_tokenizer(smollm)
    ids = tokenizer.encode("🜚")
    assert len(ids) > 1
    assert "�" in tokenizer.decode(ids[:1])
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🜚".encode()


def test_half_a_character_is_refused(smollm: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot encode 'a.ud83d'.*halves of surrogate pairs"):
        load_tokenizer(smollm).encode("a\ud83d")


def test_saved_tokenizers_load_alike(smollm: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(smollm)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("two words") == tokenizer.encode("two words")
    assert again.template == tokenizer.template and again.eos_id == tokenizer.eos_id


def test_the_byte_tokenizer_loads_from_its_folder(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.decode([*tokenizer.encode("aé"), tokenizer.eos_id]) == "aé"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "�"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_other_threads_go_on_while_a_long_text_is_encoded(smollm: Path) -> None:
    tokenizer = load_tokenizer(smollm)
    gaps, over = [0.0], threading.Event()

    def ticks() -> None:
        last = time.perf_counter()
        while not over.wait(0.005):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=ticks)
    thread.start()
    began = time.perf_counter()
    assert len(tokenizer.encode("1" * 1_000_000)) == 1_000_000
    took = time.perf_counter() - began
    over.set()
    thread.join()
    assert max(gaps) < took / 2
