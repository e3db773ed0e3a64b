"""Numbers that are written: whole weights, rows, single numbers; by torch's many ways to write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters

from tests.fuzz.changes.kind import change
from tests.fuzz.scene import Inapplicable, Scene


def linear_of(scene: Scene, random: Random) -> nn.Linear:
    """Return a linear layer with plain weights."""
    found: nn.Linear = scene.pick(
        random,
        lambda _, one: (
            isinstance(one, nn.Linear) and type(getattr(one, "weight", None)) is nn.Parameter
        ),
    )[2]
    return found


def parameter_of(scene: Scene, random: Random) -> nn.Parameter:
    """Return one of the model's matrices."""
    found = [one for one in scene.model.parameters() if one.ndim == 2 and one.is_floating_point()]
    if not found:
        raise Inapplicable
    return random.choice(found)


def noise_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers as large as the tensor's."""
    return torch.randn_like(tensor, dtype=torch.float32).to(tensor.dtype) * tensor.detach().std()


@change("a weight written whole, without gradients")
@torch.no_grad()
def whole(scene: Scene, random: Random) -> None:
    weight = parameter_of(scene, random)
    weight.copy_(noise_like(weight))


@change("a weight written whole by .data")
def whole_by_data(scene: Scene, random: Random) -> None:
    weight = parameter_of(scene, random)
    weight.data.copy_(noise_like(weight))


@change("a weight's .data is another tensor")
def other_data(scene: Scene, random: Random) -> None:
    weight = linear_of(scene, random).weight
    weight.data = noise_like(weight)


@change("a weight is another parameter")
def other_parameter(scene: Scene, random: Random) -> None:
    layer = linear_of(scene, random)
    layer.weight = nn.Parameter(noise_like(layer.weight))


@change("a weight is swapped with torch.utils.swap_tensors")
def swapped_tensor(scene: Scene, random: Random) -> Callable[[], None]:
    layer = linear_of(scene, random)
    other = nn.Parameter(noise_like(layer.weight))
    weight = layer.weight
    try:
        torch.utils.swap_tensors(weight, other)
    except RuntimeError as error:  # torch refuses tensors that others refer to weakly
        raise Inapplicable from error
    return lambda: torch.utils.swap_tensors(weight, other)


@change("a row of an inner weight", is_seen=True)
@torch.no_grad()
def row(scene: Scene, random: Random) -> None:
    weight = linear_of(scene, random).weight
    weight[random.randrange(len(weight))] += 4


@change("a row of an inner weight by .data")
def row_by_data(scene: Scene, random: Random) -> None:
    weight = linear_of(scene, random).weight
    weight.data[random.randrange(len(weight))] += 4


def _embedding_row(scene: Scene, random: Random) -> tuple[torch.Tensor, int]:
    weight = scene.model.get_input_embeddings().weight
    tokens = [token for token in scene.last if token < len(weight)]
    return weight, random.choice(tokens)


@change("the embedding row of a prompt's token")
@torch.no_grad()
def embedding_row(scene: Scene, random: Random) -> None:
    weight, token = _embedding_row(scene, random)
    weight[token] = weight[token].flip(-1) * 2


@change("the embedding row of a prompt's token by .data")
def embedding_row_by_data(scene: Scene, random: Random) -> None:
    weight, token = _embedding_row(scene, random)
    weight.data[token] = weight.data[token].flip(-1) * 2


@change("one number of an embedding row by .data")
def embedding_number_by_data(scene: Scene, random: Random) -> None:
    weight, token = _embedding_row(scene, random)
    weight.data[token, random.randrange(weight.shape[1])] += 30


@change("the embedding row of another token", is_seen=False)
def unused_embedding_row(scene: Scene, random: Random) -> None:
    weight = scene.model.get_input_embeddings().weight
    unused = sorted({*range(len(weight))} - {*scene.last})
    weight.data[random.choice(unused)] *= -1


@change("the head's row by .data", is_seen=False)
def head_row(scene: Scene, random: Random) -> None:
    weight = scene.model.get_output_embeddings().weight
    weight.data[random.choice(scene.last)] *= 3


