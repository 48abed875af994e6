"""A training backend of one's own behind the engine's verbs, chosen by name as a plugin's is."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bigram_engine import OneRank
from config_files import MINIMAL, changed, planned
from model_families import UNDIVIDED, make_family
from plain_backend import PlainBackend, plain_ranks  # type: ignore[import-not-found]
from pydantic import ValidationError
from rank_specs import cpu_rank
from safetensors.torch import load_file, save_file
from test_training_skipped import spoil
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from torch import Tensor
from trained_weights import trained_weights

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.cluster.progress import Work
from roll_like.config.model import ModelConfig
from roll_like.config.training import TrainingConfig
from roll_like.errors import CheckpointError, ConfigError, EngineError
from roll_like.models.card import ModelCard
from roll_like.models.identity import identity_of, same_model
from roll_like.registry import TRAINING_BACKENDS
from roll_like.run.export import merged_weights
from roll_like.training.backend import LazyTensors, TrainingBackend
from roll_like.training.deepspeed import without
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.training.start import trainer_environment
from roll_like.values import reduce


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from plain_ranks(monkeypatch)


def engine(model: Path, *, frozen: bool = False, packing: bool = True, **training: Any) -> TrainingEngine[Any]:
    settings = TrainingConfig(backend="plain", optimizer={"lr": 1e-2, "schedule": "linear"}, **training)
    spec = cpu_rank(SupervisedObjective(settings=settings, packing=packing), model, frozen=frozen)
    rank = TrainingRank(spec, 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = OneRank(rank)
    return TrainingEngine(cluster, spec.objective, joined=rank.joins_rows())


def weights(trainer: TrainingEngine[Any]) -> dict[str, Any]:
    return trained_weights(trainer.cluster)


def test_ranks_keep_masks_from_cudnn(tiny_model: Path) -> None:
    """Its gradients with a mask can be NaN, and torch takes it by itself on an H100."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    engine(tiny_model)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_ranks_forget_the_launcher_of_the_driver(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed compares its local rank with mpirun's, and torch takes a store of torchrun's for its own."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "TORCHELASTIC_USE_AGENT_STORE", "RANK"):
        monkeypatch.setenv(name, "3")
    engine(tiny_model)
    assert [name for name in os.environ if name.startswith(("OMPI_COMM", "PMI_", "TORCHELASTIC_"))] == []
    assert os.environ["RANK"] == "0"


