"""Training EAGLE's and EAGLE-3's draft networks on the hidden states of a frozen model.

EAGLE (Y. Li et al., arXiv 2401.15077, section 4.2) learns to continue the final hidden states: smooth
L1 to the true one, and 0.1 of the cross entropy between the model's probabilities after both. What
it reads gets uniform noise, since drafted states are not exact.

EAGLE-3 (arXiv 2503.01840, section 3.2) learns the model's probabilities alone, and drafts several
tokens in a row from its own states while it learns (training-time test).

Shapes: B texts, T tokens, n learned tokens, D hidden size, V vocabulary, Q tokens that can be
drafted, W hidden states side by side, H heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from model.methods.heads.eagle.drafter import write_checkpoint
from model.methods.heads.eagle.network import NUM_FUSED, Eagle3Network, EagleNetwork, NetworkShape
from model.methods.heads.layers import Projected, attend_rows
from scripts.train_heads.data import Document, TrainingBatch
from scripts.train_heads.heads import HeadTrainer, Loss

# The paper's weight of the cross entropy beside the feature's loss, and the amplitude of its noise.
TOKEN_WEIGHT, NOISE = 0.1, 0.1
# Guesses in a row that EAGLE-3 learns (the authors' traineagle3 takes 7).
NUM_STEPS = 4
INITIAL_STD = 0.02
# Muon's learning rate by AdamW's: its updates are of one size for every matrix.
MUON = 20.0


class NetworkTrainer(HeadTrainer):
    """Base of these and of block drafters: the network, untrained, and the frozen model's embedding and head."""

    module: Any

    def __init__(self, network: nn.Module, model: Any) -> None:
        self.module = network
        for parameter in network.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()

    def optimizers(self, learning_rate: float) -> list[torch.optim.Optimizer]:
        """Return Muon for the matrices, with a rate of its own kind, and AdamW for the rest."""
        parameters = list(self.module.parameters())
        matrices = [one for one in parameters if one.ndim == 2]
        others = [one for one in parameters if one.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=MUON * learning_rate, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def save(self, folder: Path) -> None:
        """Write the network as a checkpoint; the embedding is the model's."""
        write_checkpoint(folder, self.module)


class EagleTrainer(NetworkTrainer):
    """Trains EAGLE's network, which EAGLE-2 drafts with as well."""

    hidden_layers = (-1,)

    def __init__(self, model: Any, options: Any) -> None:
        super().__init__(EagleNetwork(_shape_like(model)), model)

    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        """Return the loss of the next final hidden states [B, T, D]."""
        features, targets = hidden[:, :-2], hidden[:, 1:-1]
        noised = features + NOISE * (2 * torch.rand_like(features) - 1)
        positions = torch.arange(features.shape[1], device=features.device)
        attend = partial(attend_rows, mask=None, is_causal=True)
        states = self.module(self._embedding(batch.token_ids[:, 1:-1]), noised, positions, attend)
        learned = batch.is_learned[:, 2:]  # the tokens that are guessed
        states, targets = states[learned], targets[learned]  # [n, D]
        wanted, found = (self._head(one).float() for one in (targets, states))
        feature_loss = F.smooth_l1_loss(states.float(), targets.float())
        token_loss = F.cross_entropy(found, wanted.softmax(-1))
        figures = {
            "feature": feature_loss.item(),
            "token": token_loss.item(),
            "top1": (found.argmax(-1) == wanted.argmax(-1)).float().mean().item(),
        }
        return Loss(feature_loss + TOKEN_WEIGHT * token_loss, figures)


class Eagle3Trainer(NetworkTrainer):
    """Trains EAGLE-3's network; its vocabulary is the tokens that are learned most often."""

    options = MappingProxyType({"draft_vocab": 32000})

    def __init__(self, model: Any, options: Any) -> None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        # The authors' layers, 2, half of all and the third from the end, are three in deep models alone.
        layers = (2, count // 2, count - 3) if count >= 9 else (1, count // 2, count - 1)
        self.hidden_layers = (*layers, -1)
        shape = _shape_like(model, options.draft_vocab, layers)
        network = Eagle3Network(shape)
        super().__init__(network, model)
        self._is_draftable = torch.ones(shape.vocab_size, dtype=torch.bool)

    def prepare(self, documents: Sequence[Document]) -> None:
        """Choose the vocabulary; the output head begins with the model's rows for it."""
        network, shape = self.module, self.module.shape
        assert isinstance(network, Eagle3Network)
        if network.has_own_vocabulary:
            learned = [ids[begin:] for ids, begin in documents]
            tokens = torch.tensor([token for ids in learned for token in ids])
            counts = torch.bincount(tokens, minlength=shape.vocab_size)
            tables = own_vocabulary(counts, shape.draft_vocab_size)
            network.load_state_dict(network.state_dict() | tables)
            self._is_draftable = tables["t2d"]
        with torch.no_grad():
            rows = self._head.weight[self._is_draftable.to(self._head.weight.device)]
            network.lm_head.weight.copy_(rows)

    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        """Return the mean loss of drafts of `NUM_STEPS` tokens that begin after every token at once.

        Args:
            batch: the texts.
            hidden: states of the fused layers, and the final ones [B, T, W * D].
        """
        size = self.module.shape.hidden_size
        final = hidden[..., NUM_FUSED * size :]
        is_draftable = self._is_draftable.to(hidden.device)
        features = self.module.fused(hidden[:, :-1, : NUM_FUSED * size])
        positions = torch.arange(features.shape[1], device=hidden.device)
        rows = DraftedRows()
        losses: list[torch.Tensor] = []
        figures: dict[str, float] = {}
        for step in range(NUM_STEPS):
            # Row p reads token p + 1 + step, and guesses the one after it.
            tokens = _shifted(batch.token_ids, 1 + step)
            features = self.module(self._embedding(tokens), features, positions + step, rows.attend)
            learned = _shifted(batch.is_learned, 2 + step)
            if not learned.any():
                break
            wanted = self._head(_shifted(final, 1 + step)[learned]).float()  # [n, V]
            found = self.module.logits(features[learned], self._head).float()  # [n, Q]
            # Where the likeliest token cannot be drafted there is nothing to learn.
            can_be = is_draftable[wanted.argmax(-1)]
            aim = wanted[:, is_draftable]
            missed = F.cross_entropy(found, aim.softmax(-1), reduction="none")
            losses.append((missed * can_be).mean())
            right = (found.argmax(-1) == aim.argmax(-1)) & can_be
            figures[f"top1_{1 + step}"] = right.float().mean().item()
        return Loss(torch.stack(losses).mean(), figures)


class DraftedRows:
    """Rows of drafts that begin after every token at once: the text's rows first, then each draft's own."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, projected: Projected) -> torch.Tensor:
        """Append a step's rows and return their attention [B, H, T, d].

        Row p of a step sees the rows of the first step up to p, and row p of the later ones.
        """
        queries = projected.queries
        repeats = queries.shape[-3] // projected.keys.shape[-3]
        self._keys.append(projected.keys.repeat_interleave(repeats, dim=-3))
        self._values.append(projected.values.repeat_interleave(repeats, dim=-3))
        length, scale = queries.shape[-2], queries.shape[-1] ** -0.5
        is_later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
        of_text = (queries @ self._keys[0].transpose(-1, -2)) * scale
        scores = [of_text.masked_fill(is_later, -torch.inf)]
        scores += [(queries * keys).sum(-1, keepdim=True) * scale for keys in self._keys[1:]]
        shares = torch.cat(scores, dim=-1).float().softmax(-1).to(queries.dtype)
        attended = shares[..., :length] @ self._values[0]
        for place, values in enumerate(self._values[1:], start=length):
            attended = attended + shares[..., place, None] * values
        return attended


def own_vocabulary(counts: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Return the tables d2t [Q] and t2d [V] of the most frequent tokens, given every token's count [V]."""
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    can_draft = torch.zeros(len(counts), dtype=torch.bool)
    can_draft[chosen] = True
    return {"d2t": chosen - torch.arange(size), "t2d": can_draft}


def _shape_like(
    model: Any, draft_vocab: int | None = None, hidden_layers: tuple[int, ...] = ()
) -> NetworkShape:
    """Return the shape of a draft network with a layer like the model's."""
    config = model.config.get_text_config(decoder=True)
    size, num_heads = config.hidden_size, config.num_attention_heads
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return NetworkShape(
        hidden_size=size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
        num_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or size // num_heads,
        vocab_size=vocab_size,
        draft_vocab_size=min(draft_vocab or vocab_size, vocab_size),
        hidden_layers=hidden_layers,
    )


def _shifted(rows: torch.Tensor, places: int) -> torch.Tensor:
    """Return rows [B, T, ...] moved to the left, zeros at the end, one row less."""
    return torch.cat((rows[:, places:], torch.zeros_like(rows[:, : places - 1])), dim=1)
