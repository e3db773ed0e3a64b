"""The MTP layers of a model's own checkpoint, as transformers builds and loads them, on one text.

A plain load of the model leaves them out. Transformers makes them of the model's own decoder layer, and uses them
in `generate(use_mtp=True)`: layer k joins, for every token of the text, the embedding of the token k + 1 places on
with the state that the layer before it left there (layer 0: the model's final hidden state), and the output head
reads a guess of the token after that one off its state.

Rows of the text are read once each, as soon as the tokens that they join are known. Those of a draft join guessed
tokens, and are dropped after it. Where a draft is longer than there are layers, the last layer goes on with its own
state, as inference servers run modules of one layer.

Some layers are left out by transformers even in `generate`: those of Qwen3-Next and Qwen3.5 (names of Mellum's), of
MiMo-7B and of MiMo-V2-Flash. It is told how many there are, what they attend to and how they are named. Every layer
of the last model joins the model's final hidden state, as SGLang serves it, and guesses one token.

Sources: F. Gloeckle et al., arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo-7B's published
`modeling_mimo.py`; of MiMo-V2-Flash, SGLang's `mimo_v2_flash_nextn.py` and `multi_layer_eagle_worker_v2.py`.

Shapes: L layers, T tokens of the text, C of them in a chunk, n rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
import transformers

from ....backends.passes.hidden import FINAL
from ....backends.target import TargetModel
from ....budget.best_first import Guesses
from ....engine.budget import DraftBudget
from ....engine.drafter import Needs
from ....machine.hardware import uploaded
from ..drafter import StateReader
from ..head_files import called

FIRST_VERSION = "5.23"  # of transformers, whose layers these are
# Guesses in a row, and likely tokens after each.
DEPTH, WIDTH = 6, 10


# What configs call the number of layers, by model type.
COUNTS = dict.fromkeys(("qwen3_next", "mimo"), "num_nextn_predict_layers") | dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers"
)
# MiMo-V2-Flash's config does not say how many its checkpoint ships.
MIMO_V2, NUM_OF_MIMO_V2 = "mimo_v2_flash", 3
# Names of MiMo's, and what transformers calls them: patterns, applied in turn after its own.
RENAMED = {
    r"^mtp_layers\.(\d+)\.": r"layers.\1.mtp_block.",
    r"\.mtp_block\.token_layernorm\.": ".enorm.",
    r"\.mtp_block\.hidden_layernorm\.": ".hnorm.",
    r"\.mtp_block\.eh_proj\.": ".eh_proj.",
    r"\.mtp_block\.final_layernorm\.": ".post_norm.",
    r"\.pre_mlp_layernorm\.": ".post_attention_layernorm.",
}


def check_mtp(config: Any) -> None:
    """Raise ValueError if a model with this text config ships no MTP layers, or transformers runs none."""
    if not getattr(config, "num_mtp_layers", None) and not _more_layers(config):
        is_gemma = config.model_type.startswith("gemma4")
        assistant = " (Gemma 4's assistant, a model of its own, is not read)" if is_gemma else ""
        raise ValueError(
            f"head mtp: model type {config.model_type} has no MTP layers that are read{assistant}; allowed: with "
            f"num_mtp_layers, or model types {', '.join((*COUNTS, MIMO_V2))}; give such a model, or trained heads"
        )
    _mtp_classes()


class MtpText:
    """The rows of one text in all layers, and guesses after it; raises ValueError if layers cannot be loaded."""

    def __init__(self, target: TargetModel) -> None:
        self._model = _load(target)
        self.num_layers: int = self._model.num_mtp_layers
        # Whether a layer joins the states of the layer before it, or the model's.
        self._is_chain = self._model.config.model_type != MIMO_V2
        self.num_parameters = sum(each.numel() for each in self._model.layers.parameters())
        self._device, self._dtype = target.device, target.dtype
        self.clear()

    def clear(self) -> None:
        _, cache_class = _mtp_classes()
        self._cache = cache_class(config=self._model.config)
        self._cache.activate_past_recording()
        self._tokens: list[int] = []
        # Of each layer: the rows read, and states that wait for the token to join with.
        self._num_read = [0] * self.num_layers
        nothing = torch.empty(
            0, self._model.config.hidden_size, dtype=self._dtype, device=self._device
        )
        self._waiting = [nothing] * self.num_layers
        # The first layer's last state [1, D], off which the first guess is read.
        self._last: torch.Tensor | None = None

    def sibling(self) -> MtpText:
        """Return another text, with no row yet, for the same layers."""
        sibling = copy(self)
        sibling.clear()
        return sibling

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read a chunk: the model's final states [C, D], and the token after each of them."""
        if not self._tokens:
            self._tokens = [-1]  # nobody joins the text's first token
        self._tokens += token_ids
        states = hidden.to(self._device)
        for layer in range(self.num_layers):
            self._waiting[layer] = torch.cat((self._waiting[layer], states))
            found = self._read_layer(layer)
            if layer == 0:
                self._last = found[-1:]
            if self._is_chain:
                states = found

    def guesses(self, depth: int, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the likeliest tokens after the text and after each of its likeliest next ones in turn, with the
        logarithms of their probabilities, both [depth, width], or fewer rows; None if nothing was read.
        """
        if self._last is None:
            return None
        found, rows = [self._top(self._last, width)], [0] * self.num_layers
        states = self._last[:0]  # of the rows that the draft adds to the layer before
        for level in range(1, depth if self._is_chain else min(depth, self.num_layers)):
            layer = min(level, self.num_layers - 1)
            begin = self._num_read[layer] + rows[layer]
            if not self._is_chain:
                states = self._waiting[layer]
            elif level < self.num_layers:
                states = torch.cat((self._waiting[layer], states))
            else:
                states = states[-1:] if len(states) else self._last
            joined = torch.cat([top.indices[0, :1] for top in found[-len(states) :]])
            states = self._run(layer, joined, states, begin)
            rows[layer] += len(states)
            found.append(self._top(states[-1:], width))
        for layer, count in enumerate(rows):
            if count:
                self._cache.layers[layer].crop(-count)
        return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])

    def _read_layer(self, layer: int) -> torch.Tensor:
        """Read the rows whose tokens are known; return their states [n, D]."""
        begin, end = self._num_read[layer], max(0, len(self._tokens) - 1 - layer)
        waiting, count = self._waiting[layer], end - begin
        if count == 0:
            return waiting[:0]
        tokens = uploaded(self._tokens[begin + 1 + layer :], self._device)
        states = self._run(layer, tokens, waiting[:count], begin)
        self._cache.layers[layer].crop(0)  # a window of attention forgets what it has passed
        self._num_read[layer], self._waiting[layer] = end, waiting[count:]
        return states

    def _run(
        self, layer: int, token_ids: torch.Tensor, states: torch.Tensor, begin: int
    ) -> torch.Tensor:
        """Run a layer on n rows from `begin` on, [n, D]: their tokens [n] and states."""
        embeddings = called(self._model.embed_tokens, token_ids)
        first = begin + 1 + layer
        positions = torch.arange(first, first + len(states), device=self._device)
        found: torch.Tensor = self._model.forward_layer(
            layer, states[None], positions[None], self._cache, inputs_embeds=embeddings[None]
        )
        return found[0]

    def _top(self, states: torch.Tensor, width: int) -> torch.return_types.topk:
        logits = self._model._project_to_logits(states).to(self._device)
        probabilities: torch.Tensor = logits.float().log_softmax(dim=-1)
        return probabilities.topk(min(width, logits.shape[-1]), dim=-1)


def _mtp_classes() -> tuple[Any, Any]:
    """Return transformers' classes of MTP layers and of their cache, or raise ValueError if it cannot run them."""
    try:
        from transformers.cache_utils import MtpCache
        from transformers.modeling_layers import MtpModel
    except ImportError:
        MtpModel = MtpCache = None
    if not hasattr(MtpModel, "forward_layer"):
        raise ValueError(
            f"head mtp: transformers {transformers.__version__} cannot run MTP layers one by one; allowed: "
            f"{FIRST_VERSION} or newer"
        )
    return MtpModel, MtpCache


def _load(target: TargetModel) -> Any:
    mtp_class, _ = _mtp_classes()
    place = target.model.config.name_or_path
    try:
        with torch.inference_mode(mode=False):
            main = _counted(target.model)
            model = mtp_class.from_pretrained(main, device_map={"": target.device})
    # transformers raises many types of errors for layers that are missing or unknown.
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"head mtp: the layers of {place} cannot be loaded: {cause}") from error
    # The model's own frequencies may follow the longest text that they have seen.
    model.rotary_emb = deepcopy(model.rotary_emb)
    return model.eval().requires_grad_(False)


