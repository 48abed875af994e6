"""Train: `python run_pipeline.py --config FILE [key=value …] [--check] [--resume [RUN]]`, as `roll-like run` does."""

import sys

from roll_like.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
