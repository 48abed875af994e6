"""Muon: torch's own steps whatever the ranks and the pieces, and the same updates with every backend and ZeRO stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from test_training_fsdp2 import Weights, largest_difference, learn, share_of, weights_of
from tests_support import answer_logprobs, ragged_policy_samples  # type: ignore[import-not-found]
from tiny_families import make_family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.training import OptimizerConfig, TrainingConfig
from roll_like.errors import CheckpointError
from roll_like.models.checkpoint_names import converted
from roll_like.training.deepspeed_states import _adam
from roll_like.training.interface import RankSpec
from roll_like.training.muon import MOMENTUM, Muon, _own, _part, matrices_within, orthogonalised, weight_matrices
from roll_like.training.rank import TrainingRank
from roll_like.values import reduce

pytestmark = pytest.mark.integration
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "muon": {"lr": 2e-2, "momentum": 0.9},
}
SHAPES = {"tall": (7, 5), "wide": (5, 12), "one": (6, 6), "experts": (4, 3, 6)}


def torchs(parameters: list[Tensor], config: OptimizerConfig) -> torch.optim.Muon:
    muon = config.muon
    assert muon is not None
    return torch.optim.Muon(
        parameters,
        lr=muon.lr or config.lr,
        weight_decay=config.weight_decay,
        momentum=muon.momentum,
        nesterov=muon.nesterov,
        ns_steps=muon.ns_steps,
        adjust_lr_fn=muon.adjust_lr_fn,
    )


def stretch(name: str, layout: str, rank: int, ranks: int) -> tuple[int, int]:
    """Return what a rank keeps of a parameter: where it begins, flat, and how much it is."""
    numel = torch.Size(SHAPES[name]).numel()
    if layout == "all of it everywhere":
        return 0, numel
    if layout == "one rank each":
        return 0, numel if list(SHAPES).index(name) % ranks == rank else 0
    cuts = [
        0,
        *sorted(torch.randint(0, numel, (ranks - 1,), generator=torch.Generator().manual_seed(7)).tolist()),
        numel,
    ]
    return cuts[rank], cuts[rank + 1] - cuts[rank]


def steps_of(
    rank: int, ranks: int, address: Any, layout: str, settings: dict[str, Any], inputs_first: str
) -> dict[str, Tensor]:
    """Take three steps with given gradients; return this rank's stretches of the parameters after them."""
    host, port = address
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=ranks)
    draw = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    config = OptimizerConfig.model_validate(settings)
    parameters = {name: nn.Parameter(each.clone()) for name, each in whole.items()}
    muon = Muon(parameters, [], config, {each for name, each in parameters.items() if name == inputs_first})
    places = {name: stretch(name, layout, rank, ranks) for name in SHAPES}
    kept = torch.cat([whole[name].flatten()[start : start + n] for name, (start, n) in places.items()])
    muon.param_groups[0]["params"] = [kept]  # as DeepSpeed does
    pieces, offset = [], 0
    for name, (start, numel) in places.items():
        pieces += matrices_within(name, SHAPES[name], kept, offset=offset, start=start, numel=numel)
        offset += numel
    muon.lay_out(pieces, "cpu")
    for _ in range(3):
        gradients = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
        kept.grad = torch.cat([gradients[name].flatten()[s : s + n] for name, (s, n) in places.items()])
        muon.step()
    torch.distributed.destroy_process_group()
    return dict(zip(places, kept.split([n for _, n in places.values()]), strict=True))


@pytest.mark.parametrize(
    ("layout", "settings", "inputs_first"),
    [
        ("cut anywhere", SETTINGS, ""),
        ("one rank each", {**SETTINGS, "muon": {"nesterov": False, "ns_steps": 3}}, ""),
        ("all of it everywhere", {**SETTINGS, "muon": {"adjust_lr_fn": "original"}}, ""),
        ("all of it everywhere", {**SETTINGS, "muon": {"adjust_lr_fn": "original"}}, "experts"),
    ],
)
def test_steps_are_torchs_to_the_bit_however_ranks_divide_matrices(
    layout: str, settings: dict[str, Any], inputs_first: str
) -> None:
    found = on_ranks(steps_of, layout, settings, inputs_first, ranks=3)
    draw = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}

    def outputs_first(name: str, tensor: Tensor) -> Tensor:  # torch's Muon knows linear layers alone
        return tensor.mT.contiguous() if name == inputs_first else tensor

    matrices = {
        name: list(outputs_first(name, each.reshape(-1, *each.shape[-2:])).unbind()) for name, each in whole.items()
    }
    optimizer = torchs(
        [each for stack in matrices.values() for each in stack], OptimizerConfig.model_validate(settings)
    )
    for _ in range(3):
        for name, shape in SHAPES.items():
            gradient = outputs_first(name, torch.randn(shape, generator=draw).reshape(-1, *shape[-2:]))
            for matrix, its in zip(matrices[name], gradient, strict=True):
                matrix.grad = its
        optimizer.step()
    for name, stack in matrices.items():
        pieces = [ranks[name] for ranks in found]
        if layout == "all of it everywhere":
            assert all(torch.equal(each, pieces[0]) for each in pieces)
            pieces = pieces[:1]
        assert torch.equal(torch.cat(pieces), outputs_first(name, torch.stack(stack)).flatten()), name


