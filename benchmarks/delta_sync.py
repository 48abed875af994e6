"""Weight syncs that send only changed values, against full ones: seconds, bytes, and the share that changed.

    python benchmarks/delta_sync.py                     # the quickstart's model
    python benchmarks/delta_sync.py --lr 1e-5 1e-6      # rates of the updates between two syncs
    python benchmarks/delta_sync.py --mbit 1000         # of the slow connection

Updates are real: AdamW on float32 masters of a bfloat16 model, gradients of its likelihood of pieces of the
documentation. The receiver is a process of its own that does what an engine's process does before vLLM loads: it keeps
buckets, writes changes into them, compares every checksum and copies the tensors. Both ways send the same weights, in
turns, over

    shared memory       the trainer's buckets are mapped and nothing travels, so there are full syncs only
    tcp                 a socket on the loopback device
    tcp, slow           the same, with a pause before each bucket: the time that its bytes take at `--mbit`
    ray                 an actor on this machine, through Ray's object store: the relay between machines

The time of a sync includes gathering, comparing, copying, sending and all of the receiver's work. Medians are shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal

from common import ROOT, Options, add_common_arguments, environment_of, finish, quickstart, say

MAPPED, SLOW = "shared memory", "tcp, slow"
SYNCS: tuple[Literal["full", "delta"], ...] = ("full", "delta")


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, lr=[1e-5], tokens=32, over=[MAPPED, "tcp"])
    add_common_arguments(arguments, repetitions=3)
    arguments.add_argument("--model", help="directory of a model; default: the quickstart's")
    arguments.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5], help="rates of AdamW")
    arguments.add_argument("--tokens", type=int, default=256, help="tokens of an update")
    arguments.add_argument("--mbit", type=float, default=1000.0, help="of the slow connection, per second")
    arguments.add_argument("--over", nargs="+", default=[MAPPED, "tcp", SLOW, "ray"], help="connections")
    return arguments


class Receiver:
    """What an engine's process does with buckets."""

    def __init__(self) -> None:
        from roll_like.inference.weight_transfer.shared_memory import LocalBuckets

        self._buckets = LocalBuckets()
        self._held: dict[str, Any] = {}

    def held_weights(self, part: int = 0) -> str:
        return self._buckets.held(part)

    def update_weights(self, info: Mapping[str, Any]) -> None:
        from roll_like.inference.weight_transfer.shared_memory import BucketInfo, read_bucket

        for name, tensor in read_bucket(BucketInfo(**self._buckets.here(info))):
            if name in self._held:
                self._held[name].copy_(tensor)
            else:
                self._held[name] = tensor.clone()

    def finish(self) -> None:
        self._buckets.clear()

    def fingerprints(self, seed: int) -> dict[str, str]:
        from roll_like.inference.weight_transfer.fingerprint import fingerprint

        return {name: fingerprint(tensor, seed) for name, tensor in self._held.items()}


def receive(port: int) -> None:
    """Answer calls over a socket until it closes."""
    receiver = Receiver()
    with Client(("127.0.0.1", port)) as calls:
        while True:
            try:
                name, arguments = calls.recv()
            except EOFError:
                return
            calls.send(getattr(receiver, name)(*arguments))


class OverSocket:
    """The cluster of one receiver in another process."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        with Listener(("127.0.0.1", 0)) as listener:
            address: Any = listener.address
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=receive, args=(address[1],), daemon=True)
            self._process.start()
            self._calls: Connection = listener.accept()

    def call(self, name: str, *arguments: Any) -> Any:
        if self._rate is not None and arguments and isinstance(arguments[0], Mapping):
            time.sleep(travelling(arguments[0]) / self._rate)
        self._calls.send((name, arguments))
        return self._calls.recv()

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [self.call(method.__name__, *arguments)]

    def close(self) -> None:
        self._calls.close()
        self._process.join(10)


class OverRay:
    """The cluster of one receiver in an actor."""

    def __init__(self) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
        self._actor = ray.remote(Receiver).remote()

    def call(self, name: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, name).remote(*arguments))

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [self.call(method.__name__, *arguments)]

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


def travelling(info: Mapping[str, Any]) -> int:
    """Return the bytes of a bucket's content or changes."""
    from roll_like.inference.weight_transfer.delta import CHANGES, changes_bytes

    return changes_bytes(info[CHANGES]) if CHANGES in info else int(info["size"])


