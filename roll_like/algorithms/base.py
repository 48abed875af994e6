"""What advantage estimators and losses have in common: settings, figures, and refusal of what is not finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from roll_like.algorithms.lazy import no_grad, torch
from roll_like.config.base import PluginConfig
from roll_like.errors import EngineError
from roll_like.values import Mean, Metric, Sum

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm:
    """Base of estimators and losses, which a configuration chooses by name.

    A `Config` without a docstring gets the first paragraph of its class's: that is what the configuration pages show.

    Args:
        config: Its own settings, an instance of its `Config`.
    """

    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls).get("Config")
        if own is not None and not own.__doc__ and cls.__doc__:
            own.__doc__ = inspect.cleandoc(cls.__doc__).partition("\n\n")[0]


@no_grad
def item_metrics(
    sums: Mapping[str, Tensor], figures: Mapping[str, tuple[Tensor, Tensor]], counts: Mapping[str, Tensor]
) -> dict[str, Metric]:
    """Reduce the figures of a micro-batch to plain numbers with one transfer from the device.

    Args:
        sums: Scalars, logged as Sums.
        figures: A figure of each item, and which items it is of, bool; logged as Means, or not where it is of none.
        counts: Which items to count, bool; logged as Sums.
    """
    numbers = [total.detach().double() for total in sums.values()]
    numbers += [of_I.sum().double() for of_I in counts.values()]
    numbers += [of_I.sum().double() for _, of_I in figures.values()]
    # a figure that is not of an item may be infinite, so it is left out rather than multiplied by 0
    numbers += [figure_I.detach().double()[of_I].mean() for figure_I, of_I in figures.values()]
    values = iter(torch.stack(numbers).tolist())
    metrics: dict[str, Metric] = {name: Sum(next(values)) for name in (*sums, *counts)}
    weights = {name: next(values) for name in figures}
    return metrics | {
        name: Mean(mean, weight) for (name, weight), mean in zip(weights.items(), values, strict=True) if weight
    }


def refuse_bad_values(
    item: str,
    arrays: Mapping[str, tuple[Tensor | None, str | None]],
    lengths: Mapping[str, Tensor] | None = None,
    place: Callable[[int], str] | None = None,
) -> None:
    """Raise where an array holds infinities or NaN, or a response has no token; one transfer from the device if not.

    Args:
        arrays: Values of all items, and what to do where they are not finite.
        lengths: Numbers of tokens of each item's responses, at least 1.
        place: Says where an item is, up to "in this micro-batch"; by default its index.
    """
    lengths = lengths or {}
    present = [(name, array.detach(), fix) for name, (array, fix) in arrays.items() if array is not None]
    fine = [array.isfinite().all() for _, array, _ in present] + [(tokens > 0).all() for tokens in lengths.values()]
    if torch.stack(fine).all():
        return
    for name, array, fix in present:
        bad = (~array.isfinite()).nonzero().flatten().tolist()
        if bad:
            where = f"{item} {bad[0]} (of {len(array)}" if place is None else place(bad[0])
            raise EngineError(
                f"{name} hold {float(array[bad[0]])} at {where} in this micro-batch; {len(bad)} such {item}s in all); "
                "finite numbers were expected",
                fix=fix,
            )
    for name, tokens in lengths.items():
        empty = (tokens <= 0).nonzero().flatten().tolist()
        if empty:
            raise EngineError(
                f"the {name} of {item} {empty[0]} has {int(tokens[empty[0]])} tokens "
                f"(of {len(tokens)} {item}s in this micro-batch); at least 1 was expected",
                fix="leave rows without a response token out of the data",
            )
