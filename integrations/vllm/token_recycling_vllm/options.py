"""Options, from vLLM's `additional_config={"token_recycling": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SECTION = "token_recycling"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the drafter.

    Attributes:
        top_k: successors kept in a row.
        table_bits: log2 of the rows kept for the last two and three tokens.
        share: whether requests draft from each other's rows and texts. If not, what one request
            says can never appear in another's drafts.
        history_tokens: tokens of ended requests that are kept for suffix matches; 0: none.
        depth: auto drafts as many tokens as pay at the current batch size, possibly none; full
            always drafts `num_speculative_tokens`.
        load_matrix: file of a saved adjacency matrix to begin with.
        save_matrix: file that the adjacency matrix is saved to when the engine ends.
        debug: whether the token of every learned row is compared with what the model was fed
            (eager execution only).
    """

    top_k: int = 8
    table_bits: int = 18
    share: bool = True
    history_tokens: int = 2**20
    depth: str = "auto"
    load_matrix: str | None = None
    save_matrix: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: naming the option, what was given and what is allowed.
        """
        for name, least, most in (
            ("top_k", 1, 64),
            ("table_bits", 8, 24),
            ("history_tokens", 0, 2**28),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name}: got {value!r}; allowed: {least} to {most}")
        for name in ("share", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: true or false")
        if self.depth not in ("auto", "full"):
            raise ValueError(f"depth: got {self.depth!r}; allowed: auto, full")
        for name in ("load_matrix", "save_matrix"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name}: got {value!r}; allowed: the path of a file")
            if value is not None and not self.share:
                raise ValueError(
                    f"{name}: got {value!r} with share false, which has no common matrix"
                )

    @classmethod
    def read(cls, additional_config: Any) -> Options:
        """Return the options of vLLM's `additional_config`.

        Raises:
            ValueError: if an option is unknown or not allowed.
        """
        section = (
            additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
        )
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION}: got {section!r}; allowed: a dictionary of options")
        names = [field.name for field in fields(cls)]
        for name in section:
            if name not in names:
                raise ValueError(f"{SECTION}: got {name!r}; allowed: {', '.join(names)}")
        return cls(**section)