def test_a_second_backend_stands_behind_the_same_verbs(tiny_model: Path, tmp_path: Path) -> None:
    samples = ragged_policy_samples()
    trainer = engine(tiny_model, max_tokens_per_micro_batch=48)
    first, second = (reduce(trainer.train_step(samples)) for _ in range(2))
    assert second["train/loss"] < first["train/loss"]
    assert second["throughput/trainer_tflops"] > 0
    assert "util/trainer_mfu" not in second  # no peak rate of a CPU is documented
    assert (first["train/lr"], second["train/lr"]) == pytest.approx((1e-2, 0.9e-2))
    trainer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pt", "rank_0.pt"]
    rank: TrainingRank = trainer.cluster.worker  # type: ignore[attr-defined]
    size = sum(4 * parameter.numel() for parameter in rank._backend.module.parameters())
    for state, times in (("weights", 1), ("optimizer", 2)):  # weights, and two moments of them
        trainer.offload(state)
        assert rank._host[state].bytes == pytest.approx(times * size, rel=0.01)
    for state in ("optimizer", "weights"):
        trainer.reload(state)
    third = reduce(trainer.train_step(samples))
    expected = weights(trainer)

    resumed = engine(tiny_model, max_tokens_per_micro_batch=48)
    resumed.load(tmp_path)
    again = reduce(resumed.train_step(samples))
    assert {name: again[name] for name in third if name.startswith("train/")} == {
        name: figure for name, figure in third.items() if name.startswith("train/")
    }
    assert all(np.array_equal(weights(resumed)[name], array) for name, array in expected.items())
    card = ModelCard(name="tiny", base_model=str(tiny_model), pipeline="sft", steps=3)
    resumed.cluster.everywhere(TrainingRank.export, str(tmp_path / "out"), ModelConfig(path=str(tiny_model)), card)
    exported = engine(tmp_path / "out", frozen=True)
    for mine, theirs in zip(resumed.logprobs(samples), exported.logprobs(samples), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    resumed.cluster.everywhere(TrainingRank.close)


def test_updates_that_are_computed_again_or_skipped_leave_no_trace(tiny_model: Path) -> None:
    """Dropout draws anew in each update: the same masks again where an update is computed again, or was skipped."""
    first, second, third = (ragged_policy_samples(seed=seed) for seed in range(3))
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 48, "lora": {"rank": 4, "dropout": 0.3}}
    trainer = engine(tiny_model, **options)
    reports = [reduce(trainer.train_step(samples)) for samples in (first, third)]
    expected = weights(trainer)
    trainer = engine(tiny_model, **options)
    spoil(trainer.cluster.worker._backend, 0, 2, 3)  # type: ignore[attr-defined]
    recomputed, skipped, last = (reduce(trainer.train_step(samples)) for samples in (first, second, third))
    assert (recomputed["train/recomputed_updates"], skipped["train/skipped_updates"]) == (1, 1)
    for mine, theirs in zip((recomputed, last), reports, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert mine[name] == theirs[name]
    assert all(torch.equal(weights(trainer)[name], tensor) for name, tensor in expected.items())


def test_the_watchdog_sees_what_a_rank_does(
    tiny_model: Path, tmp_path: Path, progress: list[tuple[str, str, Work]]
) -> None:
    trainer = engine(tiny_model, max_tokens_per_micro_batch=48)
    assert progress == [("begin", "start", Work.SHARED)]
    samples = ragged_policy_samples()
    ((update,),) = [list(trainer.objective.updates(samples, trainer))]
    (batches,) = update.shards
    assert len(batches) > 2
    each = [("tick", "forward_backward", Work.SHARED)] * len(batches)
    verbs: list[tuple[Callable[[], Any], list[Any]]] = [
        (lambda: trainer.forward_backward(update), [("begin", "forward_backward", Work.SHARED), *each]),
        (trainer.optimizer_step, [("begin", "optimizer_step", Work.SHARED)]),
        (lambda: trainer.save(tmp_path), [("begin", "save", Work.SHARED), ("tick", "save", Work.SHARED)]),
        (lambda: trainer.load(tmp_path), [("begin", "load", Work.SHARED)]),
        (
            lambda: trainer.evaluate(update),
            [("begin", "evaluate", Work.SHARED), *[("tick", "evaluate", Work.SHARED)] * len(batches)],
        ),
        (
            lambda: trainer.forward(update.shards),
            [("begin", "forward", Work.SHARED), *[("tick", "forward", Work.SHARED)] * len(batches)],
        ),
    ]
    for verb, expected in verbs:
        progress.clear()
        verb()
        assert progress == expected
    progress.clear()
    tensors = list(trainer.cluster.worker.full_weights())  # type: ignore[attr-defined]
    assert progress == [("tick", "", Work.NONE)] * len(tensors)
    progress.clear()
    card = ModelCard(name="tiny", base_model=str(tiny_model), pipeline="sft", steps=3)
    trainer.cluster.everywhere(TrainingRank.export, str(tmp_path / "out"), ModelConfig(path=str(tiny_model)), card)
    assert progress == [("begin", "export", Work.SHARED)] + [("tick", "export", Work.SHARED)] * len(tensors)


def test_updates_do_not_depend_on_the_token_budget(tiny_model: Path) -> None:
    found = []
    for budget in (40, 4096):
        trainer = engine(tiny_model, max_tokens_per_micro_batch=budget)
        trainer.train_step(ragged_policy_samples())
        found.append(weights(trainer))
    assert all((found[0][name] - found[1][name]).abs().max() < 1e-4 for name in found[0])


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_joined_rows_are_trained_as_masked_ones_are(tiny_model: Path, options: dict[str, Any]) -> None:
    samples, reports, found = ragged_policy_samples(), [], []
    for attention in ("dense", "varlen"):
        trainer = engine(tiny_model, packing=False, attention=attention, max_tokens_per_micro_batch=128, **options)
        reports.append(reduce(trainer.train_step(samples)))
        found.append(trainer.logprobs(samples))
    masked, joined = reports
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert joined[name] == pytest.approx(masked[name], rel=1e-5)
    assert max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(*found, strict=True)) < 1e-3
    assert masked["train/padding_fraction"] > 0
    assert joined["train/padding_fraction"] == 0
    assert joined["train/computed_tokens"] < masked["train/computed_tokens"]


