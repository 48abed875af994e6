"""The table of docs/parallel.md: each layout of ranks, with each objective, computes what one rank does.

All layouts of as many ranks run in the same processes. `make parallel` prints the table and writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gloo_ranks import on_ranks
from megatron_installed import FOLDER, INSTALLED
from parallel_cells import RESULTS, Cell
from rank_specs import cpu_rank
from test_tensor_parallel import OPTIMIZER, Case, objective_of, shards, step_of
from tiny_families import ALTERNATING, COMMON, FAMILIES, make_family
from torch import Tensor
from trained_weights import largest_difference
from transformers import AutoModelForCausalLM

from roll_like.cluster.address import free_port
from roll_like.config.training import CriticConfig, TrainingConfig
from roll_like.inference.hf.weights import CheckpointWeights
from roll_like.training.interface import Share
from roll_like.training.layout import per_sample
from roll_like.training.rank import TrainingRank
from roll_like.values import Metric, merge, reduce

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2000)]
TIMEOUT, TOLERANCE = 900, 1e-5
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
Options = dict[str, Any]
FSDP2: Options = {"backend": "fsdp2", "zero_stage": 3}
MEGATRON: Options = {"backend": "megatron", "zero_stage": 1}
#: Where ranks hold the same weights: Megatron-Core's distributed optimizer sums a gradient on one of them only.
WHOLE: Options = {"zero_stage": 0}
DENSE = (
    Case("llama", kind="sft"),
    Case("qwen2", kind="policy"),
    Case("qwen3", kind="policy"),
    Case("qwen3", kind="critic"),
    Case("llama", kind="reward model"),
    Case("qwen2", kind="distill"),
)
EXPERTS = (Case("qwen3_moe", kind="sft"), Case("qwen3_moe", kind="policy"))
#: By number of ranks: how they divide a model, and what they learn.
LAYOUTS: dict[int, dict[str, tuple[Options, tuple[Case, ...]]]] = {
    2: {
        "fsdp2: shards": (FSDP2, DENSE + EXPERTS),
        "fsdp2: tokens": (FSDP2 | {"sequence_parallel": 2}, DENSE[:3]),
        "fsdp2: matrices": (FSDP2 | {"tensor_parallel": 2}, DENSE + EXPERTS),
        "fsdp2: experts": (FSDP2 | {"expert_parallel": 2}, EXPERTS),
        "megatron: matrices": (MEGATRON | {"tensor_parallel": 2}, DENSE + EXPERTS),
        "megatron: layers": (MEGATRON | {"pipeline_parallel": 2}, DENSE + EXPERTS),
        "megatron: layers, interleaved": (MEGATRON | {"pipeline_parallel": 2, "virtual_pipeline": 2}, DENSE[:3]),
        "megatron: tokens": (MEGATRON | WHOLE | {"sequence_parallel": 2}, DENSE[:3]),
        "megatron: experts": (MEGATRON | {"expert_parallel": 2}, EXPERTS),
    },
    4: {
        "fsdp2: matrices, shards": (FSDP2 | {"tensor_parallel": 2}, DENSE[:3]),
        "megatron: matrices, layers": (MEGATRON | {"tensor_parallel": 2, "pipeline_parallel": 2}, DENSE[:3]),
        "megatron: matrices, layers, experts": (
            MEGATRON | {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
            EXPERTS,
        ),
    },
}
#: In bfloat16: families whose layers are others than those above.
HALF = tuple(Case(family) for family in ("deepseek_v3", "glm4_moe", "gpt_oss", "mistral_window", "mixtral"))
HALF_LAYOUTS = ({"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2})


@dataclass(frozen=True)
class Learned:
    """What ranks tell of three updates.

    Attributes:
        metrics: Of each update and each group of ranks with the same rows.
        gradients: The first one, by the names of the Hugging Face model.
        weights: After three updates, by the same names.
        synced: How far log-probabilities of a model with the sent weights are from the trainer's, for each token; None
            without any.
    """

    metrics: list[dict[str, Metric]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    synced: npt.NDArray[np.float32] | None


def whole_gradients(trainer: TrainingRank) -> dict[str, Tensor]:
    backend: Any = trainer._backend
    if trainer._settings.backend == "fsdp2":
        named = trainer._hf_model().named_parameters()
        return {name: each.grad.full_tensor().clone() for name, each in named if each.grad is not None}
    weights = backend._weights
    own = dict(weights._own)
    weights.forget()
    weights._own = {bundle: [each.main_grad for each in parts] for bundle, parts in own.items()}
    found = {name: each.detach().clone() for name, each in trainer._parameters()}
    weights._own = own
    weights.forget()
    return found


def after_a_sync(trainer: TrainingRank, case: Case, model: str, dtype: str) -> npt.NDArray[np.float32] | None:
    """Return how far the log-probabilities of a model that was sent the weights are from the trainer's."""
    batches, _ = shards(trainer, case, 3)
    trained = trainer.forward(batches) if case.kind in ("sft", "policy") else None
    sent = {name: each.detach().clone() for name, each in trainer.full_weights()}
    if trained is None or trainer.rank != 0:
        return None
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    with torch.no_grad():
        engine.get_input_embeddings().weight.zero_()  # nothing of the start is left
        taken = CheckpointWeights(engine)
        for name, tensor in sent.items():
            taken.write(name, tensor)
        samples, temperature = step_of(case, 3), trainer._objective.temperature
        mine = per_sample(samples, [batches], [trained])
        differences = []
        for sample, own in zip(samples, mine, strict=True):
            token_ids = torch.from_numpy(sample.token_ids).long()
            logits = engine(token_ids[None]).logits[0, :-1].float() / temperature
            logprobs = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0].numpy()
            of_mine = own[1:] != 0  # others are another rank's, or were not sampled
            differences.append(np.abs(logprobs - own[1:])[of_mine])
    found = np.concatenate(differences)
    assert len(found) > 10
    return found