class Trainee:
    """A bfloat16 model with float32 masters, and AdamW."""

    def __init__(self, path: Path, rate: float, tokens: int) -> None:
        import torch
        from transformers import AutoTokenizer

        from roll_like.models.modules import load_causal_lm

        self._model = load_causal_lm(path, "bfloat16")
        self._masters = {name: each.detach().float() for name, each in self._model.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=rate, weight_decay=0.0, fused=True)
        text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
        self._ids = torch.tensor(AutoTokenizer.from_pretrained(path)(text)["input_ids"])
        self._tokens, self._place = tokens, 0

    def update(self) -> None:
        """Learn the next tokens."""
        import torch

        ids = self._ids[self._place :][: self._tokens][None]
        self._place += self._tokens
        self._model.zero_grad()
        self._model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                self._masters[name].grad = parameter.grad.float()
            self._optimizer.step()
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._masters[name])

    def full_weights(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()


def connected(over: str, mbit: float) -> Any:
    if over == "ray":
        return OverRay()
    return OverSocket(mbit * 1e6 / 8 if over == SLOW else None)


def main(options: argparse.Namespace) -> None:
    from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
    from roll_like.models.load import resolve_model

    path = Path(options.model or resolve_model(quickstart("inference.type=hf", smoke=options.smoke).model).path)
    figures: dict[str, Any] = {}
    for rate in options.lr:
        trainee = Trainee(path, rate, options.tokens)
        ends: list[tuple[str, str, Any, Any]] = []
        for over in options.over:
            by_value = over != MAPPED
            for mode in SYNCS if by_value else SYNCS[:1]:
                engines: Any = connected(over, options.mbit)
                transfer = SharedMemoryTransfer(engines, by_value=by_value, sync=mode, full_every=10**6)
                ends.append((over, mode, engines, transfer.connect(trainee, rank=0)))
        seconds: dict[tuple[str, str], list[float]] = {(over, mode): [] for over, mode, _, _ in ends}
        shares: list[float] = []
        sizes: dict[str, int] = {}
        for turn in range(-1, options.repetitions):
            trainee.update()
            for over, mode, engines, sender in ends:
                began = time.perf_counter()
                report = sender.send(turn + 2)
                engines.call("finish")
                took = time.perf_counter() - began
                assert engines.call("fingerprints", turn + 2) == report.fingerprints
                if turn < 0:  # all of it goes, into fresh memory
                    continue
                seconds[over, mode].append(took)
                sizes[mode] = report.bytes if report.sent_bytes is None else report.sent_bytes
                if report.changed_share is not None:
                    shares.append(report.changed_share)
                    assert mode == "delta"
        for _, _, engines, sender in ends:
            sender.close()
            engines.close()
        share = statistics.median(shares)
        say(f"lr {rate:g}: {share:.2%} changed, {sizes['full'] / 1e6:.1f} MB or {sizes['delta'] / 1e6:.1f} MB")
        figures[f"{rate:g}"] = {
            "changed_share": share,
            "full_bytes": sizes["full"],
            "delta_bytes": sizes["delta"],
            **{f"{over}, {mode}": median_of(taken) for (over, mode), taken in seconds.items()},
        }
        for (over, mode), taken in seconds.items():
            say(f"{over}, {mode}: {median_of(taken):.3f} s")
    finish(options, {"benchmark": "delta_sync", "model": path.name, "mbit": options.mbit, **figures})


def median_of(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds), 4)


if __name__ == "__main__":
    chosen = parser().parse_args()
    os.environ.update(environment_of(chosen.threads, plain=chosen.plain_environment))
    main(chosen)
