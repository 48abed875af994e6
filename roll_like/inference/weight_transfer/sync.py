"""Trainer to inference, from the driver: freeze, send, switch, check, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_like.errors import WeightSyncError
from roll_like.inference.interface import Fingerprints, InferenceEngine
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.values import Last, Metric, Sum

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync.

    Attributes:
        version: Policy version that the engines sample with from now on.
        bytes: Size of the weights.
        buckets: Pieces they went in.
        seconds: From freezing to going on, the check included.
        check_seconds: The check's share of it.
        checked: Tensors whose numbers were compared in every engine.
        unchecked: Tensors that an engine could not read back; their bytes were checked on arrival where the
            transfer does that.
    """

    version: int
    bytes: int
    buckets: int
    seconds: float
    check_seconds: float
    checked: int
    unchecked: tuple[str, ...]

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The figures of a step, beside the `time/sync` that the step's clock takes; none where nothing was sent."""
        if not self.buckets:
            return {}
        return {"time/sync_check": Sum(self.check_seconds), "sync/tensors_checked": Last(float(self.checked))}


class WeightSync:
    """Brings the trainer's weights into the engines.

    A sync either ends with every engine generating from weights that were compared with the trainer's, or
    raises and leaves the engines frozen: nothing is ever sampled from weights that are in doubt.

    Args:
        send: Lets every trainer rank take part in one `WeightSender.send(salt)`; returns rank 0's report.
        engines: The inference engines.
        version: Number of the last version; the next push makes it one more. A resumed run gives that of its
            checkpoint, so that numbers go on.
    """

    def __init__(
        self, send: Callable[[int], SendReport], engines: ClusterHandle[InferenceEngine], *, version: int = 0
    ) -> None:
        self._send = send
        self._engines = engines
        self.version = version

    def push(self, before_resume: Callable[[], None] = lambda: None) -> SyncReport:
        """Send, switch, check.

        Args:
            before_resume: Called when the engines have the weights and do not sample yet: they are about to take
                memory for their key-value cache.

        Raises:
            WeightSyncError: An engine refused the weights, or holds other numbers than the trainer; names the
                tensors.
        """
        began = time.perf_counter()
        version = self.version + 1
        self._engines.everywhere(InferenceEngine.start_weight_update)
        sent = self._send(version)
        self._engines.everywhere(InferenceEngine.finish_weight_update, version)
        checking = time.perf_counter()
        unchecked = self._check(sent.fingerprints, version)
        check_seconds = time.perf_counter() - checking
        before_resume()
        self._engines.everywhere(InferenceEngine.resume)
        self.version = version
        return SyncReport(
            version=version,
            bytes=sent.bytes,
            buckets=sent.buckets,
            seconds=time.perf_counter() - began,
            check_seconds=check_seconds,
            checked=len(sent.fingerprints) - len(unchecked),
            unchecked=unchecked,
        )

    def _check(self, sent: Mapping[str, str], version: int) -> tuple[str, ...]:
        if not sent:
            raise WeightSyncError("the trainer sent no tensor at all")
        unchecked: set[str] = set()
        engines = self._engines.everywhere(InferenceEngine.fingerprints, list(sent), version)
        for engine, held in enumerate(engines):
            drifted, unknown = compare(sent, held)
            if drifted:
                raise WeightSyncError(
                    f"after sync {version}, inference engine {engine} computes with other numbers than the trainer "
                    f"sent, in {len(drifted)} of {len(sent)} tensors: {', '.join(drifted[:5])}"
                    f"{', …' if len(drifted) > 5 else ''}",
                    fix="the engine kept a stale or altered copy of them; if model.path has an unusual layout, try "
                    "inference.type: hf, and report the tensor names",
                )
            unchecked.update(unknown)
        if len(unchecked) == len(sent):
            raise WeightSyncError(
                f"no engine could read back any of the {len(sent)} tensors, so the sync cannot be verified"
            )
        return tuple(sorted(unchecked))


class VersionCounter:
    """Counts policy versions where there are no engines to send weights to.

    Args:
        version: The last version; the next push makes it one more.
    """

    def __init__(self, version: int) -> None:
        self._version = version

    def push(self, before_resume: Callable[[], None] = lambda: None) -> SyncReport:
        """Return the report of a sync in which nothing was sent."""
        before_resume()
        self._version += 1
        return SyncReport(
            version=self._version, bytes=0, buckets=0, seconds=0.0, check_seconds=0.0, checked=0, unchecked=()
        )


def compare(sent: Mapping[str, str], held: Fingerprints) -> tuple[list[str], list[str]]:
    """Return the tensors in which an engine differs from the trainer, and those it could not read back."""
    drifted = [name for name, value in sent.items() if name in held.tensors and held.tensors[name] != value]
    unknown = [name for name in sent if name not in held.tensors]
    drifted += [
        f"{copy} (tied to {original})"
        for copy, original in held.tied.items()
        if original in sent and held.tensors[copy] != sent[original]
    ]
    return drifted, unknown