def learn_all(
    rank: int,
    ranks: int,
    _: Any,
    models: dict[str, str],
    given: Sequence[tuple[Any, Options, Case]],
    dtype: str = "float32",
) -> list[Learned]:
    sys.path.append(str(FOLDER))
    found = []
    for address, options, case in given:
        section = (CriticConfig if case.kind == "critic" else TrainingConfig)(
            **{"workers": ranks, "max_tokens_per_micro_batch": 64, **options}, optimizer=OPTIMIZER
        )
        assert not list(section.violations("training", "cpu"))
        spec: Any = cpu_rank(objective_of(case, section), models[case.family], dtype=dtype)
        trainer = TrainingRank(spec, rank, ranks)
        trainer.start(address)
        metrics, gradients = [], {}
        for seed in range(3):
            batches, shared = shards(trainer, case, seed)
            report = trainer.forward_backward(Share(batches=batches, shared=shared))
            if seed == 0 and dtype == "float32":  # gradients are, whatever the weights are
                gradients = whole_gradients(trainer)
            metrics.append({**report, **trainer.optimizer_step()})
        weights = {name: each.detach().clone() for name, each in trainer._parameters()}
        found.append(Learned(metrics, gradients, weights, after_a_sync(trainer, case, models[case.family], dtype)))
        trainer.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    under = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHAPE.items():
            patch.setitem(COMMON, name, value)
        patch.setitem(FAMILIES["gpt_oss"][2], "layer_types", ALTERNATING * 2)
        families = {case.family for case in (*DENSE, *EXPERTS, *HALF)}
        return {family: str(make_family(family, under / family)) for family in families}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[Case, Learned]:
    """What one rank learns."""
    given = [(("127.0.0.1", free_port()), FSDP2, case) for case in DENSE + EXPERTS]
    (found,) = on_ranks(learn_all, models, given, ranks=1, timeout=TIMEOUT)
    return dict(zip(DENSE + EXPERTS, found, strict=True))


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(ranks, backend, marks=INSTALLED if backend == "megatron" else ())
        for ranks in LAYOUTS
        for backend in ("fsdp2", "megatron")
    ],
)
def test_every_layout_learns_what_one_rank_learns(
    models: dict[str, str], alone: dict[Case, Learned], ranks: int, backend: str
) -> None:
    layouts = {name: each for name, each in LAYOUTS[ranks].items() if name.startswith(backend)}
    alike = {case: WHOLE if backend == "megatron" and case in EXPERTS else {} for case in DENSE + EXPERTS}
    named = [(name, options | alike[case], case) for name, (options, cases) in layouts.items() for case in cases]
    given = [(("127.0.0.1", free_port()), options, case) for _, options, case in named]
    by_rank = on_ranks(learn_all, models, given, ranks=ranks, timeout=TIMEOUT)
    for (name, options, case), of_ranks in zip(named, zip(*by_rank, strict=True), strict=True):
        expected, sharing = alone[case], TrainingConfig(workers=ranks, **options).sharing
        prefix = "critic" if case.kind == "critic" else "train"
        updates = zip(*(each.metrics for each in of_ranks[::sharing]), strict=True)
        losses = [
            abs(reduce(merge(of_update))[f"{prefix}/loss"] - reduce(wanted)[f"{prefix}/loss"])
            for of_update, wanted in zip(updates, expected.metrics, strict=True)
        ]
        assert all(largest_difference(each.weights, of_ranks[0].weights) == 0 for each in of_ranks), (
            "ranks have other weights"
        )
        largest = max(float(each.abs().max()) for each in expected.gradients.values())
        cell = Cell(
            layout=name,
            ranks=ranks,
            family=case.family,
            objective=case.kind,
            loss=max(losses),
            gradient=largest_difference(of_ranks[0].gradients, expected.gradients) / max(1.0, largest),
            weights=largest_difference(of_ranks[0].weights, expected.weights),
            synced=None if of_ranks[0].synced is None else float(of_ranks[0].synced.max()),
        )
        print(cell)
        assert max(cell.loss, cell.gradient, cell.weights) < TOLERANCE, cell
        assert cell.synced is None or cell.synced < 10 * TOLERANCE, cell
        RESULTS.append(cell)


