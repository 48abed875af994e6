"""Trainer to inference, from the driver: freeze, send, switch, check, go on, probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from roll_like.config.inference import POLICY
from roll_like.errors import WeightSyncError
from roll_like.inference.interface import Fingerprints, InferenceEngine
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.probe import LogprobProbe
from roll_like.types import FloatArray
from roll_like.values import Last, Max, Metric, Sum

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync.

    Attributes:
        version: Policy version that the engines sample with from now on.
        bytes: Size of the weights.
        buckets: Pieces they went in.
        seconds: From freezing to going on, check and probe included.
        check_seconds: The check's share of it.
        checked: Tensors whose numbers were compared in every engine.
        unchecked: Tensors that an engine could not read back; a probe stood in for their check.
        probe_seconds: The probe's share of `seconds`.
        probe: Mean difference of the log-probabilities of engine and trainer, the largest of all engines', in nats;
            None without a probe.
        sent_bytes: What travelled to each engine.
        changed_share: Share of the numbers that differed from the last ones; None where all were sent.
    """

    version: int
    bytes: int
    buckets: int
    seconds: float
    check_seconds: float
    checked: int
    unchecked: tuple[str, ...]
    probe_seconds: float = 0.0
    probe: float | None = None
    sent_bytes: int | None = None
    changed_share: float | None = None

    @property
    def not_read_back(self) -> str | None:
        """What is to be known of tensors that have no fingerprints; None where all have."""
        names, all_of_them = self.unchecked, self.checked + len(self.unchecked)
        if not names:
            return None
        return (
            f"the engine cannot read back {len(names)} of {all_of_them} tensors ({', '.join(names[:3])}"
            f"{', …' if len(names) > 3 else ''}): each sync compares log-probabilities instead (sync/probe)"
        )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The figures of a step, beside the `time/sync` that the step's clock takes; none where nothing was sent."""
        if not self.buckets:
            return {}
        metrics: dict[str, Metric] = {
            "time/sync_check": Sum(self.check_seconds),
            "sync/tensors_checked": Last(float(self.checked)),
            "sync/sent_bytes": Sum(float(self.bytes if self.sent_bytes is None else self.sent_bytes)),
        }
        if self.changed_share is not None:
            metrics["sync/changed_share"] = Last(self.changed_share)
        if self.probe is not None:
            metrics |= {"time/sync_probe": Sum(self.probe_seconds), "sync/probe": Max(self.probe)}
        return metrics