def test_newton_schulz_works_on_singular_values() -> None:
    """By hand: x ← 3.4445·x − 4.775·x³ + 2.0315·x⁵, five times, of singular values divided by the matrix's norm."""
    left, _ = torch.linalg.qr(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    right, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))
    values = [8.0, 4.0, 1.0, 0.5]
    matrix = (left * torch.tensor(values) @ right.T).bfloat16()
    norm = sum(value**2 for value in values) ** 0.5  # √81.25 = 9.0139, and 8 / 9.0139 = 0.8875
    expected, once = [], []
    for value in values:
        x = value / norm
        for step in range(5):
            x = 3.4445 * x - 4.775 * x**3 + 2.0315 * x**5
            once += [x] if step == 0 else []
        expected.append(x)
    assert once == pytest.approx([0.8376, 1.1463, 0.3757, 0.1902], abs=1e-4)  # 3.0571 - 3.3382 + 1.1187, …
    for steps, singular in ((1, once), (5, expected)):
        found = orthogonalised(matrix.clone(), steps)
        assert torch.allclose(found.float(), left * torch.tensor(singular) @ right.T, atol=0.03)
    stacked = orthogonalised(matrix[None].repeat(2, 1, 1), 5)
    assert torch.allclose(stacked.float(), found.float(), atol=0.03)


def start(rank: int, ranks: int, address: Any, model: str, dtype: str, options: dict[str, Any]) -> TrainingRank:
    settings = TrainingConfig(**{"workers": ranks, "max_tokens_per_micro_batch": 64, "optimizer": SETTINGS, **options})
    spec: RankSpec[Any] = cpu_rank(SupervisedObjective(settings=settings, packing=True), model, dtype=dtype)
    trainer = TrainingRank(spec, rank, ranks)
    trainer.start(address)
    return trainer


def momentum(trainer: TrainingRank) -> list[Tensor]:
    """Return this rank's shares of the momentum."""
    backend: Any = trainer._backend
    states = (backend._optimizer if hasattr(backend, "_optimizer") else _adam(backend._engine)).state
    found = [_own(each["momentum_buffer"]) for each in states.values() if "momentum_buffer" in each]
    assert found
    return found


def train(
    rank: int, ranks: int, address: Any, model: str, dtype: str, folder: str, options: dict[str, Any]
) -> tuple[list[float], Weights, Tensor, Weights]:
    """Three steps, with a checkpoint after the second; return gradient norms, what it holds, and the weights."""
    trainer = start(rank, ranks, address, model, dtype, options)
    norms = [learn(trainer, seed)["train/grad_norm"] for seed in (0, 1)]
    trainer.save(folder)
    between, moments = weights_of(trainer), torch.cat([each.flatten() for each in momentum(trainer)])
    for state in ("optimizer", "weights"):
        trainer.offload(state)  # type: ignore[arg-type]
    assert all(each.untyped_storage().nbytes() == 0 for each in momentum(trainer) if each.numel())
    for state in ("weights", "optimizer"):
        trainer.reload(state)  # type: ignore[arg-type]
    norms.append(learn(trainer, 2)["train/grad_norm"])
    found = weights_of(trainer)
    trainer.close()
    return norms, between, moments, found


def resume(
    rank: int, ranks: int, address: Any, model: str, dtype: str, folder: str, options: dict[str, Any]
) -> tuple[Weights, Tensor, Weights]:
    """Return weights and this rank's momentum as they were loaded, and the weights a step later."""
    trainer = start(rank, ranks, address, model, dtype, options)
    trainer.load(folder)
    loaded, moments = weights_of(trainer), torch.cat([each.flatten() for each in momentum(trainer)])
    learn(trainer, 2)
    after = weights_of(trainer)
    trainer.close()
    return loaded, moments, after