def test_a_model_with_a_state_starts_without_packing_only(tmp_path: Path) -> None:
    make_family(UNDIVIDED).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"data.packing puts several samples into one row") as caught:
        engine(tmp_path)
    assert caught.value.fix == "set data.packing: false"
    trainer = engine(tmp_path, packing=False)
    samples = [replace(sample, token_ids=sample.token_ids % 64) for sample in ragged_policy_samples()]
    for sample, mine in zip(samples, trainer.logprobs(samples), strict=True):
        tokens = torch.from_numpy(sample.token_ids).long()[None]
        expected = make_family(UNDIVIDED)(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        np.testing.assert_allclose(mine[1:], expected.detach().numpy() * sample.loss_mask[1:], atol=1e-4)


def test_an_unknown_backend_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown training backend 'depspeed'; did you mean 'deepspeed'"):
        TrainingConfig(backend="depspeed")
    assert TrainingConfig().backend == "deepspeed"
    assert TrainingConfig(backend="plain").frozen(workers=1, max_tokens_per_micro_batch=8).backend == "plain"


def test_rules_of_a_backend_are_its_own() -> None:
    wrong = changed(MINIMAL, training={"backend": "plain", "workers": 2, "offload": "optimizer"})
    with pytest.raises(ValidationError) as caught:
        RLVRConfig.from_values(wrong)
    found = [(".".join(map(str, error["loc"])), error["msg"]) for error in caught.value.errors()]
    assert ("training.workers", "plain PyTorch has one rank; set it to 1") in found
    # on CPU no backend can offload; that ZeRO must shard what is offloaded is DeepSpeed's rule
    (offload,) = (message for key, message in found if key == "training.offload")
    assert "resources.device is cpu" in offload


class Sizes:
    parameters, embedding_parameters, layers, layer_parameters, expert_parameters = 1000, 100, 9, 100, 0
    adapted_width = critic_adapted_width = 0
    quantized_parameters = critic_quantized_parameters = 0
    dense_layers = dense_layer_parameters = undivided_parameters = 0

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        return bytes_per_value


def test_memory_is_divided_as_the_backend_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainBackend, "violations", TrainingBackend.violations)

    def parts(backend: str) -> dict[str, int]:
        training = {"backend": backend, "workers": 2, "zero_stage": 3}
        memory = planned(RLVRConfig.from_values(changed(MINIMAL, training=training)), Sizes()).memory
        return dict(next(line for line in memory if line.role == "training").parts)

    whole = parts("plain")
    assert (whole["weights"], whole["gradients"], whole["optimizer"]) == (2 * 1000, 2 * 1000, 12 * 1000)
    fsdp2, deepspeed = parts("fsdp2"), parts("deepspeed")
    assert (fsdp2["weights"], fsdp2["gradients"], fsdp2["optimizer"]) == (4 * 500, 4 * 500, 8 * 500)
    assert (deepspeed["weights"], deepspeed["optimizer"]) == (2 * 500, 12 * 500)
    assert deepspeed["gradients"] == 4 * 500, "DeepSpeed sums in float32"


@pytest.mark.parametrize(
    ("training", "workers", "sharded"),
    [
        ({"backend": "deepspeed", "zero_stage": 3}, 2, True),
        ({"backend": "fsdp2", "zero_stage": 3}, 2, True),
        ({"backend": "fsdp2", "zero_stage": 3}, 1, False),
        ({"backend": "deepspeed", "zero_stage": 2}, 2, False),
    ],
)
def test_frozen_models_are_sharded_where_the_trained_one_is(
    training: dict[str, Any], workers: int, sharded: bool
) -> None:
    frozen = TrainingConfig(**training).frozen(workers=workers, max_tokens_per_micro_batch=8)
    backend = TRAINING_BACKENDS.get(frozen.backend)(frozen, dtype="float32", device="cpu", world_size=workers)
    assert backend.sharded is sharded
    settings = changed(
        MINIMAL,
        training={"workers": 2, **training},
        reference={"workers": workers},
        algorithm__kl={"use": "loss", "coefficient": 0.1},
        model__dtype="bfloat16",
    )
    memory = planned(RLVRConfig.from_values(settings), Sizes()).memory
    parts = dict(next(line for line in memory if line.role == "reference").parts)
    assert parts["weights"] == 2 * 1000 // (workers if sharded else 1)


