"""Adapters of peft, of every kind: added, switched, scaled, disabled, merged, unmerged, deleted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from tests.fuzz.changes.kind import change
from tests.fuzz.scene import Inapplicable, Scene

# Options of each kind of adapter, beside the names of the layers.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, "init_lora_weights": False}),
    "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True, "init_lora_weights": False}),
    "LoRA with biases": ("LoraConfig", {"r": 2, "lora_bias": True, "init_lora_weights": False}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "LoHa": ("LoHaConfig", {"r": 4, "init_weights": False}),
    "LoKr": ("LoKrConfig", {"r": 4, "init_weights": False}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 100}),
    "VeRA": ("VeraConfig", {"r": 8}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 40}),
    "HRA": ("HRAConfig", {"r": 4}),
    "MiSS": ("MissConfig", {"r": 4}),
    "C3A": ("C3AConfig", {"block_size": 8}),
    "DeLoRA": ("DeloraConfig", {"r": 4}),
    "SHiRA": ("ShiraConfig", {"r": 2}),
    "RandLoRA": ("RandLoraConfig", {"r": 4}),
    "RoAd": ("RoadConfig", {"variant": "road_2", "group_size": 8}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 40}),
    "VBLoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 16, "vector_length": 8, "topk": 2}),
    "LN tuning": ("LNTuningConfig", {}),
    "BONE": ("BoneConfig", {"r": 4}),
}
PARTS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("dense", "fc1", "fc2", "query_key_value", "gate_up_proj", "qkv_proj"),
)
LEARNED_PROMPTS = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")


def peft() -> Any:
    """Return the package."""
    try:
        import peft as package
    except ImportError:
        raise Inapplicable from None
    return package


def config_of(scene: Scene, random: Random, kind: str) -> Any:
    """Return the config of an adapter on some of the model's projections."""
    name, options = KINDS[kind]
    make = getattr(peft(), name, None)
    if make is None:
        raise Inapplicable
    names = {one.rpartition(".")[2] for one, _ in scene.model.named_modules()}
    present = [part for part in PARTS if part in names]
    if kind == "LN tuning":
        wanted = sorted(one for one in names if one.endswith("norm"))
    else:
        wanted = random.sample(present, min(len(present), random.choice([1, 2, 7])))
    if not wanted:
        raise Inapplicable
    return make(target_modules=wanted, task_type="CAUSAL_LM", **options)


def _stir(before: set[int], model: Any) -> None:
    """Give the new adapters numbers that are seen: many begin with nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in before and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.4)


def _added(scene: Scene, random: Random, kind: str) -> Callable[[], None]:
    """Wrap the model; undone by peft's own `unload` where there is one."""
    if scene.wrapper is not None:
        raise Inapplicable
    before = {id(one) for one in scene.model.parameters()}
    try:
        scene.wrapper = peft().get_peft_model(scene.model, config_of(scene, random, kind)).eval()
    except (ValueError, RuntimeError, TypeError, AssertionError) as error:
        raise Inapplicable from error  # such as sizes that do not divide
    _stir(before, scene.model)
    wrapper = scene.wrapper

    def undo() -> None:
        scene.wrapper = None
        wrapper.unload()

    return undo


for kind in KINDS:
    change(f"{kind} added", kind=kind)(_added)


def _wrapper(scene: Scene) -> Any:
    if scene.wrapper is None:
        raise Inapplicable
    return scene.wrapper


def _within(
    scene: Scene,
    random: Random,
    act: Callable[[Any, Random], Callable[[], object] | None],
    kind: str = "LoRA",
) -> Callable[[], None]:
    """Act on an adapter, which is added before if there is none; undo both."""
    outer = _added(scene, random, kind) if scene.wrapper is None else None
    inner = act(_wrapper(scene), random)

    def undo() -> None:
        if inner is not None:
            inner()
        if outer is not None:
            outer()

    return undo


@change("an adapter disabled", is_seen=False)
def disabled(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, _: Random) -> Callable[[], object]:
        scene.check(scene.last[:14], may_refuse=True)
        wrapper.base_model.disable_adapter_layers()
        return wrapper.base_model.enable_adapter_layers  # type: ignore[no-any-return]

    return _within(scene, random, act)


