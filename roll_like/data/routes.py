"""Which experts of a mixture an engine computed tokens with: arrays [T, layers, k] beside the tokens.

A route is the experts of one token in one layer. The largest number of the dtype stands for a route that is not known:
of the last token of a sample, which is never computed, of layers without experts, and of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from roll_like.types import RouteArray


def route_dtype(experts: int) -> np.dtype[Any]:
    """Return the smallest type that tells this many experts, and none of them, apart.

    >>> route_dtype(255).name, route_dtype(256).name
    ('uint8', 'uint16')
    """
    return np.dtype(np.uint8 if experts < 256 else np.uint16)


def unknown(routes: RouteArray | np.dtype[Any]) -> int:
    """Return what stands for a route that is not known."""
    return int(np.iinfo(routes if isinstance(routes, np.dtype) else routes.dtype).max)


def known_routes(found: npt.NDArray[Any], experts: int, tokens: int) -> RouteArray:
    """Return what an engine told of the first tokens of a sample, with unknown routes for the others.

    Args:
        found: Shape [at most tokens, layers, k]. Negative numbers stand for what is not known.
        tokens: T.

    Raises:
        ValueError: There are routes of more tokens, or to experts that the model does not have.
    """
    if len(found) > tokens or (found.size and int(found.max()) >= experts):
        raise ValueError(
            f"routes of {len(found)} tokens to experts up to {int(found.max(initial=-1))}; expected at most {tokens} "
            f"tokens and experts below {experts}"
        )
    dtype = route_dtype(experts)
    routes = np.full((tokens, *found.shape[1:]), unknown(dtype), dtype)
    routes[: len(found)] = np.where(found < 0, unknown(dtype), found)
    return routes


def continued(earlier: RouteArray | None, later: RouteArray | None) -> RouteArray | None:
    """Return the routes of a sequence that has grown; known ones stay as they were when tokens were sampled with them.

    Args:
        earlier: Of the first tokens; None where nothing is known.
        later: Of all tokens.
    """
    if earlier is None or later is None:
        return later
    first = later[: len(earlier)]
    kept = np.where(earlier == unknown(earlier), first, earlier)
    joined: RouteArray = np.concatenate([kept, later[len(earlier) :]])
    return joined


def joined_routes(pieces: Sequence[tuple[RouteArray | None, int]]) -> RouteArray | None:
    """Return the routes of pieces one after another, unknown where a piece has none; None where none has any.

    Args:
        pieces: The routes of each, and its number of tokens.
    """
    model = next((routes for routes, _ in pieces if routes is not None), None)
    if model is None:
        return None
    filled = [
        np.full((tokens, *model.shape[1:]), unknown(model), model.dtype) if routes is None else routes
        for routes, tokens in pieces
    ]
    return np.concatenate(filled)
