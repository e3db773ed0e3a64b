"""The drafters of entrants."""

from __future__ import annotations

from evaluation.answering.entrants import Entrant
from evaluation.answering.referees import Referee
from model.commands.matrix_file import make_drafter
from model.engine.drafter import Drafter
from model.engine.target import TargetModel
from model.methods.vanilla.drafter import VanillaConfig, VanillaDrafter


def drafter_of(entrant: Entrant, target: TargetModel) -> Drafter:
    """Return a fresh drafter; plain decoding's for transformers' own ways to decode, which have none."""
    if isinstance(entrant.method, Referee):
        return VanillaDrafter(VanillaConfig(), target.vocab_size, target.device)
    return make_drafter(entrant.method, entrant.config, target.vocab_size, target.device, {})