def _more_layers(config: Any) -> int:
    """Return how many layers a checkpoint ships that transformers knows nothing of."""
    if config.model_type == MIMO_V2:
        return NUM_OF_MIMO_V2
    found = getattr(config, COUNTS.get(config.model_type, ""), None)
    return found if type(found) is int else 0


def _counted(model: Any) -> Any:
    """Return the model, or one with its modules that says how many layers it ships, of what kind and names."""
    count = _more_layers(model.config.get_text_config(decoder=True))
    if not count:
        return model
    # Transformers 4 has none.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    model = copy(model)
    model.config = deepcopy(model.config)
    config = model.config.get_text_config(decoder=True)
    is_mimo_v2 = config.model_type == MIMO_V2
    config.num_mtp_layers = count
    config.mtp_layer_types = ["sliding_attention" if is_mimo_v2 else "full_attention"] * count
    config.mtp_mlp_layer_types = ["dense"] * count
    config.mtp_hidden_states_first = config.model_type == "mimo"
    # Which weights are the layers', and how they are named.
    ours = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = [*ours, r"^model\.mtp_layers\."]
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        known = get_model_conversion_mapping(model)
    model._weight_conversions = [*known, *(WeightRenaming(*pair) for pair in RENAMED.items())]
    return model


class MtpGuesser(StateReader[MtpText]):
    needs = Needs(hidden_layers=(FINAL,))

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(None, vocab_size, device)

    def check_config(self, config: Any) -> None:
        super().check_config(config)
        check_mtp(config)

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        text = self.read_text()
        if text is None or not budget.max_depth:
            return None
        found = text.guesses(min(DEPTH, budget.max_depth), WIDTH)
        if found is None:  # such as after a prompt of one token: no hidden states come before it
            return None
        # One copy to the host.
        numbers, values = torch.stack([part.double() for part in found]).tolist()
        rows = [[int(token) for token in row] for row in numbers]
        chain = [context[-1], *(row[0] for row in rows[:-1])]
        return Guesses(chain, range(-1, len(chain) - 1), rows, values)

    def _text_of(self, target: TargetModel) -> MtpText:
        return MtpText(target)

    def describe(self) -> str:
        if self._text is None:
            return "the model's MTP layers"
        return f"{self._text.num_layers} MTP layers of {self._text.num_parameters / 1e6:.1f}M parameters"
