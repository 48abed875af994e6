"""Prints the outcome of the attack suite: category, number, statuses, breaches.

python tests/sandbox/attack_table.py [backend]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from attacks.suite import Arena, host, suite


def main(backend: str) -> int:
    """Run the suite and return the number of programs that did not come out as expected."""
    begin, surprises, total, programs = time.monotonic(), [], 0, 0
    print(f"{'category':<18}{'programs':>9}{'runs':>6}{'as expected':>13}  statuses")
    with tempfile.TemporaryDirectory() as folder, host(Path(folder)) as target:
        arena = Arena(backend)
        try:
            for category, attacks in suite(str(target.canary), target.port).items():
                statuses: Counter[str] = Counter()
                expected = 0
                for attack in attacks:
                    for kind in attack.kinds:
                        result = arena.run(attack, kind)
                        statuses[result.status.value] += 1
                        expected += result.status in attack.statuses
                        if result.status not in attack.statuses:
                            surprises.append(f"{category}: {attack.name} ({kind}): {result.tests[0]}")
                runs = sum(statuses.values())
                total, programs = total + runs, programs + len(attacks)
                listed = ", ".join(f"{name} {count}" for name, count in statuses.most_common())
                print(f"{category:<18}{len(attacks):>9}{runs:>6}{expected:>13}  {listed}", flush=True)
        finally:
            arena.close()
        harm = target.harm()
    print(f"{'all':<18}{programs:>9}{total:>6}{total - len(surprises):>13}  {time.monotonic() - begin:.0f} s")
    print(f"host: {harm or 'untouched'}")
    for surprise in surprises:
        print(surprise[:400])
    return len(surprises) + (harm is not None)


if __name__ == "__main__":
    sys.exit(min(1, main(*(sys.argv[1:] or ["auto"]))))
