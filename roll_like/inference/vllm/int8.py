"""8-bit weights on CPU: each matrix is quantised when it is loaded, at the start and in every weight sync.

vLLM has the kernels (W8A8: int8 weights with a scale a row, activations quantised token by token), but makes such
layers out of quantised checkpoints only. Here they are made of what the trainer sends. Embeddings and output head stay
as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from roll_like.inference.vllm.arguments import INT8
from roll_like.inference.weight_transfer.int8 import quantise_rows


@register_quantization_config(INT8)
class Int8OnCPU(QuantizationConfig):  # type: ignore[misc]
    """What vLLM calls the quantisation of a model."""

    @classmethod
    def get_name(cls) -> str:
        """Return what `quantization` is to be for it."""
        return INT8

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the precisions of activations."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return what a GPU would have to be; only CPUs are used."""
        return 0

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """Return files of a checkpoint that it reads: none."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8OnCPU:
        """Return it for a checkpoint's settings, which have nothing of it."""
        del config
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Int8Linear | None:
        """Return what computes a layer; None leaves it as it is."""
        del prefix
        return Int8Linear() if isinstance(layer, LinearBase) else None


class Int8Linear(OnlineLinearBase):  # type: ignore[misc]
    """Computes one layer. vLLM makes it anew for each."""

    activation_quant_key = None

    def create_weights(self, layer: Any, *args: Any, **options: Any) -> None:
        """Register the weight in the model's precision, as it will come."""
        super().create_weights(layer, *args, **options)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise the weight that is there now, and pack it for the kernel."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        quantised, self.scale = quantise_rows(layer.weight.data)
        replace_parameter(layer, "weight", quantised)
        # the kernel packs a copy of its own or reads this one, which must live as long
        replace_parameter(layer, "weight_scale", self.scale)
        with set_default_torch_dtype(self.out_dtype):
            self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b."""
        outputs: Tensor = self.kernel.apply_weights(layer, x, bias)
        return outputs

    def held(self, columns_CO: Tensor) -> Tensor:
        """Return the whole numbers of some columns and the scales, out of what the kernel gives for unit vectors.

        Args:
            columns_CO: Its outputs, whose rounding is far below half a step.
        """
        numbers = torch.round(columns_CO.float() / self.scale[:, 0]).T
        return torch.cat([numbers, self.scale], 1)