def apart(left: Weights, right: Weights, given: Weights) -> float:
    """Return how far two models are apart at most, as a share of what a tensor has learned since it was given."""
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).norm() / (right[n] - given[n]).norm().clamp(min=1e-6)) for n in right)


def plain_loop(model: Path) -> tuple[list[float], Weights, Weights]:
    """Gradient norms of three steps of plain PyTorch with torch's Muon and AdamW; weights after and before them."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    given = {name: each.detach().clone() for name, each in policy.named_parameters()}
    config = OptimizerConfig.model_validate(SETTINGS)
    matrices = weight_matrices(policy)
    rest = [each for name, each in policy.named_parameters() if name not in matrices]
    adamw = torch.optim.AdamW(rest, lr=config.lr, eps=config.eps, weight_decay=config.weight_decay)
    optimizers = [torchs([*matrices.values()], config), adamw]
    norms = []
    for seed in range(3):
        samples = ragged_policy_samples(seed=seed)
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        policy.zero_grad()
        (-sum(answer_logprobs(policy, sample).sum() for sample in samples) / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
        for optimizer in optimizers:
            optimizer.step()
    return norms, {name: each.detach().clone() for name, each in policy.named_parameters()}, given


@pytest.mark.parametrize(
    ("options", "again"),
    [
        pytest.param({"backend": "fsdp2", "zero_stage": 3}, {"backend": "fsdp2", "zero_stage": 3}, id="fsdp2"),
        pytest.param({"zero_stage": 3}, {"zero_stage": 0}, id="zero3"),
        pytest.param({"zero_stage": 0}, {"zero_stage": 2}, id="zero0", marks=pytest.mark.slow),
        pytest.param({"zero_stage": 1}, {"zero_stage": 3}, id="zero1", marks=pytest.mark.slow),
        pytest.param({"zero_stage": 2}, {"zero_stage": 1}, id="zero2", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_a_plain_loop_and_resume_on_other_ranks(
    float_model: Path, tmp_path: Path, options: dict[str, Any], again: dict[str, Any]
) -> None:
    norms, expected, given = plain_loop(float_model)
    model, folder = str(float_model), str(tmp_path)
    (found_norms, between, moments, found), (*_, others, _) = on_ranks(
        train, model, "float32", folder, options, ranks=2
    )
    assert found_norms == pytest.approx(norms, rel=1e-3)
    # sums in another order round to other numbers of bfloat16, which a gradient of small rank makes large; with the
    # same gradient steps are equal to the bit (above)
    assert apart(found, expected, given) < 0.06
    ((loaded, resumed, after),) = on_ranks(resume, model, "float32", folder, again, ranks=1)
    assert largest_difference(loaded, between) == 0.0
    if options["zero_stage"]:  # every element is there once, beside zeros that fill up
        moments = torch.cat([moments, others])
    assert torch.equal(moments[moments != 0].sort().values, resumed[resumed != 0].sort().values)
    assert apart(after, found, given) < 0.06


Moments = dict[tuple[str, int], list[tuple[int, Tensor]]]


def moments_of(trainer: TrainingRank) -> Moments:
    """Return what this rank keeps of the momentum: of each matrix where it begins, and the numbers."""
    backend: Any = trainer._backend
    muon = backend._optimizer if hasattr(backend, "_optimizer") else _adam(backend._engine)
    assert isinstance(muon, Muon)
    found: Moments = {}
    for piece in itertools.chain.from_iterable(muon._pieces.values()):
        numbers = _part(muon.state[piece.kept][MOMENTUM], piece).clone()
        found.setdefault(piece.matrix, []).append((piece.start, numbers))
    return found


def joined(ranks: Sequence[Moments]) -> dict[tuple[str, int], Tensor]:
    """Return the momentum of whole matrices, flat; what several ranks keep is the same on each."""
    whole = {}
    for matrix in ranks[0]:
        everywhere = [piece for rank in ranks for piece in rank[matrix] if len(piece[1])]
        pieces = sorted(everywhere, key=lambda piece: piece[0])
        kept = dict(pieces)
        assert all(torch.equal(numbers, kept[start]) for start, numbers in pieces)
        ends = [0, *(start + len(numbers) for start, numbers in kept.items())]
        assert [*kept] == ends[:-1], "pieces follow each other"
        whole[matrix] = torch.cat([*kept.values()])
    return whole


def coast(trainer: TrainingRank) -> Weights:
    """Take a step whose gradients are 0, so that states alone say where it goes; return the weights after it."""
    share = share_of(trainer, 2)
    still = [replace(batch, weights=np.zeros_like(batch.weights)) for batch in share.batches]
    report = {**reduce(trainer.forward_backward(replace(share, batches=still))), **reduce(trainer.optimizer_step())}
    assert report["train/grad_norm"] == 0
    return weights_of(trainer)


def train_and_coast(
    rank: int, ranks: int, address: Any, model: str, folder: str, options: dict[str, Any]
) -> tuple[Weights, Moments, Weights]:
    """Return weights and momentum after two steps, as a checkpoint has them, and weights after one without gradient."""
    trainer = start(rank, ranks, address, model, "bfloat16", options)
    for seed in (0, 1):
        learn(trainer, seed)
    trainer.save(folder)
    found = weights_of(trainer), moments_of(trainer), coast(trainer)
    trainer.close()
    return found


def resume_and_coast(
    rank: int, ranks: int, address: Any, model: str, folder: str, options: dict[str, Any]
) -> tuple[Weights, Moments, Weights]:
    """Return what a new trainer has loaded, and its weights after a step without gradient."""
    trainer = start(rank, ranks, address, model, "bfloat16", options)
    trainer.load(folder)
    found = weights_of(trainer), moments_of(trainer), coast(trainer)
    trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("backend", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
def test_a_step_of_states_alone_is_the_same_to_the_bit_on_other_ranks(
    tiny_model: Path, tmp_path: Path, backend: str, stage: int, before: int, after: int
) -> None:
    arguments = (str(tiny_model), str(tmp_path), {"backend": backend, "zero_stage": stage})
    saved = on_ranks(train_and_coast, *arguments, ranks=before)
    loaded = on_ranks(resume_and_coast, *arguments, ranks=after)
    for place in (0, 2):
        assert largest_difference(saved[0][place], loaded[0][place]) == 0.0
    assert largest_difference(saved[0][0], saved[0][2]) > 1e-3
    momenta, again = (joined([each[1] for each in ranks]) for ranks in (saved, loaded))
    assert momenta.keys() == again.keys()
    for matrix, momentum in momenta.items():
        assert float(momentum.abs().max()) > 0
        assert torch.equal(momentum, again[matrix]), matrix


def without_muon(rank: int, ranks: int, address: Any, model: str, folder: str, options: dict[str, Any]) -> str:
    """Return what a trainer with AdamW says to the checkpoint."""
    options = {**options, "optimizer": {"lr": 1e-2}}
    trainer = start(rank, ranks, address, model, "float32", options)
    with pytest.raises(CheckpointError) as refused:
        trainer.load(folder)
    trainer.close()
    return str(refused.value)


def train_experts(rank: int, ranks: int, address: Any, model: str, folder: str, options: dict[str, Any]) -> Weights:
    trainer = start(rank, ranks, address, model, "float32", options)
    for seed in (0, 1):
        learn(trainer, seed)
    if folder:
        trainer.save(folder)
    found = weights_of(trainer)
    trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"expert_parallel": 2}, {}], ids=["divided experts", "sharded experts"])
def test_experts_are_orthogonalised_one_by_one_wherever_they_are(tmp_path: Path, options: dict[str, Any]) -> None:
    model, folder = make_family("qwen3_moe", tmp_path / "model"), str(tmp_path / "saved")
    sharded = {"backend": "fsdp2", "zero_stage": 3}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    given = {name: each.detach() for name, each in converted(policy, policy.named_parameters())}
    (expected,) = on_ranks(train_experts, str(model), "", sharded, ranks=1)
    found, _ = on_ranks(train_experts, str(model), folder, {**sharded, **options}, ranks=2)
    assert apart(found, expected, given) < 0.06
    ((loaded, *_),) = on_ranks(resume, str(model), "float32", folder, sharded, ranks=1)
    assert largest_difference(loaded, found) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "fsdp2", "zero_stage": 3}, {"zero_stage": 1}])
def test_a_checkpoint_of_muon_is_refused_by_adamw(float_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    on_ranks(train_experts, str(float_model), str(tmp_path), options, ranks=1)
    (message,) = on_ranks(without_muon, str(float_model), str(tmp_path), options, ranks=1)
    assert "another optimizer" in message