@change("an adapter merged")
def merged(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, _: Random) -> Callable[[], object]:
        scene.check(scene.last[:14], may_refuse=True)
        wrapper.merge_adapter()
        return wrapper.unmerge_adapter  # type: ignore[no-any-return]

    return _within(scene, random, act)


@change("an adapter merged and unmerged")
def unmerged(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, _: Random) -> None:
        wrapper.merge_adapter()
        scene.check(scene.last[:14], may_refuse=True)
        wrapper.unmerge_adapter()

    return _within(scene, random, act)


@change("a second adapter added and switched to")
def switched(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, random: Random) -> Callable[[], object]:
        if "second" in wrapper.peft_config or wrapper.peft_type.value != "LORA":
            raise Inapplicable
        before = {id(one) for one in scene.model.parameters()}
        scene.check(scene.last[:14], may_refuse=True)
        wrapper.add_adapter("second", config_of(scene, random, "LoRA"))
        _stir(before, scene.model)
        scene.check(scene.last[:14], may_refuse=True)
        wrapper.set_adapter("second")
        wrapper.eval()

        def undo() -> None:
            wrapper.set_adapter("default")
            scene.check(scene.last[:14], may_refuse=True)
            wrapper.delete_adapter("second")

        return undo

    return _within(scene, random, act)


@change("an adapter rescaled")
def rescaled(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, _: Random) -> Callable[[], object]:
        scene.check(scene.last[:14], may_refuse=True)
        scaled = [
            module.scaling
            for module in wrapper.modules()
            if isinstance(getattr(module, "scaling", None), dict)
        ]
        if not scaled:
            raise Inapplicable
        own = [dict(one) for one in scaled]
        for one in scaled:
            one.update({name: value * -2 for name, value in one.items()})

        def undo() -> None:
            for one, values in zip(scaled, own, strict=True):
                one.update(values)

        return undo

    return _within(scene, random, act)


@change("an adapter's weights written by .data")
def adapter_written(scene: Scene, random: Random) -> Callable[[], None]:
    def act(wrapper: Any, random: Random) -> Callable[[], object]:
        scene.check(scene.last[:14], may_refuse=True)
        found = [one for name, one in wrapper.named_parameters() if "lora_B" in name]
        if not found:
            raise Inapplicable
        for one in found:
            one.data.mul_(-1)

        def undo() -> None:
            for one in found:
                one.data.mul_(-1)

        return undo

    return _within(scene, random, act)


@change("merged and unloaded for good")
def merged_for_good(scene: Scene, random: Random) -> None:
    if scene.wrapper is not None:
        raise Inapplicable
    _added(scene, random, random.choice(["LoRA", "LoHa", "IA3", "DoRA"]))
    scene.check(scene.last[:14], may_refuse=True)
    wrapper, scene.wrapper = scene.wrapper, None
    wrapper.merge_and_unload()


@change("an adapter of transformers' add_adapter")
def of_transformers(scene: Scene, random: Random) -> Callable[[], None]:
    if scene.wrapper is not None or getattr(scene.model, "_hf_peft_config_loaded", False):
        raise Inapplicable
    before = {id(one) for one in scene.model.parameters()}
    scene.model.add_adapter(config_of(scene, random, "LoRA"), adapter_name="own")
    _stir(before, scene.model)
    scene.model.eval()
    return None  # type: ignore[return-value]


def _learned(scene: Scene, random: Random, kind: str) -> Callable[[], None]:
    """Wrap the model with a learned prompt: the model itself stays as it is, the wrapper is refused."""
    from model import SpeculativeDecoder

    if scene.wrapper is not None:
        raise Inapplicable
    config = getattr(peft(), kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if not hasattr(scene.model.config, "num_attention_heads"):
        raise Inapplicable
    wrapper = peft().get_peft_model(scene.model, config).eval()
    try:
        SpeculativeDecoder(wrapper)
    except ValueError as error:
        assert "learned prompt" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError(f"{kind}: a learned prompt was not refused")
    return None  # type: ignore[return-value]


for kind in LEARNED_PROMPTS:
    change(f"{kind}: refused", is_seen=False, kind=kind)(_learned)
