"""What a weight sync compares of layers with a state, by vLLM's own classes and without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from roll_like.inference.weight_transfer.fingerprint import fingerprint

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # of what vLLM's imports warn of
]


def test_decay_rates_are_those_that_were_given() -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from roll_like.inference.vllm.states import ChangedOnLoad

    given = torch.linspace(-1.0, 3.0, 9).bfloat16()
    loader = ChangedOnLoad(default_weight_loader, lambda rate: -torch.exp(rate.float()))
    held = torch.empty(9)
    assert loader.numbers(held) is None
    loader(held, given)
    torch.testing.assert_close(held, -given.float().exp())
    assert fingerprint(loader.numbers(held), 1) == fingerprint(given, 1)
    given.zero_()  # memory of a bucket is used again
    assert fingerprint(loader.numbers(held), 1) != fingerprint(given, 1)
    held[3] = held[3] * (1 + 2e-7)
    assert fingerprint(loader.numbers(held), 1) == fingerprint(held, 1)


def test_a_convolution_is_read_where_it_is_computed_with() -> None:
    from roll_like.inference.vllm.states import convolution, convolves, renew_convolutions

    weight = torch.randn(64, 1, 4).bfloat16()
    layer: Any = SimpleNamespace(weight=weight, tp_size=1)
    assert convolves(layer)
    assert convolution(layer, None) is weight
    assert convolution(SimpleNamespace(weight=weight, tp_size=2), None) is None
    assert not convolves(SimpleNamespace(weight=weight[:, 0]))
    mixer = nn.Module()
    mixer.register_buffer("conv_weights", weight[:, 0] + 1, persistent=False)
    torch.testing.assert_close(convolution(layer, mixer), weight + 1)
    mixer.conv1d = nn.Module()  # vLLM packed it
    mixer.conv1d._cpu_unpacked_conv_weight = weight[:, 0]
    renew_convolutions(nn.Sequential(mixer))
    torch.testing.assert_close(mixer.conv_weights, weight[:, 0])


def test_packed_convolutions_are_compared_with_what_was_packed() -> None:
    from vllm.platforms import current_platform

    from roll_like.inference.vllm.states import convolution

    if not current_platform.is_cpu() or not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("no convolution is packed here")
    current_platform.import_kernels()
    from vllm._custom_ops import causal_conv1d_weight_pack

    unpacked = torch.randn(64, 4).bfloat16()
    packed = causal_conv1d_weight_pack(unpacked)
    layer = SimpleNamespace(weight=packed, _cpu_unpacked_conv_weight=unpacked, tp_size=1)
    torch.testing.assert_close(convolution(layer, None), unpacked[:, None])
    layer._cpu_unpacked_conv_weight = unpacked + 1  # packed before that came
    assert convolution(layer, None) is packed


class Whole(nn.Module):
    """A model of vLLM's kind: fused parts, renamed layers, parameters of its own."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"in_qkvz": ["in_qkv", "in_z"]}

    def __init__(self, mapper: Any) -> None:
        super().__init__()
        self.hf_to_vllm_mapper = mapper
        self.mixer = nn.Module()
        self.mixer.mixer = nn.Module()
        self.mixer.mixer.D = nn.Parameter(torch.ones(2))
        self.mixer.mixer.A = nn.Parameter(torch.ones(2))
        self.mixer.in_qkvz = nn.Linear(2, 8)
        self.vision = nn.Module()
        self.vision.packed_modules_mapping = {"both": ["in_z", "in_a"]}
        self.vision.both = nn.Linear(2, 8)


def test_tensors_are_found_by_the_names_of_checkpoints() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    from roll_like.inference.vllm.places import LayerPlaces

    mapper = WeightsMapper(
        orig_to_new_substr={"mixer": "mixer.mixer"},
        orig_to_new_stacked={".in_qkv": (".in_qkvz", (0, 1, 2)), ".in_z": (".in_qkvz", 3)},
    )
    model = Whole(mapper)
    places = LayerPlaces(model)
    found = places.locate("mixer.D")
    assert found is not None
    assert (found.layer, found.leaf, found.owner) == (model.mixer.mixer, "D", model.mixer)
    found = places.locate("mixer.A_log")
    assert found is not None
    assert (found.layer, found.leaf) == (model.mixer.mixer, "A")
    for name, parts in (("mixer.in_qkv.weight", (0, 1, 2)), ("mixer.in_z.weight", (3,)), ("mixer.in_qkvz.bias", None)):
        found = places.locate(name)
        assert found is not None
        assert (found.layer, found.parts) == (model.mixer.in_qkvz, parts)
    found = places.locate("vision.in_z.weight")
    assert found is not None
    assert (found.layer, found.parts) == (model.vision.both, (0,))
    assert places.locate("mixer.dt_bias") is None


def test_pieces_that_a_layer_does_not_have_are_not_read() -> None:
    from roll_like.inference.vllm.places import chosen_pieces

    pieces = [torch.zeros(2, 3), torch.ones(1, 3)]
    assert chosen_pieces(pieces, None).shape == (3, 3)  # type: ignore[union-attr]
    torch.testing.assert_close(chosen_pieces(pieces, (1,)), pieces[1])
    assert chosen_pieces(pieces, (1, 2)) is None
    assert chosen_pieces([], None) is None


def test_shares_of_ranks_are_put_together_only_where_their_order_is_known() -> None:
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _KimiGDNMergedColumnParallelLinear
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

    from roll_like.inference.vllm.places import divided, shares_in_order

    def layer(kind: Any) -> Any:
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        made.tp_size = 2
        made.weight = nn.Parameter(torch.ones(2, 2))
        made.weight.weight_loader = made.weight_loader
        return made

    for kind in (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.RowParallelLinear):
        assert divided(layer(kind))
        assert shares_in_order(layer(kind))
    assert not divided(layer(linear.ReplicatedLinear))  # routers of experts
    assert not shares_in_order(layer(_KimiGDNMergedColumnParallelLinear))
    mamba = layer(linear.ColumnParallelLinear)
    mamba.weight.weight_loader = mamba_v2_sharded_weight_loader([(2, 0, False)], 2, 0)
    assert not shares_in_order(mamba)


def test_parameters_that_ranks_may_divide_are_known_by_their_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader

    from roll_like.inference.vllm import places

    others = torch.ones(1, 2)
    monkeypatch.setattr(places, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(places, "tensor_model_parallel_all_gather", lambda own, dim: torch.cat([own, others], dim))
    module: Any = nn.Module()  # as vLLM's mixer of Mamba 1, it does not say how many ranks there are
    module.held = nn.Parameter(torch.ones(2))
    place = places.LayerPlace(module, "held", None, None)
    torch.testing.assert_close(places.plain_parameter(place), torch.ones(2))
    others *= 3
    assert places.plain_parameter(place) is None  # a share, or stale
    module.held.weight_loader = sharded_weight_loader(0)
    torch.testing.assert_close(places.plain_parameter(place), torch.tensor([1.0, 1, 3, 3]))
    module.held.weight_loader = lambda held, given: held.data.copy_(given.chunk(2)[0])
    others /= 3
    assert places.plain_parameter(place) is None
