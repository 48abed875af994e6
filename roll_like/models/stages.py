"""Which layers the stages of a pipeline have."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.models.megatron_plan import layers_of_stages


def stage_layers(layers: int, stages: int, virtual: int = 1) -> tuple[int, ...] | None:
    """Return how many layers each stage has, its virtual stages together; None where some would have none.

    Args:
        virtual: Parts of the layers that each of these has.
    """
    if stages * virtual > layers:
        return None
    counts = layers_of_stages(layers, stages * virtual)
    return tuple(sum(counts[stage::stages]) for stage in range(stages))


def layers_of_stage(layers: int, stages: int, virtual: int, stage: int) -> Sequence[int]:
    """Return the numbers of the layers that a stage has, from 0.

    >>> list(layers_of_stage(8, 2, 2, stage=1))
    [2, 3, 6, 7]

    Args:
        layers: Of the model; `stage_layers` can divide them.
        virtual: Parts of the layers that each of these has.
        stage: The rank, from 0.
    """
    counts = layers_of_stages(layers, stages * virtual)
    firsts = [sum(counts[:part]) for part in range(len(counts))]
    return [
        layer
        for part in range(stage, len(counts), stages)
        for layer in range(firsts[part], firsts[part] + counts[part])
    ]


def kept_passes(stages: int, virtual: int, stage: int) -> tuple[int, int]:
    """Return of how many micro-batches a stage keeps activations, and of what share of its layers: 1 / the second.

    1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): stage s of p has p − s micro-batches under way;
    interleaved with v virtual stages 2 · (p − s − 1) + (v − 1) · p + 1 passes of a v-th of its layers.

    >>> kept_passes(8, 1, stage=0)
    (8, 1)
    >>> kept_passes(2, 2, stage=0)
    (5, 2)
    """
    if virtual == 1:
        return stages - stage, 1
    return 2 * (stages - stage - 1) + (virtual - 1) * stages + 1, virtual
