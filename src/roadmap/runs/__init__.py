"""Runs on disk: what is written while one trains, and what is read of it later."""

from roadmap.runs.comparison import table
from roadmap.runs.folder import Run

__all__ = ["Run", "table"]