def test_what_fsdp2_cannot_do_is_refused() -> None:
    wrong = TrainingConfig(backend="fsdp2", zero_stage=2, offload="optimizer")
    stage, offload = TRAINING_BACKENDS.get("fsdp2").violations(wrong)
    assert stage.path == ("zero_stage",)
    assert "zero_stage: 3; found zero_stage: 2" in stage.message
    assert offload.path == ("offload",)
    with pytest.raises(ConfigError, match="fsdp2 does not scale losses") as caught:
        TRAINING_BACKENDS.get("fsdp2")(wrong, dtype="float16", device="cpu", world_size=1)
    assert "model.dtype: bfloat16" in str(caught.value.fix)


@pytest.mark.parametrize(("backend", "own"), [("plain", {}), ("fsdp2", {}), ("deepspeed", {"DS_ACCELERATOR": "cuda"})])
def test_ranks_start_with_what_the_backend_needs(backend: str, own: dict[str, str]) -> None:
    placement: Any = None  # matters on CPU only
    environment = trainer_environment(placement, TrainingConfig(backend=backend), "cuda")
    assert environment == {"TOKENIZERS_PARALLELISM": "false", **own}


def test_a_failed_start_names_the_keys_of_the_backend(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: PlainBackend) -> None:
        raise RuntimeError("no other rank came")

    monkeypatch.setattr(PlainBackend, "join", fails)
    with pytest.raises(EngineError, match="rank 0: RuntimeError: no other rank came") as caught:
        engine(tiny_model)
    assert caught.value.fix == "check model.path, model.dtype and training.optimizer"