@INSTALLED
def test_other_families_in_bfloat16(models: dict[str, str]) -> None:
    """Against one rank of fsdp2, with weights sent to transformers' model: apart by as much as bfloat16 rounds."""
    alone = [(("127.0.0.1", free_port()), FSDP2, case) for case in HALF]
    (found,) = on_ranks(learn_all, models, alone, "bfloat16", ranks=1, timeout=TIMEOUT)
    expected = dict(zip(HALF, found, strict=True))
    given = [
        (("127.0.0.1", free_port()), MEGATRON | WHOLE | options, case)
        for options in HALF_LAYOUTS
        for case in HALF
        if not (case.family == "mistral_window" and "expert_parallel" in options)
    ]
    by_rank = on_ranks(learn_all, models, given, "bfloat16", timeout=TIMEOUT)
    for (_, options, case), of_ranks in zip(given, zip(*by_rank, strict=True), strict=True):
        sharing, wanted = TrainingConfig(workers=2, **options).sharing, expected[case]
        updates = [reduce(merge(each)) for each in zip(*(each.metrics for each in of_ranks[::sharing]), strict=True)]
        figures = [[reduce(each)[name] for each in wanted.metrics] for name in ("train/loss", "train/grad_norm")]
        losses, norms = [[each[name] for each in updates] for name in ("train/loss", "train/grad_norm")]
        assert losses == pytest.approx(figures[0], abs=0.02), (case, options)
        assert norms == pytest.approx(figures[1], rel=0.03), (case, options)
        assert largest_difference(of_ranks[0].weights, wanted.weights) <= 2**-6, (
            case,
            options,
        )  # two numbers on, of those near 1
        # a token whose scores of two experts are nearly equal has others: few are far apart
        synced = of_ranks[0].synced
        assert synced is not None
        print(case.family, options, float(np.median(synced)), float(synced.mean()), float(synced.max()))
        assert np.median(synced) < 0.02, (case, options)
        assert synced.mean() < 0.1, (case, options)