@change("one number without gradients", is_seen=False)
@torch.no_grad()
def number(scene: Scene, random: Random) -> None:
    weight = parameter_of(scene, random)
    weight[random.randrange(weight.shape[0]), random.randrange(weight.shape[1])] += 6


@change("one number by .data", is_seen=False)
def number_by_data(scene: Scene, random: Random) -> None:
    weight = parameter_of(scene, random)
    weight.data[random.randrange(weight.shape[0]), random.randrange(weight.shape[1])] += 6


@change("one number of numpy's view", is_seen=False)
def number_by_numpy(scene: Scene, random: Random) -> None:
    weight = parameter_of(scene, random)
    if weight.dtype == torch.bfloat16:
        raise Inapplicable
    array = weight.detach().numpy()
    array[random.randrange(weight.shape[0]), random.randrange(weight.shape[1])] += 6


@change("a write in inference mode", is_seen=True)
def in_inference_mode(scene: Scene, random: Random) -> None:
    weight = linear_of(scene, random).weight
    with torch.inference_mode():
        weight.copy_(noise_like(weight))


@change("two numbers exchanged by .data", is_seen=False)
def exchanged(scene: Scene, random: Random) -> None:
    """The sum of all numbers stays."""
    data = parameter_of(scene, random).data
    one, other = random.randrange(data.shape[0]), random.randrange(data.shape[0])
    column = random.randrange(data.shape[1])
    data[one, column], data[other, column] = data[other, column].item(), data[one, column].item()


@change("two rows exchanged by .data")
def exchanged_rows(scene: Scene, random: Random) -> None:
    data = linear_of(scene, random).weight.data
    half = len(data) // 2
    data[: 2 * half] = data[: 2 * half].roll(half, 0)


@change("an optimiser's step")
def optimiser_step(scene: Scene, random: Random) -> None:
    model = scene.model
    chosen = [linear_of(scene, random).weight for _ in range(3)]
    with torch.inference_mode(False), torch.enable_grad():
        for weight in chosen:
            weight.requires_grad_()
        ids = torch.tensor([scene.last[:8]])
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    torch.optim.Adam(chosen, lr=0.4).step()
    model.zero_grad(set_to_none=True)


