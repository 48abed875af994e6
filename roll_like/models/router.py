"""The experts that the layers of a mixture choose: recorded, or given.

Every architecture of transformers scores the experts of a token, takes the best of them with `torch.topk`, and weighs
their outputs with the scores of those that it took. Here that one call is watched. Given experts take the place of the
best ones with their own scores, so the router learns as if it had chosen them (routing replay: Zheng et al. 2025,
arXiv:2507.18071, section 5.3; with the engine's routes: Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from roll_like.errors import ConfigError, EngineError
from roll_like.models.shape import Experts

_NUMBER = re.compile(r"\.(\d+)\.")
UNKNOWN = -1


class RouterReplay:
    """The layers with experts of a Hugging Face model.

    Args:
        model: The model. Its layers are watched from now on; without `record` and `give` they compute as before.
        key: What asks for it, for messages.

    Raises:
        ConfigError: The model is no mixture of experts.
    """

    def __init__(self, model: Any, key: str) -> None:
        blocks = {name: module for name, module in model.named_modules() if hasattr(module, "experts")}
        experts = Experts.of(model.config.get_text_config())
        if not blocks or experts is None:
            raise ConfigError(f"{key}: {type(model).__name__} has no layers with experts", fix="remove the key")
        self.experts = experts
        self._key = key
        self._recorded: dict[int, Tensor] | None = None
        self._given_TMK: Tensor | None = None
        self._counts: Tensor | None = None  # of given experts: those that the layers would not have chosen, and all
        self._modes: list[_Watched] = []
        for name, block in blocks.items():
            layer = int(_NUMBER.findall(f".{name}.")[-1])
            block.register_forward_pre_hook(partial(self._enter, layer))
            block.register_forward_hook(partial(self._leave, name), always_call=True)

    @contextmanager
    def record(self) -> Iterator[dict[int, Tensor]]:
        """Yield what will be the experts of each token by layer, [T, k], after a forward pass within."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def give(self, routes_TMK: Tensor | None) -> None:
        """Let forward passes from now on use these experts, also those that are computed again for a gradient.

        Args:
            routes_TMK: Shape [T, layers, k] for the tokens in the order in which layers see them; −1 where the layers
                are to choose themselves. None lets them choose everywhere.
        """
        self._given_TMK, self._counts = routes_TMK, None

    def disagreement(self, group: ProcessGroup | None = None) -> tuple[float, int]:
        """Return the share of given experts that layers would not have chosen since `give`, and the number of given.

        Args:
            group: Ranks that share the tokens; all of them ask.
        """
        counts = self._counts
        if counts is not None and group is not None:
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=group)
        other, given = (0, 0) if counts is None else counts.tolist()
        return (other / given if given else 0.0), given

    def _enter(self, layer: int, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        if self._recorded is None and self._given_TMK is None:
            return
        mode = _Watched(self, layer)
        self._modes.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        if not self._modes:
            return
        mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and mode.calls != 1:  # a recomputation ends as soon as it has what it needs
            raise EngineError(
                f"{name} ({type(module).__name__}) chose among its {self.experts.choice} experts with {mode.calls} "
                "calls of torch.topk; one is expected, so its routes can neither be recorded nor replayed",
                fix=f"set {self._key}: false, or use another model",
            )

    def choose(self, layer: int, scores_TE: Tensor, own: Any) -> Any:
        """Return what stands for the result of `torch.topk`; called by `_Watched`."""
        indices = own[1]
        if self._given_TMK is not None:
            given = self._given_TMK[:, layer].view_as(indices)
            known = given >= 0
            missed = known & ~(given[..., :, None] == indices[..., None, :]).any(-1)
            counts = torch.stack([missed.sum(), known.sum()])
            self._counts = counts if self._counts is None else self._counts + counts
            indices = torch.where(known, given, indices)
            own = torch.return_types.topk((scores_TE.gather(-1, indices), indices))
        if self._recorded is not None:
            self._recorded[layer] = indices.reshape(-1, indices.shape[-1])
        return own


class _Watched(TorchFunctionMode):
    """Within the forward pass of one layer's experts: sees the call that chooses them."""

    def __init__(self, router: RouterReplay, layer: int) -> None:
        super().__init__()
        self._router = router
        self._layer = layer
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._router.experts.choice or result[1].shape[-1] != self._router.experts.active:
            return result  # of groups of experts
        self.calls += 1
        return self._router.choose(self._layer, scores, result)