def test_a_failed_start_gives_the_advice_of_its_cause(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not start on rank 0: no causal language model") as caught:
        engine(tmp_path / "nothing")
    assert caught.value.fix == "set model.path to a directory with config.json, *.safetensors and a tokenizer"


def test_adapters_are_not_loaded_beside_another_base(tiny_model: Path, tmp_path: Path) -> None:
    engine(tiny_model, lora={"rank": 2}).save(tmp_path)
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    engine(moved, lora={"rank": 2}).load(tmp_path)
    weights = load_file(moved / "model.safetensors")
    name = min(weights)
    save_file({**weights, name: weights[name] * 2}, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"beside another base model: its fingerprint was \S+, and that of"
    ) as caught:
        engine(moved, lora={"rank": 2}).load(tmp_path)
    assert "set model.path and model.revision to those of the run" in str(caught.value.fix)


def test_the_same_tensors_are_the_same_model_in_whatever_files(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    for folder, *files in (("whole", "abc"), ("parts", "c", "ab"), ("other", "ab")):
        (tmp_path / folder).mkdir()
        for index, names in enumerate(files):
            save_file({name: tensors[name] for name in names}, tmp_path / folder / f"{index}.safetensors")
    whole, parts, other = (identity_of(tmp_path / folder) for folder in ("whole", "parts", "other"))
    assert whole == parts != other


@pytest.mark.parametrize(("written", "same"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_a_model_in_another_precision_is_the_same_and_one_with_other_numbers_is_not(
    tmp_path: Path, written: torch.dtype, same: bool
) -> None:
    numbers = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    found = []
    for folder, tensor in (
        ("a", numbers),
        ("b", numbers.to(written) * (1.0 if same else 1.5)),
        ("c", -numbers.to(written)),
    ):
        (tmp_path / folder).mkdir()
        save_file({"w": tensor}, tmp_path / folder / "0.safetensors")
        found.append(identity_of(tmp_path / folder))
    assert same_model(found[0], found[1]) == same
    assert not same_model(found[0], found[2])


def test_the_backend_merges_what_its_ranks_saved(tiny_model: Path, tmp_path: Path) -> None:
    trainer = engine(tiny_model)
    trainer.save(tmp_path)
    expected, merged = weights(trainer), merged_weights(tmp_path, "plain")
    assert expected.keys() <= merged.keys()
    assert all(np.array_equal(merged[name], array) for name, array in expected.items())
    with pytest.raises(CheckpointError, match="cannot be merged: FileNotFoundError"):
        merged_weights(tmp_path, "deepspeed")


def test_deepspeed_puts_parameters_together(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    for rank, weight in enumerate(torch.arange(6.0).split((4, 2))):
        parameters = {"causal_lm.head": {"start": 4 * rank, "shape": (2, 3), "weight": weight}}
        torch.save({"parameters": parameters}, tmp_path / "engine" / f"states_{rank}.pt")
    assert merged_weights(tmp_path, "deepspeed")["head"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_backend_that_cannot_merge_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "bare", TrainingBackend)
    with pytest.raises(CheckpointError, match="training backend 'bare' cannot merge the shards") as caught:
        merged_weights(tmp_path, "bare")
    assert "checkpoint.export: true" in str(caught.value.fix)


def test_a_gap_in_the_library_is_not_taken_for_a_backend_that_cannot_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merged(_: Path) -> dict[str, Tensor]:
        raise NotImplementedError("no kernel for this dtype")

    monkeypatch.setattr(TRAINING_BACKENDS.get("deepspeed"), "merged", merged)
    with pytest.raises(CheckpointError, match="cannot be merged: NotImplementedError: no kernel for this dtype"):
        merged_weights(tmp_path, "deepspeed")


def test_shards_are_read_when_a_parameter_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def reader(name: str) -> Callable[[], Tensor]:
        def one() -> Tensor:
            read.append(name)
            if name == "causal_lm.torn":
                raise RuntimeError("unexpected end of file")
            return torch.ones(3)

        return one

    names = ("causal_lm.a", "causal_lm.torn", "head.weight")
    shards = LazyTensors({name: reader(name) for name in names})
    monkeypatch.setattr(TRAINING_BACKENDS.get("deepspeed"), "merged", lambda _: shards)
    merged = merged_weights(tmp_path, "deepspeed")
    assert [*merged] == ["a", "torn"]
    assert read == []
    assert merged["a"].tolist() == [1, 1, 1]
    assert read == ["causal_lm.a"]
    with pytest.raises(CheckpointError, match="cannot be merged: RuntimeError: unexpected end of file"):
        dict(merged)


def test_an_optional_module_is_not_imported_by_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optional_module.py").write_text("")
    (tmp_path / "wants_it.py").write_text(
        "try:\n    import optional_module\nexcept ImportError:\n    optional_module = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with without("optional_module"):
        wants_it = importlib.import_module("wants_it")
    assert wants_it.optional_module is None
    imported = importlib.import_module("optional_module")  # afterwards it is there again
    with without("optional_module"):  # what others use stays
        assert importlib.import_module("optional_module") is imported
    del sys.modules["wants_it"], sys.modules["optional_module"]


@pytest.mark.parametrize("index", [0, 1])
def test_every_rank_walks_through_all_weights_also_where_an_export_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    def fails(weights: Iterator[Any], *arguments: Any, **options: Any) -> None:
        next(weights)
        raise CheckpointError("the disk is full")

    trainer = engine(tiny_model)
    rank: TrainingRank = trainer.cluster.worker  # type: ignore[attr-defined]
    rank.rank = index
    walked, parameters = [], rank._parameters

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in parameters():
            walked.append(name)
            yield name, tensor

    monkeypatch.setattr(rank, "_parameters", counted)
    monkeypatch.setattr("roll_like.training.rank.save_hf_directory", fails)
    card = ModelCard(name="tiny", base_model=str(tiny_model), pipeline="sft", steps=3)
    with pytest.raises(CheckpointError, match="the disk is full") if index == 0 else nullcontext():
        rank.export(str(tmp_path / "out"), ModelConfig(path=str(tiny_model)), card)
    assert walked == [name for name, _ in parameters()]
