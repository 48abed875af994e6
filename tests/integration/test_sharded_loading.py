"""Models that are sharded while they are loaded: what ranks hold, and that it computes the same."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from tiny_families import make_family
from tiny_model import make_tiny_model

from roll_like.builtin.pipelines.reward_model.config import RewardModelAlgorithmConfig
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.config.training import LoRAConfig, TrainingConfig
from roll_like.models.classifier import load_classifier
from roll_like.models.lora import add_adapters, named_weights
from roll_like.models.modules import load_causal_lm
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backend import COLLECTIVE_TIMEOUT
from roll_like.training.interface import RankSpec
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import micro_batches, per_sample
from roll_like.training.rank import TrainingRank
from roll_like.training.sequence_parallel import SequenceParallel

pytestmark = pytest.mark.integration
BACKENDS = ["deepspeed", "fsdp2"]
#: Of glibc's `mallopt`: from which size on memory is mapped, and given back when it is freed.
M_MMAP_THRESHOLD = -3
FROZEN, ADAPTERS, SCORES = "frozen", "adapters", "a reward model"


def rank_of(
    rank: int,
    ranks: int,
    model: Path,
    backend: str,
    *,
    frozen: bool,
    dtype: str = "float32",
    lora: LoRAConfig | None = None,
    scores: bool = False,
) -> TrainingRank:
    settings = TrainingConfig(backend=backend, workers=ranks, zero_stage=3, lora=lora)
    algorithm = RewardModelAlgorithmConfig()
    objective: Any = LanguageModelObjective(settings=settings)
    if scores:
        objective = RewardModelObjective(settings=settings, algorithm=algorithm, pad_token_id=0)
    spec: RankSpec[Any] = cpu_rank(objective, model, dtype=dtype, total_updates=1, frozen=frozen)
    return TrainingRank(spec, rank, ranks)


def own_memory() -> int:
    """Return the memory of this process that is no mapped file. Bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure how far this process's own memory rises: the last number of the list, at the end."""
    # freed tensors do not stay with the allocator, so that memory is what tensors hold
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
    start, found, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            found[0] = max(found[0], own_memory() - start)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        done.set()
        watching.join()


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def load_sharded(
    rank: int, ranks: int, address: Any, small: str, model: str, backend: str, frozen: bool
) -> dict[str, Any]:
    trainer = rank_of(rank, ranks, Path(model), backend, frozen=frozen)
    # what is imported is not measured
    import deepspeed  # noqa: F401

    load_causal_lm(Path(small), "float32")
    moved: list[int] = []
    move = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *to: moved.append(_size(module)) or move(module, *to)  # type: ignore[assignment, func-returns-value]
    with peak_memory() as peak:
        trainer.start(address)
    torch.nn.Module.to = move  # type: ignore[method-assign]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in trainer._backend.tensors("weights")}
    samples = ragged_policy_samples()
    layout = trainer._objective.layout(ranks)
    shards = micro_batches(samples, **layout)
    computed = trainer.forward(shards[rank])
    if frozen:
        trainer.offload("weights")
        assert all(not tensor.untyped_storage().nbytes() for tensor in trainer._backend.tensors("weights"))
        trainer.reload("weights")
        again = trainer.forward(shards[rank])
        assert all(np.array_equal(*pair) for pair in zip(computed, again, strict=True))
    found = {
        "held": sum(tensor.untyped_storage().nbytes() for tensor in storages.values()),
        "moved": max(moved, default=0),
        "peak": peak[0],
        "computed": computed,
    }
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("backend", "frozen"),
    [
        ("deepspeed", True),
        pytest.param("deepspeed", False, marks=pytest.mark.slow),
        pytest.param("fsdp2", True, marks=pytest.mark.slow),
        pytest.param("fsdp2", False, marks=pytest.mark.slow),
    ],
)
def test_each_of_two_ranks_loads_a_half(tmp_path: Path, backend: str, frozen: bool) -> None:
    small = make_tiny_model(tmp_path / "small", dtype="float32")
    model = make_tiny_model(tmp_path / "model", dtype="float32", width=1024, layers=6)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in plain.parameters())
    found = on_ranks(load_sharded, str(small), str(model), backend, frozen)
    samples = ragged_policy_samples()
    shards = micro_batches(samples, **LanguageModelObjective[Any, Any](settings=TrainingConfig()).layout(2))
    computed = per_sample(samples, shards, [each["computed"] for each in found])
    for sample, mine in zip(samples, computed, strict=True):
        ids = torch.from_numpy(sample.token_ids).long()[None]
        with torch.no_grad():
            logprobs = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected = np.concatenate([[0.0], logprobs.numpy()])
        np.testing.assert_allclose(mine, np.where(sample.loss_mask, expected, 0), atol=2e-5)
    for each in found:
        assert each["held"] == pytest.approx(size / 2, rel=0.02)
        assert each["moved"] == 0, "a whole model was moved to a device"
        if frozen:  # an optimizer adds its own
            assert each["peak"] < 0.75 * size, each["peak"] / size


