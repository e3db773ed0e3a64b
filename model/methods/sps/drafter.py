"""SpS, speculative sampling: a smaller model with the same vocabulary makes the guesses.

The classic baseline. The draft model continues the text greedily by a few tokens; the target model
verifies this chain. Guesses are deterministic (one token, not a distribution), so the common
verification keeps greedy decoding and sampling exact. The papers' accept/reject ratio, which
sampled guesses need, is not needed.

The draft model has a KV cache of its own. Rejected tokens are rolled back, so every token of the text is read once.

Source: Y. Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv
2211.17192; C. Chen et al., Accelerating LLM Decoding with Speculative Sampling, arXiv 2302.01318
(gamma, K -> `num_draft_tokens`).

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...backends.passes.cache import TreeCache
from ...backends.target import TargetModel
from ...budget.acceptance import Backoff, ChainAcceptance
from ...budget.cost_model import CostModel
from ...budget.measure import step_costs
from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, VerifiedStep
from ...engine.tree import DraftTree, TreeTopology
from ...kernels.linear import num_weights, stored
from ...machine.files import written_state
from ...machine.hardware import Kept, uploaded
from ...options import DTYPES, Options, budget_option, option

# The draft model's cache grows by this many rows when it is full: the text's final length is unknown.
MORE_ROWS = 512
# Most tokens in the first pass of a draft: the last guess, if it was right, and the token after it.
MOST_UNREAD = 2


def check_draft_model(name: str, vocab_size: int) -> None:
    """Raise ValueError if a draft model does not exist, or its vocabulary size is not the target model's."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not Path(name).is_dir():
        raise ValueError(
            f"draft_model: got {name!r}; allowed: a folder with a model, or a hub name ORG/NAME"
        )
    config = _read(AutoConfig.from_pretrained, name)
    found = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if found != vocab_size:
        raise ValueError(
            f"draft_model {name}: has a vocabulary of {found} tokens; allowed: {vocab_size}, as the "
            "target model; give a smaller model of the same family"
        )


def load_draft_model(name: str, dtype: str, device: torch.device) -> TargetModel:
    """Load a draft model, or raise ValueError if its weights cannot be loaded, or its cache cannot be rolled back.

    The last one stays loaded while the files in its folder are unchanged.
    """
    # Make the index explicit: "cuda" and "cuda:0" are one device.
    return _loaded(name, dtype, torch.empty(0, device=device).device, written_state(name))


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: str, device: torch.device, state: tuple[object, ...]) -> TargetModel:
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "float16"
    model = _read(AutoModelForCausalLM.from_pretrained, name, dtype=getattr(torch, dtype))
    draft = TargetModel(model.eval().to(device))
    if draft.mixers:
        raise ValueError(
            f"draft_model {name}: keeps recurrent state; allowed: attention only, whose cached "
            "rows can be dropped"
        )
    return draft


def _read(load: Callable[..., Any], name: str, **options: object) -> Any:
    try:
        return load(name, **options)
    # transformers raises many types of errors for a missing, broken or unknown model.
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"draft_model {name}: cannot be loaded: {cause}") from error


@dataclass(frozen=True, slots=True)
class SpsConfig(Options):
    draft_model: str | None = option(None, "folder or hub name of the draft model (required)")
    num_draft_tokens: int = option(
        5, "tokens that the draft model writes in a step", least=1, most=MAX_DRAFT
    )
    draft_dtype: str = option(
        "auto", "of the draft model; auto: float32 on CPU, float16 elsewhere", choices=DTYPES
    )
    budget: str = budget_option("fixed")


