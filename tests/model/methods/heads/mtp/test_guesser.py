"""MTP layers of a model's own checkpoint: loaded and read as by transformers, and the text stays the model's.

Run: pytest tests/model/methods/heads/mtp/test_guesser.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from model.backends.target import TargetModel
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.methods.heads.mtp import guesser
from model.methods.heads.mtp.guesser import DEPTH, WIDTH, MtpGuesser, MtpText, check_mtp
from model.methods.hybrid.drafter import HybridConfig, HybridDrafter
from tests.model.decoded import known, random_ids, referee, target_of
from tests.model.families.families_with_trees import LATENT, MIXED_LAYERS, MOE, ROUTED
from tests.model.families.family import VOCAB, WEIGHT_STD, Family

try:
    MtpModel, MtpCache = guesser._mtp_classes()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

CPU = torch.device("cpu")
WINDOW = 8  # of attention, in the MTP layer too
MELLUM = Family(
    "Mellum",
    "MellumConfig",
    MOE | {"sliding_window": WINDOW, "layer_types": MIXED_LAYERS, "num_mtp_layers": 1},
)
DEEPSEEK = Family(
    "DeepSeek-V3",
    "DeepseekV3Config",
    LATENT | ROUTED | {"num_mtp_layers": 3},
    without=("head_dim",),
)
MIMO_V2 = Family(
    "MiMo-V2-Flash",
    "MiMoV2FlashConfig",
    ROUTED
    | {"layer_types": MIXED_LAYERS * 2, "num_hidden_layers": 4, "sliding_window": WINDOW}
    | {"head_dim": 12, "v_head_dim": 6, "num_key_value_heads": 1},
)
# Names of a Mellum checkpoint for what transformers calls otherwise.
PUBLISHED = {
    "layers.0.eh_proj": "mtp.fc",
    "layers.0.enorm": "mtp.pre_fc_norm_embedding",
    "layers.0.hnorm": "mtp.pre_fc_norm_hidden",
    "layers.0.post_norm": "mtp.norm",
}
PROMPT = random_ids(3, 20)


def random_mtp(model: Any, num_layers: int) -> Any:
    """Return random MTP layers for a model."""
    mtp = MtpModel(model, num_layers).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, WEIGHT_STD)
    return mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose checkpoint ships an MTP layer under its published names."""
    return shipped(tmp_path_factory.mktemp("mellum"), MELLUM)