@change("load_state_dict")
def loaded(scene: Scene, random: Random, assign: bool = False) -> None:
    layer = linear_of(scene, random)
    state = {name: noise_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


@change("load_state_dict(assign=True)")
def assigned(scene: Scene, random: Random) -> None:
    loaded(scene, random, assign=True)


@change("the whole model's load_state_dict(assign=True)")
def assigned_whole(scene: Scene, random: Random) -> None:
    model = scene.model
    state = model.state_dict()
    matrices = [name for name, value in state.items() if value.ndim == 2 and "lora" not in name]
    for name in random.sample(matrices, 2):
        state[name] = noise_like(state[name])
    model.load_state_dict(state, assign=True)


@change("vector_to_parameters")
def by_vector(scene: Scene, random: Random) -> None:
    layer = linear_of(scene, random)
    vector = torch.cat([noise_like(one).reshape(-1) for one in layer.parameters()])
    vector_to_parameters(vector, layer.parameters())


@change("another memory layout of a weight", is_seen=False)
def transposed_layout(scene: Scene, random: Random) -> None:
    weight = linear_of(scene, random).weight
    weight.data = weight.data.t().contiguous().t()


@change("the rotary frequencies written")
def frequencies(scene: Scene, random: Random) -> None:
    scene.pick(random, lambda name, _: name.endswith("rotary_emb"))[2].inv_freq.mul_(0.3)


@change("the rotary frequencies written by .data", is_seen=True)
def frequencies_by_data(scene: Scene, random: Random) -> None:
    scene.pick(random, lambda name, _: name.endswith("rotary_emb"))[2].inv_freq.data.mul_(0.3)


@change("a norm's weight written by .data")
def norm_weight(scene: Scene, random: Random) -> None:
    norm = scene.pick(
        random, lambda _, one: "Norm" in type(one).__name__ and hasattr(one, "weight")
    )[2]
    norm.weight.data *= torch.linspace(-2, 2, len(norm.weight))


@change("half precision", may_refuse=True, is_seen=False)
def halved(scene: Scene, random: Random) -> Callable[[], None]:
    """What is rounded is put back from a snapshot of each tensor."""
    model = scene.model
    numbers = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    model.to(random.choice([torch.float16, torch.bfloat16]))

    def undo() -> None:
        model.float()
        for tensor, data in numbers:
            tensor.data = data

    return undo


@change("half precision and back")
def rounded(scene: Scene, random: Random) -> None:
    with torch.no_grad():
        for weight in scene.model.parameters():
            weight.mul_(1 + 0.1 * torch.randn(()).item())
    scene.model.to(torch.bfloat16).to(torch.float32)


@change("double precision", may_refuse=True, is_seen=False)
def doubled(scene: Scene, random: Random) -> Callable[[], object]:
    scene.model.double()
    return scene.model.float


@change("resize_token_embeddings, larger", may_refuse=True, is_seen=False)
def resized(scene: Scene, random: Random, more: int = 5) -> None:
    if scene.wrapper is not None:
        raise Inapplicable
    size = scene.model.get_input_embeddings().weight.shape[0]
    scene.model.resize_token_embeddings(size + more, mean_resizing=False)


@change("resize_token_embeddings, smaller", may_refuse=True, is_seen=False)
def shrunk(scene: Scene, random: Random) -> None:
    if any(token >= 60 for token in scene.last):
        scene.last = [token % 60 for token in scene.last]
    resized(scene, random, more=-5)


@change("tied weights")
def tied(scene: Scene, random: Random) -> None:
    model = scene.model
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


@change("tie_weights by the config")
def tied_by_config(scene: Scene, random: Random) -> None:
    if scene.wrapper is not None:
        raise Inapplicable
    scene.model.config.get_text_config().tie_word_embeddings = True
    scene.model.config.tie_word_embeddings = True
    scene.model.tie_weights()


@change("set_input_embeddings")
def other_embeddings(scene: Scene, random: Random) -> None:
    other = copy.deepcopy(scene.model.get_input_embeddings())
    other.weight.data = other.weight.data.flip(0)
    scene.model.set_input_embeddings(other)


@change("set_output_embeddings")
def other_head(scene: Scene, random: Random) -> None:
    own = scene.model.get_output_embeddings()
    other = nn.Linear(own.in_features, own.out_features, bias=random.random() < 0.5)
    scene.model.set_output_embeddings(other.to(own.weight.dtype))


@change("pruned by torch.nn.utils")
def pruned(scene: Scene, random: Random) -> Callable[[], None] | None:
    layer = linear_of(scene, random)
    prune.l1_unstructured(layer, "weight", amount=0.6)
    return None


@change("pruned for good")
def pruned_for_good(scene: Scene, random: Random) -> None:
    layer = linear_of(scene, random)
    prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=0)
    prune.remove(layer, "weight")


class Scaled(nn.Module):
    """A parametrisation that flips every second row."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(len(weight)) % 2)
        return weight * signs[:, None]


@change("a parametrised weight")
def parametrised(scene: Scene, random: Random) -> Callable[[], None]:
    layer = linear_of(scene, random)
    kind = type(layer)
    parametrize.register_parametrization(layer, "weight", Scaled())

    def undo() -> None:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        assert type(layer) is kind

    return undo


@change("weight_norm, its magnitude written")
def weight_norm(scene: Scene, random: Random) -> None:
    layer = linear_of(scene, random)
    parametrizations.weight_norm(layer)
    magnitude = layer.parametrizations.weight.original0
    magnitude.data *= 1 - 2 * (torch.arange(len(magnitude)) % 2)[:, None]


@change("quantised by torch's dynamic quantisation", may_refuse=True, is_seen=False)
def quantised_dynamically(scene: Scene, random: Random) -> None:
    if scene.wrapper is not None:
        raise Inapplicable
    layer = random.choice([*scene.layers])
    torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, inplace=True)


@change("quantised by torchao", may_refuse=True, is_seen=False)
def quantised_by_torchao(scene: Scene, random: Random) -> None:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise Inapplicable from None
    if scene.wrapper is not None:
        raise Inapplicable
    quantize_(random.choice([*scene.layers]), Int8WeightOnlyConfig())