class SpsDrafter(CostAwareDrafter):
    """Drafts the greedy continuation of a smaller model.

    Raises:
        ValueError: if the draft model is missing, cannot be loaded or has another vocabulary.
    """

    config_class = SpsConfig
    auto_options = MappingProxyType({"budget": "auto"})

    def __init__(self, config: SpsConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        if config.draft_model is None:
            raise ValueError(
                "draft_model: got none; give the folder or hub name of a smaller model"
            )
        check_draft_model(config.draft_model, vocab_size)
        self._model = load_draft_model(config.draft_model, config.draft_dtype, device)
        self._models: Kept[TargetModel] = Kept()  # the one in use by the kind of its passes
        self.max_nodes = 1 + config.num_draft_tokens
        self._num_tokens = len(stored(self._model.model.get_input_embeddings()))
        self._cache = self._model.new_cache(0)
        self._runs_like: type = TargetModel
        self._context_limit = math.inf
        self.wants_costs = config.budget == "auto"
        self._rates = ChainAcceptance(1, config.num_draft_tokens)
        self._backoff = Backoff()

    def sibling(self) -> SpsDrafter:
        """Return a drafter whose text has a cache of its own; the draft model and what was learned are shared."""
        sibling = super().sibling()
        sibling._cache = self._model.new_cache(0)
        return sibling

    def for_target(self, target: TargetModel) -> Drafter:
        """Return the drafter, whose draft model runs in the same way as the target model from now on."""
        self._run_like(target)
        return super().for_target(target)

    def prepare(self, target: TargetModel, num_tokens: int) -> None:
        """Prepare both models; the draft model reads one guess, or the few tokens that it has not read."""
        super().prepare(target, num_tokens)
        self._run_like(target)
        del self._cache  # graphs hold its rows, which are used again
        self._model.warm_up(num_tokens, range(1, MOST_UNREAD + 1))
        self._cache = self._model.new_cache(num_tokens)

    @torch.inference_mode()
    def start(self, prompt_ids: Sequence[int]) -> None:
        """Read the prompt up to its last token, or, if drafting does not pay now, leave it to the first draft."""
        limit = self._model.steady_limit(len(prompt_ids))
        self._context_limit = math.inf if limit is None else limit
        if max(prompt_ids) >= self._num_tokens:
            self._context_limit = 0  # a prompt token without a logit, unknown to the draft model
        self._cache = self._roomy_cache(len(prompt_ids))
        self._cache.keep(0, ())
        if not self._backoff.is_waiting and len(prompt_ids) <= self._context_limit:
            self._read(prompt_ids, self._cache)

    @torch.inference_mode()
    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        # The draft model reads the text and its guesses but the last.
        room = self._context_limit + 1 - len(context)
        length = int(min(self.config.num_draft_tokens, budget.max_depth, room))
        if length >= 1 and budget.cost_curve and self.wants_costs:
            # Now and then 1 where none pays, to keep learning.
            paying = self._rates.paying(0, length, budget.cost_curve)
            length = (paying or 1) if self._backoff.allow(paying > 0) else 0
        if length < 1:
            return DraftTree.chain([context[-1]])
        cache = self._roomy_cache(len(context) + length)
        cache.keep(min(cache.length, len(context) - 1), ())
        if len(context) - cache.length > MOST_UNREAD:
            self._read(context, cache)
        unread = DraftTree.chain(context[cache.length :])
        guesses = [uploaded(context[-1:], self.device)]
        for _ in range(length):
            # Stays on the device, so that the next guess does not wait for the host.
            guess = self._model.forward(unread, cache)[-1:].argmax(dim=-1)
            guesses.append(guess)
            unread = DraftTree(guess, TreeTopology.chain(1))
        return DraftTree(torch.cat(guesses), TreeTopology.chain(1 + length))

    def observe(self, step: VerifiedStep) -> None:
        """Roll the cache back to the accepted guesses: they begin the rows after the root's."""
        num_drafted = step.tree.topology.num_nodes - 1
        guess = step.acceptance.node_tokens[1:]
        self._rates.learn(0, guess, step.acceptance.tokens)
        num_rejected = num_drafted - (len(step.acceptance.path) - 1)
        if num_drafted and num_rejected:
            # The last guess has no row.
            self._cache.keep(self._cache.length - (num_rejected - 1), ())

    def reset(self) -> None:
        self._rates.reset()
        self._backoff.reset()

    def draft_costs(self) -> CostModel:
        return step_costs(self._model)

    def describe(self) -> str:
        parameters = num_weights(self._model.model)
        return f"draft model of {parameters / 1e6:.1f}M parameters, {self._model.dtype}"

    def _run_like(self, target: TargetModel) -> None:
        """Let the draft model's passes run as the target model's: launched one by one, or replayed."""
        if self._runs_like is not type(target):
            model = self._model.model
            self._model = self._models.get(type(target), lambda: target.like(model))
            self._runs_like = type(target)
            self._cache = self._model.new_cache(0)

    def _read(self, token_ids: Sequence[int], cache: TreeCache) -> None:
        """Read a text up to its last token, from where the cache's rows end."""
        for _ in self._model.prefill(token_ids, cache, with_logits=False):
            pass

    def _roomy_cache(self, num_rows: int) -> TreeCache:
        if num_rows > self._cache.capacity:
            larger = self._model.new_cache(num_rows + MORE_ROWS)
            larger.copy_rows(self._cache, self._cache.length)
            self._cache = larger
        return self._cache
