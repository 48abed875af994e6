"""Log-probabilities of a reference model before the first step: by the content of sequences, kept with the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np

from roll_like.types import FloatArray, TrainingSample

#: Log-probabilities of sequences under a reference model: of each sample's trained tokens, summed up.
SequenceReference: TypeAlias = Callable[[Sequence[TrainingSample]], FloatArray]

#: How many sequences a reference model computes in one call.
BATCH = 4096


class PrecomputedReference:
    """A reference model's log-probabilities of every sequence of a run, from before the first step.

    Args:
        sequence_logprobs: Log-probability of each, by the content of the sequence.
    """

    def __init__(self, sequence_logprobs: Mapping[bytes, float]) -> None:
        self._sequence_logprobs = sequence_logprobs

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], sequence_logprobs: FloatArray) -> PrecomputedReference:
        """Return those of samples: the log-probability of each."""
        return cls(dict(zip(map(_content, samples), sequence_logprobs.tolist(), strict=True)))

    def __call__(self, samples: Sequence[TrainingSample]) -> FloatArray:
        """Return the log-probability of each sample."""
        return np.array([self._sequence_logprobs[_content(sample)] for sample in samples], np.float32)

    def missing(self, samples: Iterable[TrainingSample]) -> Iterator[TrainingSample]:
        """Yield the samples that it does not hold, each once."""
        seen: set[bytes] = set()
        for sample in samples:
            content = _content(sample)
            if content not in self._sequence_logprobs and content not in seen:
                seen.add(content)
                yield sample

    def extended(self, model: SequenceReference, samples: Iterable[TrainingSample]) -> PrecomputedReference:
        """Return the same with a model's log-probabilities of further samples."""
        logprobs, remaining = {**self._sequence_logprobs}, self.missing(samples)
        while batch := list(islice(remaining, BATCH)):
            logprobs.update(zip(map(_content, batch), model(batch).tolist(), strict=True))
        return PrecomputedReference(logprobs)

    @classmethod
    def read(cls, path: Path, model: str) -> PrecomputedReference:
        """Return what an earlier process of the run wrote; nothing where it wrote none, or of another model."""
        if not path.is_file():
            return cls({})
        with np.load(path) as kept:
            if str(kept["model"]) != model:
                return cls({})
            return cls(dict(zip(map(bytes, kept["contents"]), kept["sums"].tolist(), strict=True)))

    def write(self, path: Path, model: str) -> None:
        """Keep it for a resumed run."""
        contents = np.frombuffer(b"".join(self._sequence_logprobs), np.uint8).reshape(len(self._sequence_logprobs), -1)
        part = path.with_name(f"{path.stem}.part.npz")
        np.savez(
            part,
            contents=contents,
            sums=np.array([*self._sequence_logprobs.values()], np.float32),
            model=np.array(model),
        )
        part.replace(path)


def _content(sample: TrainingSample) -> bytes:
    """Return a hash of everything that a sample's log-probability follows from."""
    digest = hashlib.blake2b(sample.token_ids.astype(np.int32).tobytes(), digest_size=16)
    digest.update(np.packbits(sample.loss_mask).tobytes())
    for image in sample.images:
        digest.update(image.picture.digest)
    return digest.digest()
