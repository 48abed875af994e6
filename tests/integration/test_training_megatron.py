"""The training backend `megatron` on gloo ranks without Ray: updates of a plain PyTorch loop, however ranks divide it.

All layouts of as many ranks run in the same processes: importing Megatron-Core takes most of a short run's time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from megatron_installed import FOLDER, INSTALLED
from rank_specs import cpu_rank
from test_tensor_parallel import Case, objective_of, shards
from test_training_fsdp2 import (
    OPTIMIZER,
    Weights,
    close,
    largest_difference,
    learn,
    plain_loop,
    share_of,
    weights_of,
)
from tiny_families import ALTERNATING, COMMON, FAMILIES, make_family
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.check.plan import training_states
from roll_like.cluster.address import free_port
from roll_like.config.model import ModelConfig
from roll_like.config.training import CriticConfig, TrainingConfig
from roll_like.models.card import ModelCard
from roll_like.models.checkpoint_names import converted
from roll_like.models.modules import persistent_buffers
from roll_like.models.shape import load_model_shape
from roll_like.models.stored import stored_tensors
from roll_like.run.export import merged_weights
from roll_like.training.interface import RankSpec, Share
from roll_like.training.rank import TrainingRank
from roll_like.values import reduce

#: For all layouts one after the other. Seconds.
TIMEOUT = 800
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT), INSTALLED]
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
TIED = {"tie_word_embeddings": True, "vocab_size": 401}  # ranks do not divide it evenly
Options = dict[str, Any]
Reports = list[dict[str, float]]
#: By number of ranks: name, family, settings.
CASES: dict[int, list[tuple[str, str, Options]]] = {
    2: [
        ("data", "qwen3", {}),
        ("data, whole optimizer", "llama", {"zero_stage": 0}),
        ("tensor", "qwen3", {"tensor_parallel": 2}),
        ("tensor, tied", "qwen2_tied", {"tensor_parallel": 2, "gradient_checkpointing": True}),
        ("pipeline", "qwen3", {"pipeline_parallel": 2}),
        ("pipeline, tied", "qwen2_tied", {"pipeline_parallel": 2, "gradient_checkpointing": True, "zero_stage": 0}),
        ("interleaved", "qwen3", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("tokens", "qwen3", {"sequence_parallel": 2}),
        ("experts", "qwen3_moe", {"expert_parallel": 2}),
        ("tensor and experts", "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("within experts", "qwen3_moe", {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
        ("latent, tensor", "deepseek_v3", {"tensor_parallel": 2}),
        ("latent, tensor and within experts", "deepseek_v3", {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
        ("latent, pipeline", "deepseek_v3", {"pipeline_parallel": 2, "gradient_checkpointing": True}),
        ("latent, interleaved", "deepseek_v3", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("uneven stages", "uneven", {"pipeline_parallel": 2}),
        ("uneven interleaved stages", "uneven", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("latent, experts", "deepseek_v3", {"expert_parallel": 2}),
        ("latent, tokens", "deepseek_v3", {"sequence_parallel": 2}),
        ("sinks, tensor", "gpt_oss", {"tensor_parallel": 2}),
        ("sinks, pipeline", "gpt_oss", {"pipeline_parallel": 2, "gradient_checkpointing": True}),
        ("sinks, experts", "gpt_oss", {"expert_parallel": 2}),
        ("sinks, tensor and experts", "gpt_oss", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("sinks, tokens", "gpt_oss", {"sequence_parallel": 2}),
        ("part of a head turned", "glm4_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("latent, without narrow queries", "deepseek_v2", {"tensor_parallel": 2}),
        ("windows", "mistral_window", {"tensor_parallel": 2}),
        ("mixtral", "mixtral", {"expert_parallel": 2}),
        ("biases", "llama_biased", {"tensor_parallel": 2}),
        ("some layers with experts", "qwen3_moe_mixed", {"pipeline_parallel": 2}),
    ],
    4: [
        ("all", "qwen3_moe", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
        ("tensor and tokens", "qwen3", {"tensor_parallel": 2, "sequence_parallel": 2}),
        ("pipeline and data", "qwen3", {"pipeline_parallel": 2, "gradient_checkpointing": True}),
        ("latent, all", "deepseek_v3", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
        ("sinks, all", "gpt_oss", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
    ],
}
#: Those that write a Hugging Face directory after the last step.
EXPORTED = ("all", "latent, all", "sinks, all")
NAMES = [(ranks, name) for ranks, cases in CASES.items() for name, *_ in cases]


def start(rank: int, ranks: int, address: Any, model: str, options: Options) -> TrainingRank:
    import roll_like.training.megatron  # noqa: F401

    dtype, options = options.get("dtype", "float32"), {key: options[key] for key in options if key != "dtype"}
    settings = TrainingConfig(
        **{"backend": "megatron", "workers": ranks, "zero_stage": 1, "max_tokens_per_micro_batch": 64, **options},
        optimizer=OPTIMIZER,
    )
    assert not list(settings.violations("training", "cpu"))
    spec: RankSpec[Any] = cpu_rank(SupervisedObjective(settings=settings, packing=True), model, dtype=dtype)
    trainer = TrainingRank(spec, rank, ranks)
    trainer.start(address)
    return trainer


def train(
    rank: int, ranks: int, address: Any, model: str, options: Options, exported: Path | None = None
) -> tuple[Reports, Weights]:
    """Three steps; before the third one that is not finite, and all states in host memory."""
    trainer = start(rank, ranks, address, model, options)
    reports = [learn(trainer, 0), learn(trainer, 1)]
    share, backend = share_of(trainer, 2), trainer._backend
    backend.forward_backward(
        share.batches, lambda batch: trainer._objective.loss(trainer._model, batch, share.shared)[0] * math.nan
    )
    assert not math.isfinite(backend.optimizer_step(1.0))
    for state in ("optimizer", "weights"):
        trainer.offload(state)  # type: ignore[arg-type]
    assert not any(each.untyped_storage().nbytes() for each in trainer._backend.tensors("weights") if each.numel() > 32)
    for state in ("weights", "optimizer"):
        trainer.reload(state)  # type: ignore[arg-type]
    reports.append(learn(trainer, 2))
    found = weights_of(trainer)
    if exported is not None:
        card = ModelCard(name="tiny", base_model=model, pipeline="sft", steps=3)
        trainer.export(str(exported), ModelConfig(path=model), card)
    trainer.close()
    return reports, found


def train_all(
    rank: int, ranks: int, _: Any, cases: Sequence[tuple[str, Any, str, Options, Path | None]]
) -> dict[str, tuple[Reports, Weights]]:
    sys.path.append(str(FOLDER))
    return {name: train(rank, ranks, *rest) for name, *rest in cases}


#: Layouts whose memory is counted: ranks, family, precision, settings.
COUNTED: tuple[tuple[int, str, str, Options], ...] = (
    (2, "qwen3", "bfloat16", {"zero_stage": 0}),
    (2, "qwen3", "bfloat16", {"tensor_parallel": 2}),
    (2, "qwen2_tied", "bfloat16", {"pipeline_parallel": 2}),
    (2, "qwen3", "float32", {"pipeline_parallel": 2}),
    (2, "qwen3_moe", "bfloat16", {"expert_parallel": 2}),
    (2, "qwen3_moe", "bfloat16", {"tensor_parallel": 2, "expert_parallel": 2}),
    (4, "qwen3_moe", "bfloat16", {"tensor_parallel": 2, "expert_parallel": 4}),
    (4, "qwen3_moe", "bfloat16", {"pipeline_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 2}),
    (4, "qwen3_moe", "float32", {"pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": 2}),
)


def held(rank: int, ranks: int, _: Any, cases: Sequence[Any]) -> list[tuple[int, int]]:
    """Bytes of weights, and of gradients and optimizer, of this rank after a step."""
    sys.path.append(str(FOLDER))
    found = []
    for address, model, dtype, options in cases:
        trainer = start(rank, ranks, address, model, options | {"dtype": dtype})
        learn(trainer, 0)
        of_weights, of_all = (
            {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for part in parts for each in part}
            for parts in (
                [trainer._backend.tensors("weights")],
                [trainer._backend.tensors("weights"), trainer._backend.tensors("optimizer")],
            )
        )
        found.append((sum(of_weights.values()), sum(of_all.values()) - sum(of_weights.values())))
        trainer.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_what_the_plan_says(ranks: int, models: dict[str, Path]) -> None:
    cases = [rest for count, *rest in COUNTED if count == ranks]
    given = [(("127.0.0.1", free_port()), str(models[kind]), dtype, options) for kind, dtype, options in cases]
    for rank, counts in enumerate(on_ranks(held, given, ranks=ranks, timeout=TIMEOUT)):
        for (kind, dtype, options), (weights, others) in zip(cases, counts, strict=True):
            settings = TrainingConfig(**{"backend": "megatron", "workers": ranks, "zero_stage": 1, **options})
            shape = load_model_shape(models[kind])
            stage = rank % settings.sharing // (settings.tensor_parallel * settings.sequence_parallel)
            width = 4 if dtype == "float32" else 2
            planned = training_states(settings, shape, shape.parameters, width, stage=stage)
            case = (rank, kind, options)
            assert weights == pytest.approx(planned.weights, rel=0.01), case
            assert others == pytest.approx(planned.gradients + planned.optimizer, rel=0.01), case


HALF: Options = {"dtype": "bfloat16", "zero_stage": 0}
#: What saves after two steps, and what takes the third; `dtype` is "float32" where they do not say.
RESUMED: dict[str, tuple[str, Options, Options]] = {
    "tensor to pipeline": ("qwen3", {"tensor_parallel": 2}, {"pipeline_parallel": 2}),
    "data to tensor, tied": ("qwen2_tied", {}, {"tensor_parallel": 2}),
    "whole optimizer": ("qwen3", {"pipeline_parallel": 2, "zero_stage": 0}, {"tensor_parallel": 2, "zero_stage": 0}),
    "interleaved to data": ("qwen3", {"pipeline_parallel": 2, "virtual_pipeline": 2}, {}),
    "experts": ("qwen3_moe", {"expert_parallel": 2}, {"expert_parallel": 2, "tensor_parallel": 2}),
    "latent": ("deepseek_v3", {"tensor_parallel": 2}, {"expert_parallel": 2}),
    "sinks": ("gpt_oss", {"expert_parallel": 2}, {"tensor_parallel": 2}),
    "uneven": ("uneven", {"pipeline_parallel": 2}, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "experts to tensor": ("qwen3_moe", {"expert_parallel": 2}, {"tensor_parallel": 2}),
    "data to experts": ("qwen3_moe", {}, {"expert_parallel": 2}),
    "experts to pipeline, whole optimizer": (
        "qwen3_moe",
        {"expert_parallel": 2, "zero_stage": 0},
        {"pipeline_parallel": 2, "zero_stage": 0},
    ),
    "whole optimizer, bfloat16": ("qwen3", HALF | {"tensor_parallel": 2}, HALF | {"tensor_parallel": 2}),
    "experts, whole optimizer, bfloat16": ("qwen3_moe", HALF | {"expert_parallel": 2}, HALF | {"expert_parallel": 2}),
    "experts to pipeline, whole optimizer, bfloat16": (
        "qwen3_moe",
        HALF | {"expert_parallel": 2},
        HALF | {"pipeline_parallel": 2},
    ),
}


def resume(
    rank: int, ranks: int, addresses: Any, model: str, folder: str, before: Options, after: Options
) -> tuple[Reports, Weights, Weights, Weights]:
    """Two steps, a checkpoint, and a third step of ranks with other sizes.

    The weights of the checkpoint are third; last are those of a third step of the ranks that saved.
    """
    trainer = start(rank, ranks, addresses[0], model, before)
    reports = [learn(trainer, 0), learn(trainer, 1)]
    trainer.save(folder)
    saved = {name: each.detach().clone() for name, each in trainer._parameters()}
    learn(trainer, 2)
    went_on = weights_of(trainer)
    trainer.close()
    trainer = start(rank, ranks, addresses[1], model, after)
    trainer.load(folder)
    assert trainer.updates == 2
    reports.append(learn(trainer, 2))
    found = weights_of(trainer)
    trainer.close()
    return reports, found, saved, went_on


def resume_all(rank: int, ranks: int, _: Any, cases: Sequence[Any]) -> dict[str, Any]:
    sys.path.append(str(FOLDER))
    return {name: resume(rank, ranks, *rest) for name, *rest in cases}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHAPE.items():
            patch.setitem(COMMON, name, value)
        patch.setitem(FAMILIES["gpt_oss"][2], "layer_types", ALTERNATING * 2)
        for family in ("gpt_oss", "mistral_window"):  # shorter than the samples
            patch.setitem(FAMILIES[family][2], "sliding_window", 9)
        kinds = {kind for cases in CASES.values() for _, kind, _ in cases} | {kind for kind, *_ in RESUMED.values()}
        for family in sorted(kinds - {"qwen2_tied", "uneven"}):
            made[family] = make_family(family, tmp_path_factory.mktemp(family))
        with pytest.MonkeyPatch.context() as changed:
            changed.setitem(COMMON, "num_hidden_layers", 5)
            made["uneven"] = make_family("deepseek_v3", tmp_path_factory.mktemp("uneven"))
        for name, value in TIED.items():
            patch.setitem(COMMON, name, value)
        made["qwen2_tied"] = make_family("qwen2", tmp_path_factory.mktemp("qwen2"))
    return made


def exported_folder(model: Path) -> Path:
    return model.with_name(f"{model.name}-exported")


@pytest.fixture(scope="module")
def trained(models: dict[str, Path]) -> dict[tuple[int, str], list[tuple[Reports, Weights]]]:
    found = {}
    for ranks, cases in CASES.items():
        given = [
            (
                name,
                ("127.0.0.1", free_port()),
                str(models[kind]),
                options,
                exported_folder(models[kind]) if name in EXPORTED else None,
            )
            for name, kind, options in cases
        ]
        by_rank = on_ranks(train_all, given, ranks=ranks, timeout=TIMEOUT)
        found.update({(ranks, name): [each[name] for each in by_rank] for name, *_ in cases})
    return found


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, tuple[list[float], list[float], Weights]]:
    return {kind: plain_loop(path) for kind, path in models.items()}


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_updates_are_those_of_a_plain_loop(
    ranks: int, name: str, trained: dict[Any, Any], expected: dict[str, Any]
) -> None:
    (kind, options) = next(rest for case, *rest in CASES[ranks] if case == name)
    losses, norms, weights = expected[kind]
    settings = TrainingConfig(backend="megatron", workers=ranks, **options)
    results = trained[ranks, name]
    models = results[:: settings.sharing]
    summed = [
        sum(step["train/loss"] for step in steps) for steps in zip(*(reports for reports, _ in models), strict=True)
    ]
    assert close(summed, losses)
    for place, (reports, found) in enumerate(results):
        assert close([step["train/grad_norm"] for step in reports], norms)
        assert largest_difference(found, weights) < 1e-5
        # ranks of one model say the same
        own = models[place // settings.sharing][0]
        assert [step["train/loss"] for step in reports] == [step["train/loss"] for step in own]


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_what_was_trained_is_exported_as_the_base_was_stored(
    kind: str, models: dict[str, Path], expected: dict[str, Any]
) -> None:
    folder = exported_folder(models[kind])
    found, base = (
        {name: (each.dtype, each.shape) for name, each in stored_tensors(path).items()}
        for path in (folder, models[kind])
    )
    assert found == base
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = converted(loaded, [*loaded.requires_grad_(False).named_parameters(), *persistent_buffers(loaded)])
    assert largest_difference(dict(tensors), expected[kind][2]) < 1e-5


def test_a_checkpoint_is_taken_by_ranks_with_other_sizes(
    tmp_path: Path, models: dict[str, Path], expected: dict[str, Any]
) -> None:
    cases = []
    for name, (kind, before, after) in RESUMED.items():
        folder = tmp_path / name
        folder.mkdir()
        addresses = [("127.0.0.1", free_port()) for _ in range(2)]
        cases.append((name, addresses, str(models[kind]), str(folder), before, after))
    for found in on_ranks(resume_all, cases, timeout=TIMEOUT):
        for name, (reports, weights, saved, went_on) in found.items():
            kind, before, after = RESUMED[name]
            if before.get("dtype") == "bfloat16":  # the plain loop's numbers are others
                assert largest_difference(weights, went_on) <= (0.0 if before == after else 2e-3), name
            else:
                _, norms, wanted = expected[kind]
                assert close([step["train/grad_norm"] for step in reports], norms), name
                assert largest_difference(weights, wanted) < 1e-5, name
            merged = merged_weights(tmp_path / name, "megatron")  # as `roll-like export` does
            assert merged.keys() == {key for key in saved if not key.endswith("correction_bias")}, name  # a buffer
            assert all(torch.equal(each, saved[key]) for key, each in merged.items()), name


#: What other objectives learn from, on models with two layers.
OBJECTIVES = (
    Case("llama", kind="policy"),
    Case("qwen3", kind="critic"),
    Case("llama", kind="reward model"),
    Case("qwen2", kind="distill"),
    Case("qwen3", kind="distill top-k"),
    Case("llama", kind="taught"),
    Case("qwen3_moe", (("gradient_checkpointing", True),), kind="routes"),
    Case("deepseek_v3", kind="routes"),
    Case("gpt_oss", kind="policy"),
)
#: What depends on how rows are laid out, and a share of values that is decided by a sum's last bit.
LAID_OUT = ("train/computed_tokens", "train/padding_tokens", "train/padding_fraction", "critic/clip_fraction", "time/")


def objectives(
    rank: int, ranks: int, _: Any, models: Path, addresses: Sequence[Any], options: Options
) -> list[tuple[Reports, Weights]]:
    """Three updates of each objective, with a checkpoint in between."""
    sys.path.append(str(FOLDER))
    results = []
    for case, address in zip(OBJECTIVES, addresses, strict=True):
        section = (CriticConfig if case.kind == "critic" else TrainingConfig)(
            **{"workers": ranks, "max_tokens_per_micro_batch": 64, **dict(case.settings), **options},
            optimizer=OPTIMIZER,
        )
        trainer = TrainingRank(cpu_rank(objective_of(case, section), str(models / case.family)), rank, ranks)
        trainer.start(address)
        reports = []
        for seed in range(3):
            batches, shared = shards(trainer, case, seed)
            report = trainer.forward_backward(Share(batches=batches, shared=shared))
            found = reduce({**report, **trainer.optimizer_step()})
            reports.append({name: each for name, each in found.items() if not name.startswith(LAID_OUT)})
            if seed == 1:
                folder = models / f"{case.kind} {options['backend']}"
                folder.mkdir(exist_ok=True)
                trainer.save(str(folder))
                trainer.load(str(folder))
        results.append((reports, {name: each.detach().clone() for name, each in trainer._parameters()}))
        trainer.close()
    return results


@pytest.mark.parametrize("divided", ["tensor", "pipeline"])
def test_every_objective_learns_what_it_learns_with_fsdp2(tmp_path: Path, divided: str) -> None:
    for case in OBJECTIVES:
        make_family(case.family, tmp_path / case.family)

    def learned(ranks: int, options: Options) -> list[Any]:
        addresses = [("127.0.0.1", free_port()) for _ in OBJECTIVES]
        return on_ranks(objectives, tmp_path, addresses, options, ranks=ranks, timeout=TIMEOUT)

    (expected,) = learned(1, {"backend": "fsdp2", "zero_stage": 3})
    for found in learned(2, {"backend": "megatron", "zero_stage": 1, f"{divided}_parallel": 2}):
        for case, (reports, weights), (wanted, whole) in zip(OBJECTIVES, found, expected, strict=True):
            for report, want in zip(reports, wanted, strict=True):
                assert report.keys() == want.keys(), case
                if case.kind != "routes":  # the disagreement is that of a stage's layers
                    assert report == pytest.approx(want, rel=1e-3, abs=1e-5), case
            assert largest_difference(weights, whole) < 1e-5, case
