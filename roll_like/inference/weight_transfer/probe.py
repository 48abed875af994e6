"""A probe after a weight sync: whether engines and trainer compute the same log-probabilities.

Fingerprints compare weights. A probe compares what is computed from them. So it also finds what no fingerprint sees: a
kernel that reads weights in another layout than they are in, other rotary positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll_like.config.inference import EngineConfig
from roll_like.config.model import Precision
from roll_like.errors import EngineError
from roll_like.types import FloatArray, IntArray

#: Tokens of a probe, where the context window holds as many.
PROBE_TOKENS = 64
#: What they are tokens of. Ordinary text, because rounding grows where a model finds every token unlikely: two kernels
#: of a model of 135M parameters in bfloat16 are 0.05 nats apart on it, and 0.08 on random tokens.
PROBE_TEXT = (
    "The water of a river comes from rain and melting snow. It runs downhill, because that is the shortest way to the "
    "sea, and it carries sand and small stones along. Where the ground is flat, the river becomes wide and slow, and "
    "what it carried sinks to the bottom. In 1859, 12 + 30 = 42 boats went up the river; today there are three times "
    "as many."
)
#: Largest mean difference of a token's log-probability that rounding explains. Nats.
TOLERANCES: dict[Precision, float] = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
#: The same of an engine with 8-bit weights and activations, or keys and values, whatever the precision.
QUANTIZED_TOLERANCE = 0.3


def tolerance_of(engine: EngineConfig, precision: Precision) -> float:
    """Return the largest mean difference that a probe of an engine accepts, in nats.

    Args:
        engine: The `inference` section.
    """
    return engine.probe_tolerance or (QUANTIZED_TOLERANCE if engine.approximates else TOLERANCES[precision])


def probe_tokens(encode: Callable[[str], Sequence[int]], max_model_len: int) -> IntArray:
    """Return the tokens of a probe, the same in every run of a model, shape [T].

    Args:
        encode: The tokenizer; a text that it makes too few tokens of is repeated.
        max_model_len: Context window; one token of it is left for the engine, which generates one.
    """
    return np.resize(np.asarray(encode(PROBE_TEXT), np.int32), min(PROBE_TOKENS, max_model_len - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobProbe:
    """What engines and trainer are both asked.

    Attributes:
        tokens: Shape [T].
        trainer: Returns the trainer's log-probability of each token but the first given those before it, at
            temperature 1, shape [T−1].
        tolerance: Largest mean difference. Nats.
        every: Pushes between two probes; 0 probes after the first two pushes only.
    """

    tokens: IntArray
    trainer: Callable[[IntArray], FloatArray]
    tolerance: float
    every: int

    def due(self, push: int) -> bool:
        """Return whether push number `push` of this process, counted from 0, is followed by a probe.

        The first sends what the engines have loaded; the second is the first that a stale copy would show in.
        """
        return push < 2 or (self.every > 0 and push % self.every == 0)

    def compare(self, engine: int, trained: FloatArray, sampled: FloatArray, version: int) -> float:
        """Return the mean absolute difference of an engine's log-probabilities from the trainer's.

        Args:
            trained: The trainer's, shape [T−1].
            sampled: The engine's, shape [T−1].

        Raises:
            EngineError: It is above the tolerance, or not a number; says which keys to look at.
        """
        differences = np.abs(np.asarray(trained, np.float64) - np.asarray(sampled, np.float64))
        mean = float(differences.mean())
        if mean <= self.tolerance:
            return mean
        worst = int(np.nan_to_num(differences, nan=np.inf).argmax())
        raise EngineError(
            f"after sync {version}, inference engine {engine} and the trainer compute different log-probabilities of "
            f"{len(differences)} tokens: {mean:.3g} nats apart on average, expected at most "
            f"{self.tolerance:g}; most at token {worst + 1}: engine {sampled[worst]:.4g}, trainer {trained[worst]:.4g}",
            fix="try inference.type: hf, to see whether vLLM computes this model in another way; check model.path "
            "(attention windows, rotary scaling, experts) and model.dtype (float32 excludes rounding); raise "
            "inference.probe_tolerance only if rounding explains the difference",
        )
