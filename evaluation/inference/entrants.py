"""Entrants of a comparison: methods with options, and transformers' own ways to decode as referees.

An entrant is named as its inference command spells it, without what all have in common: "pld",
"recycling --tree-version 2.2.2". NAME-auto is the method with its automatic number of nodes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluation.inference.command import parse
from evaluation.inference.config import RunConfig
from evaluation.inference.referees import ASSISTED, REFEREES, Referee
from model.commands.command_line import UserError, user_errors
from model.commands.model_options import DEMO_MODEL
from model.methods.registry import METHODS, Method, find_method
from model.options import unknown_name

AUTO = "-auto"
BASELINE = "vanilla"
# The baseline once more: what the two differ by, the run cannot tell apart.
AGAIN = f"{BASELINE}-again"
DEMO_DRAFT = str(DEMO_MODEL.with_name("draft"))


@dataclass(frozen=True, slots=True)
class Entrant:
    """A method or referee with its options."""

    words: str  # as it was named
    method: Method | Referee
    config: Any

    @property
    def label(self) -> str:
        """Its words as part of a file's name: "recycling-tree-version-2.2.2"."""
        return re.sub(r"[^\w.]+", "-", self.words).strip("-")

    @property
    def is_again(self) -> bool:
        """Whether it is the baseline once more, which measures what the run cannot tell apart."""
        return self.words == AGAIN


def entrants_of(
    words: Sequence[str],
    model_path: str,
    draft_model: str | None = None,
    needs_baseline: bool = True,
) -> list[Entrant]:
    """Return the entrants of a comparison, the baseline first.

    Args:
        words: one text an entrant, such as "recycling --start cold".
        model_path: the target model.
        draft_model: what entrants draft with that need a model and name none; with the demo model
            there is one by default.
        needs_baseline: whether the baseline must be among them.

    Raises:
        UserError: if a method or an option is unknown or not allowed, an entrant is there twice, or
            the draft model is missing or for nothing.
    """
    if needs_baseline and BASELINE not in words:
        raise UserError(
            f"methods: got {' '.join(words)}; {BASELINE}, the baseline, must be among them"
        )
    needing = [one for one in words if _needs_draft_model(one)]
    if draft_model is not None and not needing:
        raise UserError(
            f"draft_model: got {draft_model}; only sps and {ASSISTED} draft with it, add one to --methods"
        )
    if draft_model is None and Path(model_path).resolve() == DEMO_MODEL:
        draft_model = DEMO_DRAFT
    if needing and draft_model is None:
        raise UserError(f"draft_model: got none; give the model that {needing[0]} drafts with")
    heads = DEMO_MODEL.parent if Path(model_path).resolve() == DEMO_MODEL else None
    in_order = sorted(words, key=lambda one: one != BASELINE)
    found = [entrant_of(one, draft_model, heads) for one in in_order]
    labels = [entrant.label for entrant in found]
    if len(set(labels)) < len(labels):
        raise UserError(f"methods: got {' '.join(words)}; allowed: each once")
    return found


def entrant_of(words: str, draft_model: str | None = None, heads: Path | None = None) -> Entrant:
    """Return the entrant of these words.

    Args:
        words: method and options.
        draft_model: what it drafts with if it needs a model and names none.
        heads: folder with heads of each method, where its words name none.

    Raises:
        UserError: if the method or an option is unknown or not allowed, or heads are missing.
    """
    name, *options = _split(words)
    if name in REFEREES:
        if options:
            raise UserError(f"methods: got {words!r}; {name} takes no options")
        return Entrant(words, REFEREES[name], REFEREES[name].config(draft_model))
    method = _method_of(name)
    given = list(options)
    if name.endswith(AUTO):
        for option, value in method.drafter_class.auto_options.items():
            given += [f"--{option.replace('_', '-')}", value]
    if _needs_draft_model(words):
        given += ["--draft-model", str(draft_model)]
    if method.drafter_class.drafts_with() == "heads" and not _names("--heads", options):
        if heads is None:
            raise UserError(
                f'heads: got none; name the folder of {method.heads_of}\'s heads: "{name} --heads FOLDER"'
            )
        given += ["--heads", str(heads / method.heads_of)]
    run, config, matrix = parse(method, given)
    if run != RunConfig() or matrix.load or matrix.save:
        raise UserError(
            f"methods: got {words!r}; allowed: options of {method.name} itself, without a saved matrix"
        )
    return Entrant(words, method, config)


def baseline_again(entrants: Sequence[Entrant]) -> Entrant:
    """Return the baseline as a second entrant, which measures what the run cannot tell apart."""
    return replace(next(one for one in entrants if one.words == BASELINE), words=AGAIN)


def _method_of(name: str) -> Method:
    """Return the method of a name, with or without `AUTO`."""
    base = name.removesuffix(AUTO)
    with user_errors():
        if base in METHODS or ":" in base:
            method = find_method(base)
            if base == name or method.drafter_class.auto_options:
                return method
        known = [*METHODS]
        known += [one + AUTO for one in METHODS if find_method(one).drafter_class.auto_options]
    raise UserError(unknown_name("methods", name, [*known, *REFEREES]))


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words) or [""]
    except ValueError as error:
        raise UserError(f"methods: got {words!r}: {error}; close the quotation") from error


def _needs_draft_model(words: str) -> bool:
    """Whether an entrant drafts with a model that its words do not name."""
    name, *options = _split(words)
    if name in REFEREES:
        return REFEREES[name].drafts_with_model
    return not _names("--draft-model", options) and (
        _method_of(name).drafter_class.drafts_with() == "draft_model"
    )


def _names(option: str, options: Sequence[str]) -> bool:
    spelled = [word.partition("=")[0].replace("_", "-") for word in options]
    return option in spelled