class Engines(Protocol):
    """The inference engines: a cluster of them."""

    def everywhere(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every engine; return the results by engine."""


class WeightSync:
    """Brings the trainer's weights into the engines.

    A sync either ends with every engine generating from weights that were compared with the trainer's, or
    raises: nothing that was sampled from weights in doubt is ever trained on. If weights differ, the engines stay
    frozen. A probe needs the engines' key-value cache, so it comes after they go on; requests that were under way may
    get tokens meanwhile, which go nowhere if the probe ends the run.

    Args:
        send: Lets every trainer rank take part in one `WeightSender.send(seed)`; returns rank 0's report.
        version: Number of the last version; the next push makes it one more. A resumed run gives that of its
            checkpoint, so that numbers go on.
        probe: Compares what engines and trainer compute, after the first two pushes and regularly; after every push if
            an engine cannot read tensors back. None where engines tell no log-probabilities of given tokens.
    """

    def __init__(
        self,
        send: Callable[[int], SendReport],
        engines: Engines,
        *,
        version: int = 0,
        probe: LogprobProbe | None = None,
    ) -> None:
        self._send = send
        self._engines = engines
        self._probe = probe
        self._pushes = 0
        self.version = version

    def push(self, before_resume: Callable[[], None] = lambda: None, *, again: bool = False) -> SyncReport:
        """Send, switch, check, probe.

        Args:
            before_resume: Called when the engines have the weights and do not sample yet: they are about to take
                memory for their key-value cache.
            again: Whether these are the weights of the last push, for engines that did not get them.

        Raises:
            WeightSyncError: An engine refused the weights, or holds other numbers than the trainer, or cannot show
                which it holds; names the tensors.
            EngineError: An engine computes other log-probabilities than the trainer.
        """
        began = time.perf_counter()
        version = self.version if again else self.version + 1
        self._engines.everywhere(InferenceEngine.start_weight_update)
        sent = self._send(version)
        self._engines.everywhere(InferenceEngine.finish_weight_update, version)
        checking = time.perf_counter()
        unchecked = self._check(sent, version)
        check_seconds = time.perf_counter() - checking
        probe = self._probe if self._probe is not None and (unchecked or self._probe.due(self._pushes)) else None
        if unchecked and probe is None:
            raise _unverified(unchecked, len(sent.fingerprints), version)
        probing = time.perf_counter()
        # while the trainer still has its weights where it computes
        trained = None if probe is None else probe.trainer(probe.tokens)
        before_resume()
        self._engines.everywhere(InferenceEngine.resume)
        difference = None if probe is None or trained is None else self._ask(probe, trained, version)
        probe_seconds = time.perf_counter() - probing
        self.version = version
        self._pushes += 1
        return SyncReport(
            version=version,
            bytes=sent.bytes,
            buckets=sent.buckets,
            seconds=time.perf_counter() - began,
            check_seconds=check_seconds,
            checked=len(sent.fingerprints) - len(unchecked),
            unchecked=unchecked,
            probe_seconds=0.0 if probe is None else probe_seconds,
            probe=difference,
            sent_bytes=sent.sent_bytes,
            changed_share=sent.changed_share,
        )

    def push_adapter(self, name: str, dropped: Sequence[str] = ()) -> None:
        """Send the trainer's adapter to engines that hold several, check and probe it; what they generate goes on.

        Args:
            name: How requests will call it; see `InferenceEngine.start_adapter`.

        Raises:
            WeightSyncError, EngineError: As in `push`; no request may ask for this adapter.
        """
        seed = self.version + 1
        self._engines.everywhere(InferenceEngine.start_adapter, name, tuple(dropped))
        sent = self._send(seed)
        self._engines.everywhere(InferenceEngine.finish_adapter)
        unchecked = self._check(sent, seed, name)
        if self._probe is not None and (unchecked or self._probe.due(self._pushes)):
            self._ask(self._probe, self._probe.trainer(self._probe.tokens), seed, name)
        elif unchecked:
            raise _unverified(unchecked, len(sent.fingerprints), seed)
        self.version = seed
        self._pushes += 1

    def _ask(self, probe: LogprobProbe, trained: FloatArray, version: int, adapter: str = POLICY) -> float:
        """Return the largest difference of any engine from the trainer."""
        if adapter == POLICY:
            engines = self._engines.everywhere(InferenceEngine.prompt_logprobs, probe.tokens)
        else:
            scores = self._engines.everywhere(InferenceEngine.score_prompt, probe.tokens, adapter, 0)
            engines = [each.logprobs for each in scores]
        differences = (probe.compare(number, trained, found, version) for number, found in enumerate(engines))
        return max(differences, default=0.0)  # all engines may have died just now

    def _check(self, report: SendReport, version: int, adapter: str = POLICY) -> tuple[str, ...]:
        sent = report.fingerprints
        if not sent:
            raise WeightSyncError("the trainer sent no tensor at all")
        unchecked: set[str] = set()
        if adapter == POLICY:
            engines = self._engines.everywhere(InferenceEngine.fingerprints, list(sent), version)
        else:
            engines = self._engines.everywhere(InferenceEngine.adapter_fingerprints, adapter, list(sent), version)
        for engine, held in enumerate(engines):
            drifted, unknown = compare_fingerprints(sent, held, report.quantized)
            if drifted:
                raise WeightSyncError(
                    f"after sync {version}, weights differ on inference engine {engine}, in {len(drifted)} of "
                    f"{len(sent)} tensors: {', '.join(drifted[:5])}"
                    f"{', …' if len(drifted) > 5 else ''}",
                    fix="the engine kept a stale or altered copy of them; if model.path has an unusual layout, try "
                    "inference.type: hf, and report the tensor names",
                )
            unchecked.update(unknown)
        return tuple(sorted(unchecked))


def _unverified(unchecked: Sequence[str], sent: int, version: int) -> WeightSyncError:
    return WeightSyncError(
        f"sync {version} cannot be verified: an inference engine could not read back {len(unchecked)} of {sent} "
        f"tensors ({', '.join(unchecked[:5])}{', …' if len(unchecked) > 5 else ''}), and the engine of inference.type "
        "has no `prompt_logprobs`, which a probe would compare with the trainer's log-probabilities",
        fix="use inference.type: vllm or hf; for an engine of your own, return fingerprints of these tensors, or "
        "implement `prompt_logprobs` and declare it in `EngineCapabilities`",
    )


class VersionCounter:
    """Counts policy versions where there are no engines to send weights to.

    Args:
        version: The last version; the next push makes it one more.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def push(self, before_resume: Callable[[], None] = lambda: None) -> SyncReport:
        """Return the report of a sync in which nothing was sent."""
        before_resume()
        self.version += 1
        return SyncReport(
            version=self.version, bytes=0, buckets=0, seconds=0.0, check_seconds=0.0, checked=0, unchecked=()
        )


def compare_fingerprints(
    sent: Mapping[str, str], held: Fingerprints, quantized: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Return the tensors in which an engine differs from the trainer, and those it could not read back.

    Args:
        sent: Fingerprints of the trainer's tensors.
        quantized: Fingerprints of the trainer's matrices in 8 bits, for those that the engine holds so.
    """
    sent = {**sent, **{name: quantized.get(name, "") for name in held.quantized}}
    drifted = [name for name, value in sent.items() if name in held.tensors and held.tensors[name] != value]
    unknown = [name for name in sent if name not in held.tensors]
    drifted += [
        f"{copy} (tied to {original})"
        for copy, original in held.tied.items()
        if original in sent and held.tensors[copy] != sent[original]
    ]
    return drifted, unknown
