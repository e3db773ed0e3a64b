"""Text from tokens that arrive step by step, split only between characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Decoders write it for invalid or incomplete bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token that is one byte of a character, as sentencepiece writes it.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Decodes a growing list of tokens, piece by piece; the pieces together are the whole text.

    A piece is what the new tokens add to the text of the last piece. So a tokenizer that treats a
    text's first token specially (a leading space) always sees a token before. Without a tokenizer all are empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens that are not yet text
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """Return the text that the tokens complete; for the last ones, everything that is left."""
        if self._tokenizer is None:
            return ""
        self._new += token_ids
        settled = len(self._new) if is_last else self._num_settled()
        before = self._decode(self._known)
        text = self._decode(self._known + self._new[:settled])
        if (text.endswith(REPLACEMENT) and not is_last) or not text.startswith(before):
            return text[len(before) :] if is_last else ""
        if len(text) > len(before):
            self._known, self._new = self._new[:settled], self._new[settled:]
        return text[len(before) :]

    def _num_settled(self) -> int:
        """Return the number of new tokens before the bytes at the end.

        Such tokenizers read bytes that follow each other as a whole: after one that fits no character, the
        characters before it are no text either. Special tokens between them leave no trace.
        """
        num = len(self._new)
        for index in reversed(range(num)):
            token = self._new[index]
            if BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or ""):
                num = index
            elif token not in self._special:
                break
        return num

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Return their text without special tokens and without cleaning up spaces."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