def shipped(folder: Path, family: Family) -> Path:
    """Write a model of a family with an MTP layer."""
    model = family.build()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in random_mtp(guesser._counted(model), 1).state_dict().items():
        if name.startswith("layers."):
            stem, _, part = name.rpartition(".")
            published = PUBLISHED.get(stem, f"mtp.{stem}").replace(".mtp_block", "")
            tensors[f"{published}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return TargetModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@torch.inference_mode()
def final_states(target: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Return the final hidden states [T, D] of a plain pass of transformers."""
    found = target.model(torch.tensor([text]), output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[-1][0]
    return states


def with_mtp(target: TargetModel, **options: Any) -> HybridDrafter:
    config = HybridConfig(**{"budget": "fixed", "head": "mtp", "num_nodes": 7} | options)
    drafter = HybridDrafter(config, target.vocab_size, CPU)
    drafter.check_target(target)
    return drafter


def test_the_text_is_that_of_generate(target: TargetModel) -> None:
    wanted, first, drafter = referee(target, PROMPT, 40), None, with_mtp(target)
    with_their_loop = target.model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, use_mtp=True
    )
    assert with_their_loop[0, len(PROMPT) :].tolist() == wanted, "the checkpoint is one of theirs"
    for _ in range(2):
        drafter.reset()
        found = generate(target, drafter, PROMPT, max_new_tokens=40)
        assert found.token_ids == wanted
        assert first is None or found.accept_lengths == first.accept_lengths
        first = found
    assert first is not None
    assert "guide" in {name for step in first.steps for name in (step.tree.sources or ())}


@torch.inference_mode()
def test_siblings_have_rows_of_their_own_text(target: TargetModel) -> None:
    first = with_mtp(target)
    second = first.sibling()
    texts = [(first, PROMPT), (second, random_ids(12, 2))]
    for drafter, prompt in texts:
        assert generate(target, drafter, prompt, max_new_tokens=5).token_ids == referee(
            target, prompt, 5
        )
    found = [drafter._head.guesses([0], DraftBudget(9)) for drafter, _ in texts]  # type: ignore[union-attr]
    assert found[0] != found[1]


def reference(mtp: Any, text: Sequence[int], hidden: torch.Tensor, depth: int) -> Any:
    """Return tokens and logits [depth, V] of transformers' own chain of guesses, without any kept row."""
    _, logits, _ = mtp(
        input_ids=torch.tensor([text[1:]]),
        last_hidden_states=hidden[None, : len(text) - 1],
        attention_mask=None,
        position_ids=torch.arange(1, len(text))[None],
        mtp_cache=MtpCache(config=mtp.config),
    )
    return logits[0, :depth]


def check_guesses(found: Any, logits: torch.Tensor) -> None:
    wanted = logits.log_softmax(-1).topk(WIDTH)
    assert torch.equal(found[0][: len(logits)], wanted.indices)
    assert torch.allclose(found[1][: len(logits)], wanted.values, atol=1e-5)


@torch.inference_mode()
def test_the_first_guess_is_that_of_transformers_however_the_text_is_read(
    target: TargetModel,
) -> None:
    text, own = MtpText(target), MtpModel.from_pretrained(target.model).eval()
    assert text._model.rotary_emb is not target.model.get_decoder().rotary_emb, (
        "some change with the longest text"
    )
    tokens = random_ids(5 * WINDOW, 4)
    hidden = final_states(target, tokens)
    assert text.guesses(3, WIDTH) is None, "nothing is read yet"
    for begin, end in ((0, 13), (13, 14), (14, 30), (30, 39)):
        text.read(tokens[begin + 1 : end + 1], hidden[begin:end])
        for depth in (1, DEPTH):  # a draft leaves no row
            found = text.guesses(depth, WIDTH)
            check_guesses(found, reference(own, tokens[: end + 1], hidden, 1))


@torch.inference_mode()
def test_one_layer_goes_on_with_its_own_state(target: TargetModel) -> None:
    text, own = MtpText(target), MtpModel.from_pretrained(target.model).eval()
    tokens, hidden = list(PROMPT), final_states(target, PROMPT)[:-1]
    text.read(tokens[1:], hidden)
    found = text.guesses(3, WIDTH)
    assert found is not None
    for level in range(3):
        read = own.forward_layer(
            *(0, hidden[None], torch.arange(1, len(tokens))[None], MtpCache(config=own.config)),
            input_ids=torch.tensor([tokens[1:]]),
        )[0]
        check_guesses([part[level:] for part in found], own._project_to_logits(read[-1:]))
        hidden = torch.cat((hidden, read[-1:]))
        tokens.append(int(found[0][level, 0]))


@torch.inference_mode()
@pytest.mark.parametrize("length", [2, 3, 4, 20])
def test_several_layers_join_tokens_further_on(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(DEEPSEEK.build())
    own = random_mtp(target.model, 3)
    monkeypatch.setattr(guesser, "_load", lambda target: own)
    text, tokens = MtpText(target), random_ids(length + 9, 6)
    hidden = final_states(target, tokens)
    for end in (length - 1, length + 1, length + 8):
        begin = 0 if end < length else (length - 1 if end == length + 1 else length + 1)
        text.read(tokens[begin + 1 : end + 1], hidden[begin:end])
        for depth in (3, 5):
            found = text.guesses(depth, WIDTH)
            check_guesses(found, reference(own, tokens[: end + 1], hidden, 3))


def test_what_ships_no_layers_is_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head mtp: model type llama has no MTP layers"):
        check_mtp(target_of("Llama, grouped heads").config)
    with pytest.raises(
        ValueError, match=r"gemma4_text has no .* \(Gemma 4's assistant, .* not read\)"
    ):
        check_mtp(known("Gemma 4 text").build().config)
    MELLUM.build().save_pretrained(tmp_path)
    bare = TargetModel(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    with pytest.raises(ValueError, match=r"head mtp: the layers of .* cannot be loaded: .*missing"):
        MtpGuesser(VOCAB, CPU).for_target(bare)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"])
def test_layers_that_transformers_leaves_out_are_read(name: str, tmp_path: Path) -> None:
    family = known(name)
    config = getattr(transformers, family.config)
    options = {**family.options, guesser.COUNTS[config.model_type]: 1}
    folder = shipped(tmp_path, replace(family, options=options))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = TargetModel(model)
    drafter = with_mtp(target)
    found = generate(target, drafter, PROMPT, max_new_tokens=24)
    assert found.token_ids == referee(target, PROMPT, 24)
    assert "guide" in {one for step in found.steps for one in (step.tree.sources or ())}
    own = load_file(folder / "model.safetensors")
    layer = drafter._head._text._model.layers[0]  # type: ignore[attr-defined]
    assert torch.equal(layer.eh_proj.weight, own["mtp.fc.weight"])
    assert not hasattr(model.config, "num_mtp_layers"), "the model's own config stays as it is"


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """As the published code of MiMo-7B, whose layers transformers does not know."""

    config_class = MiMoConfig


def with_layers_of_mimo(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """Write MTP layers into the checkpoint of a MiMo under their published names; return the tensors by name."""
    is_v2 = config.model_type == guesser.MIMO_V2
    size, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    groups = config.num_key_value_heads * (2 if is_v2 else 1)
    keys = config.head_dim if is_v2 else size // heads
    values = config.v_head_dim if is_v2 else keys
    attention = {"q": heads * keys, "k": groups * keys, "v": groups * values}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": (rows, size) for name, rows in attention.items()},
        "self_attn.o_proj.weight": (size, heads * values),
        **{f"mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")},
        "mlp.down_proj.weight": (size, inner),
        **{f"{name}_layernorm.weight": (size,) for name in ("input", "final")},
    }
    if is_v2:
        shapes["self_attn.attention_sink_bias"] = (heads,)
        names, stem, count = ("enorm", "hnorm", "pre_mlp_layernorm", "eh_proj"), "mtp.layers", 3
    else:
        shapes |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in attention.items()}
        first = ("token_layernorm", "hidden_layernorm", "post_attention_layernorm", "input_proj")
        names, stem, count = first, "mtp_layers", 1
    shapes |= {f"{name}.weight": (size,) for name in names[:3]}
    shapes[f"{names[3]}.weight"] = (size, 2 * size)
    torch.manual_seed(2)
    layers = {
        f"model.{stem}.{layer}.{name}": torch.randn(shape) * WEIGHT_STD + (len(shape) == 1)
        for layer in range(count)
        for name, shape in shapes.items()
    }
    tensors = load_file(folder / "model.safetensors") | layers
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def layer_of_mimo(
    tensors: dict[str, torch.Tensor],
    place: str,
    config: Any,
    embedded: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Return what the layer at a place makes of tokens and states [n, D]: the makers' formulas, without a cache."""

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = tensors.get(f"{place}.{name}.bias")
        return functional.linear(rows, tensors[f"{place}.{name}.weight"], bias)

    def norm(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = tensors[f"{place}.{name}.weight"]
        return functional.rms_norm(rows, weight.shape, weight, config.rms_norm_eps)

    is_v2, heads, n = config.model_type == guesser.MIMO_V2, config.num_attention_heads, len(states)
    if is_v2:
        rope = config.rope_parameters["sliding_attention"]
        rows = linear("eh_proj", torch.cat((norm("enorm", embedded), norm("hnorm", states)), -1))
        scale, window, share = config.attention_value_scale, WINDOW, rope["partial_rotary_factor"]
    else:
        rope, scale, window, share = config.rope_parameters, 1.0, n, 1.0
        first, second = norm("hidden_layernorm", states), norm("token_layernorm", embedded)
        rows = linear("input_proj", torch.cat((first, second), -1))
    normed = norm("input_layernorm", rows)
    query, key, value = (
        linear(f"self_attn.{name}_proj", normed).view(n, -1, size).transpose(0, 1)
        for name, size in sizes(config)
    )
    half = int(query.shape[-1] * share) // 2
    angles = torch.arange(n)[:, None] / rope["rope_theta"] ** (torch.arange(half) / half)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        left, right, rest = part.split([half, half, part.shape[-1] - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)

    query, key = rotated(query), rotated(key)
    key, value = (part.repeat_interleave(heads // len(part), 0) for part in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    distance = torch.arange(n)[:, None] - torch.arange(n)
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if is_v2:
        sinks = tensors[f"{place}.self_attn.attention_sink_bias"][:, None, None].expand(-1, n, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    read = (weights @ (value * scale)).transpose(0, 1).reshape(n, -1)
    rows = rows + linear("self_attn.o_proj", read)
    normed = norm("pre_mlp_layernorm" if is_v2 else "post_attention_layernorm", rows)
    gate, up = (linear(f"mlp.{name}_proj", normed) for name in ("gate", "up"))
    return norm("final_layernorm", rows + linear("mlp.down_proj", functional.silu(gate) * up))


def sizes(config: Any) -> list[tuple[str, int]]:
    """Return the widths of a head of queries, keys and values."""
    if config.model_type == guesser.MIMO_V2:
        return [("q", config.head_dim), ("k", config.head_dim), ("v", config.v_head_dim)]
    return [(name, config.hidden_size // config.num_attention_heads) for name in ("q", "k", "v")]


def mimo(is_v2: bool, folder: Path) -> tuple[TargetModel, dict[str, torch.Tensor]]:
    """Return a tiny random MiMo, loaded from the folder that it was written to, and its checkpoint's tensors."""
    if is_v2 and not MIMO_V2.is_known:
        pytest.skip("not in this version of transformers")
    family = MIMO_V2 if is_v2 else replace(MIMO_V2, config="Qwen2Config", options={})
    built = family.build()
    if not is_v2:
        options = built.config.to_dict() | {"num_nextn_predict_layers": 1}
        built.config = MiMoConfig(**options | {"model_type": "mimo"})
    built.save_pretrained(folder)
    tensors = with_layers_of_mimo(folder, built.config)
    cls = AutoModelForCausalLM if is_v2 else MiMoForCausalLM
    return TargetModel(cls.from_pretrained(folder, dtype=torch.float32).eval()), tensors


@torch.inference_mode()
@pytest.mark.parametrize("is_v2", [False, True])
def test_layers_of_mimo_are_computed_as_by_its_makers(is_v2: bool, tmp_path: Path) -> None:
    target, tensors = mimo(is_v2, tmp_path)
    text, tokens = MtpText(target), random_ids(4 * WINDOW, 8)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    hidden = final_states(target, tokens)
    for begin, end in ((0, 1), (1, 2), (2, 13), (13, 31)):
        text.read(tokens[begin + 1 : end + 1], hidden[begin:end])
        found = text.guesses(DEPTH, WIDTH)
        assert found is not None
        assert len(found[0]) == (3 if is_v2 else DEPTH), (
            "each layer guesses once, or the only one goes on"
        )
        known, states = tokens[: end + 1], hidden[:end]
        for level in range(len(found[0])):
            place = f"model.mtp.layers.{level}" if is_v2 else "model.mtp_layers.0"
            joined = embeddings[known[1 + level :] if is_v2 else known[1:]]
            rows = len(joined)
            made = layer_of_mimo(tensors, place, target.config, joined, states[-rows:][:rows])
            check_guesses([part[level:] for part in found], functional.linear(made[-1:], head))
            known = [*known, int(found[0][level, 0])]
            if not is_v2:
                states = torch.cat((states, made[-1:]))


@pytest.mark.parametrize("is_v2", [False, True])
def test_the_text_with_layers_of_mimo_is_that_of_plain_decoding(
    is_v2: bool, tmp_path: Path
) -> None:
    target, _ = mimo(is_v2, tmp_path)
    found = generate(target, with_mtp(target), PROMPT, max_new_tokens=40)
    assert found.token_ids == referee(target, PROMPT, 40)
    assert "guide" in {one for step in found.steps for one in (step.tree.sources or ())}
