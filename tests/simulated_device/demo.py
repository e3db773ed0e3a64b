"""The demo model, the settings of all methods, and texts decoded with them on any device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.target import TargetModel
from model.budget.measure import NAME as COSTS
from model.engine.drafter import Drafter
from model.engine.loop import decode
from model.methods import METHODS, drafter_class, find_method
from model.methods.rest.datastore import Datastore
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts

DEMO = Path(__file__).resolve().parents[2] / "data/demo"
KINDS = {"eager": TargetModel, "graphed": GraphedTarget}
FIRST_TEXT = "USER: Tell me about the sea and its animals. ASSISTANT:"
TEXT = "USER: Write a list of ten animals and tell me about the sea. ASSISTANT:"
NUM_TOKENS = 12
END = 2


@dataclass(frozen=True)
class Setting:
    """A method with options."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method and its options, as tables name them."""
        return " ".join([self.method, *(f"{key}={self.options[key]}" for key in self.options)])

    def runs_on(self, kind: str) -> bool:
        """Whether a kind of target model shows what the method reads."""
        return self.method != "esp" or kind == "eager"  # graphs read tokens alone

    def drafter(self, target: TargetModel) -> Drafter:
        """Return a fresh drafter for a target model."""
        cls = drafter_class(self.method)
        config = cls.config_class(**_files_of(self.method), **self.options)
        drafter = cls(config, target.vocab_size, target.device)
        drafter.check_target(target)
        return drafter


_FOLDERS: list[TemporaryDirectory[str]] = []
SETTINGS = [
    *(Setting(method) for method in METHODS),
    Setting("recycling", {"tree_version": "auto"}),
    Setting("hybrid", {"budget": "fixed", "num_nodes": 31}),
    Setting("hybrid", {"budget": "fixed", "num_nodes": 63}),
]

# Those whose steps are looked into.
MAIN_SETTINGS = (
    Setting("vanilla"),
    Setting("recycling-averaged"),
    Setting("recycling", {"tree_version": "auto"}),
    Setting("hybrid"),
)


def _files_of(method: str) -> dict[str, Any]:
    """Return the options that name what a method drafts with."""
    cls = drafter_class(method)
    if cls.drafts_with() == "heads":
        trained = DEMO / find_method(method).heads_of
        return {"heads": str(trained if trained.is_dir() else _untrained(method))}
    if cls.drafts_with() == "datastore":
        return {"datastore": str(Path(_datastore().name, "datastore.npy"))}
    if cls.drafts_with() == "draft_model":
        return {"draft_model": str(DEMO / "draft"), "draft_dtype": "float32"}
    return {}


@lru_cache
@torch.inference_mode(mode=False)
def _untrained(method: str) -> str:
    """Return a folder with random heads; it goes with the process."""
    _FOLDERS.append(TemporaryDirectory(prefix=f"{method}-heads-"))
    drafter_class(method).write_untrained_heads(Path(_FOLDERS[-1].name), demo_model().config)
    return _FOLDERS[-1].name


@lru_cache
@torch.inference_mode(mode=False)
def _datastore() -> TemporaryDirectory[str]:
    """Return a folder with a datastore, of what the model answers to the first text; it goes with the process."""
    folder = TemporaryDirectory(prefix="datastore-")
    ids = torch.tensor([prompt_of(FIRST_TEXT)])
    answer = demo_model().generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)
    Datastore.build(answer.tolist()).save(Path(folder.name, "datastore.npy"))
    return folder


def prompt_of(text: str) -> list[int]:
    """Return the token ids of a text."""
    ids: list[int] = _tokenizer()(text).input_ids
    return ids


@lru_cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@lru_cache
@torch.inference_mode(mode=False)
def demo_model() -> PreTrainedModel:
    """Return the demo model on the CPU."""
    return AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()


@torch.inference_mode(mode=False)
def demo_target(kind: str, device: str) -> TargetModel:
    """Return the demo model as a target of a kind; on every device it computes as transformers does."""
    model = copy.deepcopy(demo_model()).to(device)
    target = KINDS[kind](model, use_kernels=False)
    target.measured[COSTS] = GivenCosts(*NEARLY_FLAT)
    return target


class Decoded(NamedTuple):
    """A text: its tokens, and how many each step emitted."""

    tokens: list[int]
    accept_lengths: list[int]


class Costs:
    """The most that a step costs.

    Attributes:
        launches: of kernels; a graph is one.
        kernels: those within graphs, too.
        waits: by kind and place.
    """

    def __init__(self) -> None:
        self.launches = self.kernels = 0
        self.waits: Counter[str] = Counter()

    def add(self, accounts: Accounts) -> None:
        """Add a step."""
        self.launches = max(self.launches, accounts.num_launches)
        self.kernels = max(self.kernels, accounts.num_kernels)
        self.waits |= Counter({" at ".join(key): count for key, count in accounts.waits.items()})


class Run(NamedTuple):
    """Two texts decoded one after the other, and what steps of the second cost, but for its first."""

    texts: list[Decoded]
    costs: Costs


def run(target: TargetModel, setting: Setting, accounts: Accounts) -> Run:
    """Decode two texts; the drafter learns from both."""
    drafter, costs = setting.drafter(target), Costs()
    first = text_of(target, drafter, FIRST_TEXT, accounts, Costs())
    length = len(prompt_of(TEXT)) + NUM_TOKENS
    if isinstance(target, GraphedTarget):  # so that no step of the second text is captured
        drafter.prepare(target, length)
    return Run([first, text_of(target, drafter, TEXT, accounts, costs)], costs)


def text_of(
    target: TargetModel, drafter: Drafter, text: str, accounts: Accounts, costs: Costs
) -> Decoded:
    """Decode a text; add what its steps cost, but for the first, which reads the prompt, too."""
    steps: list[list[int]] = []
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "eos_ids": {END}}
    for step in decode(target, drafter, prompt_of(text), **options):
        if steps:
            costs.add(accounts)
        accounts.clear()
        steps.append(step.tokens)
    return Decoded([token for tokens in steps for token in tokens], [*map(len, steps)])
