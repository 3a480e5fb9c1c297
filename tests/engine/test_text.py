"""Text comes out whole, in order, and the same from any process that gets the same tokens."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from pdlink.engine import tiny
from pdlink.engine.answer import Detokenizer


@cache
def _tokenizer() -> Any:
    return tiny.build_tokenizer()


class _ByteFallback:
    """Decodes as SentencePiece models do: a run of bytes that is no UTF-8 gives one replacement for each byte."""

    def decode(self, tokens: list[int], **_: object) -> str:
        data = bytes(tokens)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else "\ufffd" for byte in data)


class _Leading:
    """Drops the space of a text's first token, as SentencePiece does."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f" w{token}" for token in tokens)[1:]


def _pieces(tokens: bytes | list[int], *, stop: tuple[str, ...] = (), tokenizer: Any = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer or _tokenizer(), (104, 105), stop)
    pieces = []
    for token in tokens:
        text, stopped = detokenizer.add(token)
        pieces.append(text)
        if stopped:
            return pieces
    pieces.append(detokenizer.finish())
    return pieces


@pytest.mark.parametrize("text", ["plain ascii", "grüße €uro 中文字符 🙂👍🏽", "a" * 100 + "é" * 60, ""])
def test_pieces_make_the_text(text: str) -> None:
    pieces = _pieces(text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_held_until_it_is_complete() -> None:
    assert _pieces("€!".encode()) == ["", "", "€", "!", ""]
    assert _pieces("🙂".encode(), tokenizer=_ByteFallback()) == ["", "", "", "🙂", ""]


def test_bytes_that_are_no_text_do_not_hold_the_answer_back() -> None:
    pieces = _pieces([0xFF] * 200)
    assert "".join(pieces) == "\ufffd" * 200
    assert all(pieces[10:-1]), "nothing may wait for the end"
    assert "".join(_pieces(b"\xe2\x82A")) == "\ufffdA"


def test_space_before_the_first_word_is_kept() -> None:
    assert _pieces([7, 8], tokenizer=_Leading()) == [" w7", " w8", ""]


def test_long_answers_are_not_decoded_from_the_start() -> None:
    longest = 0

    class _Counting:
        def decode(self, tokens: list[int], **_: object) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return bytes(tokens).decode()

    assert "".join(_pieces(b"x" * 1000, tokenizer=_Counting())) == "x" * 1000
    assert longest < 32


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_give_the_text_of_all_at_once_up_to_the_stop(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab€🙂 ", k=rng.randrange(80)))
    stop = tuple("".join(rng.choices("ab€", k=rng.randrange(1, 5))) for _ in range(rng.randrange(3)))
    got = "".join(_pieces(text.encode(), stop=stop))
    # The stop that is complete first ends the answer; of several at one point, the earliest beginning counts.
    for end in range(len(text) + 1):
        hits = [text[:end].find(s) for s in stop if s in text[:end]]
        if hits:
            assert got == text[: min(hits)]
            break
    else:
        assert got == text


def test_stop_string_is_found_across_tokens_and_cut_off() -> None:
    assert _pieces(b"one END two", stop=("END",)) == ["o", "n", "e", " ", "", "", ""]


def test_what_only_began_a_stop_string_comes_out_after_all() -> None:
    assert _pieces(b"EN", stop=("END",)) == ["", "", "EN"]
    assert _pieces(b"ENx", stop=("END",)) == ["", "", "ENx", ""]


def test_special_tokens_have_no_text() -> None:
    assert "".join(_pieces([97, tiny.END_TOKEN_ID, 98])) == "ab"
