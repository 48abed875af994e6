"""What MLflow's client does not do for a SQLite store of its own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def check_database(path: Path) -> None:
    """Fail at once for a file that MLflow would retry for half an hour."""
    try:
        with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be used as a SQLite store: {error}") from error


def cut_series(database: Path, run_id: str, last_step: int) -> None:
    """Remove a run's points after `last_step`, so that steps which are run again are not there twice."""
    with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE run_uuid = ? AND step > ?", (run_id, last_step))
        connection.execute("DELETE FROM latest_metrics WHERE run_uuid = ?", (run_id,))
        # SQLite takes the bare columns from the row that holds the maximum
        connection.execute(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics WHERE run_uuid = ? GROUP BY key",
            (run_id,),
        )