def make_moe(kind: str, directory: Path) -> Path:
    """Write a random model whose memory is that of its experts: eight layers of 24 MiB in float32."""
    import transformers

    experts = {"mixtral": {"num_local_experts": 16}, "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 512}}
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=None,
        **experts[kind],
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def load_late(rank: int, ranks: int, address: Any, small: str, model: str, backend: str, what: str) -> dict[str, Any]:
    lora = LoRAConfig(rank=1) if what == ADAPTERS else None
    trainer = rank_of(rank, ranks, Path(model), backend, frozen=what == FROZEN, lora=lora, scores=what == SCORES)
    import deepspeed  # noqa: F401

    add_adapters(load_causal_lm(Path(small), "float32"), LoRAConfig(rank=1), seed=0)  # imports what it needs
    loaded: list[int] = []
    take = trainer.take
    trainer.take = lambda module: (loaded.append(peak[0]), take(module))[1]  # type: ignore[method-assign]
    with peak_memory() as peak:
        trainer.start(address)
    plain = (
        load_classifier(Path(model), "float32", seed=0) if what == SCORES else load_causal_lm(Path(model), "float32")
    )
    whole = dict(plain.named_parameters())
    weights = list(named_weights(trainer._objective.hf_model(trainer._backend.module)))
    other = sorted(whole.keys() ^ {weight.name for weight in weights})
    for weight in weights:
        with trainer._backend.gathered([weight.parameter]) as (found,):
            if not torch.equal(found, whole[weight.name]):
                other.append(weight.name)
    largest = max(parameter.nbytes for parameter in whole.values())
    size = sum(parameter.nbytes for parameter in whole.values())
    adapted = sum(weight.layer is not None for weight in weights)
    trainer.close()
    return {"loaded": loaded[0], "peak": peak[0], "other": other, "largest": largest, "size": size, "adapted": adapted}


@pytest.mark.parametrize(
    ("kind", "backend", "what"),
    [
        ("qwen3_moe", "fsdp2", FROZEN),
        *(
            pytest.param(kind, backend, what, marks=pytest.mark.slow)
            for kind in ("qwen3_moe", "mixtral", "another precision")
            for backend in BACKENDS
            for what in (FROZEN, "trained", ADAPTERS, SCORES)
            if (kind, backend, what) != ("qwen3_moe", "fsdp2", FROZEN)
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_files_are_read_one_after_another(
    tmp_path: Path, kind: str, backend: str, what: str
) -> None:
    """Experts that transformers fuses; a bfloat16 checkpoint in float32; also beside adapters, and for scores."""
    small = make_tiny_model(tmp_path / "small", dtype="float32")
    if kind == "another precision":
        model = make_tiny_model(tmp_path / "model", dtype="bfloat16", width=1024, layers=8)
    else:
        model = make_moe(kind, tmp_path / "model")
    for each in on_ranks(load_late, str(small), str(model), backend, what):
        shown = {name: round(each[name] / 2**20) for name in ("loaded", "peak", "largest", "size")}
        assert not each["other"]
        assert (each["adapted"] > 0) == (what == ADAPTERS)
        assert each["loaded"] < 5 * each["largest"] < each["size"] / 2, shown
        if what == FROZEN:  # an optimizer adds its own
            assert each["peak"] < each["size"] / 2 + 4 * each["largest"], shown


def time_outs(rank: int, ranks: int, address: Any, model: str, backend: str) -> dict[str, float]:
    trainer = rank_of(rank, ranks, Path(model), backend, frozen=False)
    trainer.start(address)
    SequenceParallel.of(ranks)
    groups = torch.distributed.distributed_c10d._world.pg_map
    found = {
        group.group_name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    }
    trainer.close()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_wait_until_the_watchdog_has_judged(tmp_path: Path, backend: str) -> None:
    model = make_tiny_model(tmp_path / "model", dtype="float32")
    (found,) = on_ranks(time_outs, str(model), backend, ranks=1)
    assert set(found.values()) == {COLLECTIVE_TIMEOUT.total_seconds()}, found


def buffers_after_loading(rank: int, ranks: int, address: Any, models: list[str], backend: str) -> list[str]:
    wrong: list[str] = []
    first = rank_of(rank, ranks, Path(models[0]), backend, frozen=True)
    first.start(address)
    for path in models:
        for dtype in ("float32", "bfloat16"):
            trainer = rank_of(rank, ranks, Path(path), backend, frozen=True, dtype=dtype)
            objective = trainer._objective
            plain = objective.load(trainer._spec)
            expected = {name: (buffer.dtype, buffer.clone()) for name, buffer in plain.named_buffers()}
            assert any("inv_freq" in name for name in expected)
            trainer._backend = TRAINING_BACKENDS.get(backend)(
                trainer._settings, dtype=dtype, device="cpu", world_size=ranks
            )
            trainer.take(objective.load(trainer._spec))
            found = dict(trainer._model.module.named_buffers())
            wrong += [
                f"{path} {dtype} {name}"
                for name, (kind, value) in expected.items()
                if found[name].dtype != kind or not torch.equal(found[name], value)
            ]
            if found.keys() != expected.keys():
                wrong.append(path)
    first.close()
    return wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_rotary_frequencies_stay_as_they_are(tmp_path: Path, backend: str) -> None:
    families = ("llama", "qwen3", "gemma3_window", "phi3", "gpt_oss", "qwen3_moe")
    models = [str(make_family(family, tmp_path / family)) for family in families]
    assert on_ranks(buffers_after_loading, models, backend, ranks=1) == [[]]
