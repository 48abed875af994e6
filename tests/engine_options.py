"""What engines and trainer can do beside the ordinary, one cell each for tests in which they are killed."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

#: A random model is nearly indifferent: where its logits are divided by little, guesses are accepted.
DECIDED = {"temperature": 0.05, "max_response_tokens": 24}


@dataclass(frozen=True)
class Option:
    """A way to sample or to train.

    Attributes:
        changes: Of a run's sections, by section; `inference` is replaced.
        exact: Whether two runs of it, one of which is disturbed, end with the same weights.
        metrics: What each step says of it.
        syncs: Raises where weight syncs (`dying_runs.record_syncs`), to so many engines one after the other, did not do
            what it promises.
        needs: A package that has to be there.
        modules: Of the tests, which the run imports.
    """

    changes: dict[str, Any]
    exact: bool = False
    metrics: tuple[str, ...] = ()
    syncs: Callable[[Sequence[dict[str, Any]], int], None] | None = None
    needs: str | None = None
    modules: tuple[str, ...] = ()

    def put_into(self, config: Path, model: Path) -> Path:
        """Let a run have this option; skip the test where a package is missing."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            pytest.skip(f"{self.needs} is not installed")
        values = yaml.safe_load(config.read_text())
        for section, changes in self.changes.items():
            values[section] = changes if section == "inference" else merged(values[section], changes)
        if "draft" in str(values["inference"].get("speculative")):
            values["inference"]["speculative"]["model"] = str(model)
        for module in self.modules:
            shutil.copy(Path(__file__).with_name(f"{module}.py"), config.parent)
            values["import"].append(module)
        config.write_text(yaml.safe_dump(values))
        return config

    def require(self, steps: Sequence[dict[str, Any]], syncs: Sequence[dict[str, Any]], killed: int) -> None:
        """Require what it promises of a run's steps, and of its syncs before and after it was killed.

        Args:
            steps: What was logged.
            syncs: What was sent (`dying_runs.record_syncs`).
            killed: How many of these the run had sent when it was killed; its engine had been replaced.
        """
        assert 0 < killed < len(syncs)
        assert len({sync["checked"] for sync in syncs}) == 1
        assert not any(sync["unchecked"] for sync in syncs), "all that engines hold is compared with the trainer's"
        if self.syncs is not None:
            self.syncs(syncs[:killed], 2)
            self.syncs(syncs[killed:], 1)
        for name in self.metrics:
            figures = [step.get(name, 0.0) for step in steps]  # none where nothing was sampled in a step
            assert max(figures[:3]) > 0, "of the first engine"
            assert max(figures[3:6]) > 0, "of the one in its place"
            assert max(figures[6:]) > 0, "after the run was resumed"


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with changes, also of what is in it.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    both = {name: merged(old[name], new[name]) for name in old.keys() & new.keys() if isinstance(old[name], dict)}
    return {**old, **new, **both}


def guessing(**speculative: Any) -> dict[str, Any]:
    return {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 8, "speculative": speculative}


def only_changes_travel(syncs: Sequence[dict[str, Any]], engines: int) -> None:
    """The first sync of a run is full, and so is that to an engine which was not there at the one before."""
    seen = [None, *(sync["engines"] for sync in syncs)]
    whole = [sync["changed_share"] is None for sync in syncs]
    assert whole == [now != before for before, now in itertools.pairwise(seen)]
    assert sum(whole) == engines
    assert max(sync["changed_share"] or 0.0 for sync in syncs) > 0
    for sync in syncs:
        sent, everything = sync["sent_bytes"], sync["bytes"]
        assert sent == everything if sync["changed_share"] is None else sent < everything / 2


def all_matrices_in_8_bits(syncs: Sequence[dict[str, Any]], engines: int) -> None:
    """Of two layers, after every sync to any engine: q, k, v and o, gate, up and down."""
    assert len({str(sync["engines"]) for sync in syncs}) == engines
    assert {sync["quantized"] for sync in syncs} == {2 * 7}


GUESSED = ("rollout/speculation/accepted", "rollout/speculation/length")
OPTIONS = {
    "one seed, one sample": Option({}, exact=True),
    "kept tokens": Option({"rollout": {"top_p": 0.95, "top_k": 64}}, exact=True),
    "head in float32": Option({"model": {"dtype": "bfloat16", "head_dtype": "float32"}}, exact=True),
    "muon": Option({"training": {"optimizer": {"lr": 1.0e-3, "muon": {}}}}, exact=True),
    "changed weights alone": Option(
        {
            "model": {"dtype": "bfloat16"},
            "training": {"optimizer": {"lr": 1.0e-5}},
            "inference": {"type": "hf_by_value", "max_running": 4, "weight_sync": "delta"},
        },
        exact=True,
        syncs=only_changes_travel,
        modules=("by_value_engine",),
    ),
    "guesses by n-grams": Option({"rollout": DECIDED, "inference": guessing(prompt_lookup_min=1)}, metrics=GUESSED),
    "guesses of a draft": Option({"rollout": DECIDED, "inference": guessing(method="draft")}, metrics=GUESSED),
    "guesses by suffixes": Option(
        {"rollout": DECIDED, "inference": guessing(method="suffix")}, metrics=GUESSED, needs="arctic_inference"
    ),
    "8-bit weights": Option(
        {"inference": {"type": "vllm", "kv_cache_gib": 0.1, "quantization": "int8"}}, syncs=all_matrices_in_8_bits
    ),
}
