"""A process that tokenises rows for another one: see `roll_like.data.tokenise`."""

from __future__ import annotations

import os
import sys

from roll_like.data.tokenise import main

if __name__ == "__main__":
    # what is printed meanwhile must not come between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(sys.stdin.buffer, answers)
