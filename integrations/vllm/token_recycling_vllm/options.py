"""Options, from vLLM's `additional_config={"token_recycling": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SECTION = "token_recycling"
RANGES = {"top_k": (1, 64), "table_bits": (8, 24), "history_tokens": (0, 2**28)}
DEPTHS = ("auto", "full")


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Options of the drafter.

    Raises:
        ValueError: if a value is not allowed.
    """

    top_k: int = 8  # successors kept in a row
    table_bits: int = 18  # log2 of the rows kept for the last two and three tokens
    # Whether requests draft from each other's rows and texts. If not, what one request says can never appear
    # in another's drafts.
    share: bool = True
    history_tokens: int = 2**20  # of ended requests that are kept for suffix matches; 0: none
    # auto drafts as many tokens as pay at the current batch size, possibly none; full always drafts
    # `num_speculative_tokens`.
    depth: str = "auto"
    load_matrix: str | None = None  # file of a saved adjacency matrix to begin with
    save_matrix: str | None = None  # file that it is saved to when the engine ends
    # Whether the token of every learned row is compared with what the model was fed (eager execution only).
    debug: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            self._check(name, is_number and least <= value <= most, f"{least} to {most}")
        for name in ("share", "debug"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("depth", self.depth in DEPTHS, ", ".join(DEPTHS))
        for name in ("load_matrix", "save_matrix"):
            value = getattr(self, name)
            self._check(name, value is None or (value and isinstance(value, str)), "a file's path")
            self._check(
                name,
                value is None or self.share,
                "none with share false, which has no common matrix",
            )

    def _check(self, name: str, is_allowed: object, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {allowed}")

    @classmethod
    def read(cls, additional_config: Any) -> PluginOptions:
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
