"""Exact retrieval metrics at any size; needs torch and numpy alone."""

from roadmap.metrics.ranking import retrieval_metrics

__all__ = ["retrieval_metrics"]
