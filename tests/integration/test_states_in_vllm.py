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
    assert loader.fingerprint(held) is None
    loader(held, given)
    torch.testing.assert_close(held, -given.float().exp())
    assert loader.fingerprint(held) == fingerprint(given, 1)
    given.zero_()  # memory of a bucket is used again
    assert loader.fingerprint(held) != fingerprint(given, 1)
    held[3] = held[3] * (1 + 2e-7)
    assert loader.fingerprint(held) == fingerprint(held, 1)


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
    assert places.locate("mixer.dt_bias") is None
