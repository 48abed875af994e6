"""Expert parallelism: ranks that divide the experts of a mixture, and send each token to those that have its experts.

All of a layer but its experts is computed where the token is. A rank keeps 1/S of each layer's experts; tokens travel
to them, and what they make of the tokens travels back (Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3.2):

    tokens T·k, all experts E   →   tokens that came, experts E/S   →   tokens T·k, weighed and summed

No token is dropped, and none is padded: ranks first tell each other how many come. The router, the experts' own forward
pass and the names of parameters stay those of transformers, so that routes can be replayed and weights sent as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from roll_like.models.experts import expert_layers
from roll_like.models.unread import materialise
from roll_like.training.exchange import exchange


@dataclass(frozen=True, eq=False, slots=True)
class ExpertParallel:
    """One rank's place among ranks that divide experts.

    Attributes:
        mesh: The ranks that divide them, in one dimension.
    """

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        """Return how many ranks there are, S."""
        return self.mesh.size()

    @property
    def group(self) -> ProcessGroup:
        """Return their process group."""
        return self.mesh.get_group()

    def divide(self, model: nn.Module, kept_as: dict[bool, torch.dtype]) -> Iterator[nn.Module]:
        """Let each layer's experts be divided; yield the modules that have them.

        A parameter [E, …] becomes a `DTensor` of the same shape, of which this rank holds [E/S, …]. Of a parameter that
        is still in the checkpoint's files no more than one is in memory at a time.

        Args:
            model: The model, on the CPU; all ranks have the same.
            kept_as: The precision of parameters that are trained (True), and of others.

        Raises:
            ConfigError: The model has no experts that can be divided.
        """
        for experts in expert_layers(model):
            compute = type(experts).forward
            for name, parameter in list(experts.named_parameters(recurse=False)):
                materialise(parameter)
                own = parameter.data.chunk(self.size)[self.mesh.get_local_rank()]
                # a copy: a slice would keep the memory of the whole
                own = own.to(kept_as[parameter.requires_grad], copy=True)
                divided = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
                setattr(experts, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
                parameter.data = parameter.data.new_empty(0)
            experts.forward = partial(self._forward, experts, compute)
            yield experts

    def _forward(self, experts: Any, compute: Any, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return what the experts of each token make of it, weighed and summed, shape [T, D]."""
        tokens, active = chosen_TK.shape
        local = experts.num_experts // self.size
        chosen_N = chosen_TK.flatten()
        order_N = chosen_N.argsort(stable=True)
        sent_SE = torch.bincount(chosen_N, minlength=experts.num_experts).view(self.size, local)
        came_SE = exchange(sent_SE, self.group)
        sent, came = torch.stack([sent_SE.sum(1), came_SE.sum(1)]).tolist()

        came_MD = exchange(x_TD[order_N // active], self.group, sent, came)
        experts_E = torch.arange(local, device=x_TD.device)
        which_M = experts_E.repeat(self.size).repeat_interleave(came_SE.flatten())
        made_MD = _own_experts(experts, compute, local, came_MD, which_M)
        back_ND = exchange(made_MD, self.group, came, sent)

        weighed_ND = back_ND * weights_TK.flatten()[order_N][:, None]
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return weighed_ND[place_N].view(tokens, active, -1).sum(1).to(x_TD.dtype)


def _own_experts(experts: Any, compute: Any, count: int, rows_MD: Tensor, which_M: Tensor) -> Tensor:
    """Return what this rank's experts make of rows, each of one expert."""
    own = _OwnExperts(experts, count)
    if len(rows_MD):
        made: Tensor = compute(own, rows_MD, which_M[:, None], rows_MD.new_ones(len(rows_MD), 1))
        return made
    # nothing came: the exchanges of the backward pass need this rank all the same, and its experts a gradient of 0
    used = [each.flatten()[:1].sum() for each in vars(own).values() if isinstance(each, Tensor)]
    return rows_MD + 0.0 * torch.stack(used).sum()


class _OwnExperts:
    """Stands for a module of experts with those of this rank alone, for its forward pass."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        self._experts = experts
        self.num_experts = count
        own: Any  # a DTensor
        for name, own in experts.named_parameters(recurse=False):
            setattr(self, name, own.to_local())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
