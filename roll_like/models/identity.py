"""Which model a directory holds, whatever it is called and however its tensors are divided among files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Numbers of each tensor that are looked at: the first ones of a row in its middle. First rows may be of padding.
LOOKED_AT = 256


def identity_of(directory: Path) -> str:
    """Return what tells a model from others: its precisions, and two hashes of some numbers of all of its tensors.

    The first hash is of the numbers themselves; the second of their signs, which another precision leaves as they are.
    """
    import torch
    import xxhash
    from safetensors import safe_open

    found: list[tuple[str, bytes, bytes]] = []
    precisions: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                stored: Any = file.get_slice(name)
                shape = tuple(stored.get_shape())
                middle = (*(slice(size // 2, size // 2 + 1) for size in shape[:-1]), slice(0, LOOKED_AT))
                part: Any = stored[middle] if shape else file.get_tensor(name)
                flat = part.contiguous().reshape(-1)
                signs = torch.signbit(flat.float()).numpy().tobytes()
                found.append((f"{name} {shape} ", flat.view(torch.uint8).numpy().tobytes(), signs))
                precisions.add(str(stored.get_dtype()))
    exact, coarse = xxhash.xxh3_64(), xxhash.xxh3_64()
    for head, numbers, signs in sorted(found):
        exact.update(head.encode() + numbers)
        coarse.update(head.encode() + signs)
    return "/".join(("+".join(sorted(precisions)), exact.hexdigest(), coarse.hexdigest()))


def same_model(one: str, other: str) -> bool:
    """Return whether two results of `identity_of` are of one model, which may have been written in two precisions.

    >>> same_model("F32/11/77", "BF16/22/77"), same_model("F32/11/77", "F32/22/77")
    (True, False)
    >>> same_model("F32/11/77", "BF16/22/78")
    False
    """
    (precision, _, signs), (other_precision, _, other_signs) = (each.split("/") for each in (one, other))
    return one == other if precision == other_precision else signs == other_signs
