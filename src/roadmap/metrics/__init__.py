"""Exact retrieval metrics at any size; needs torch and numpy alone."""

from roadmap.metrics.counted import average_precision
from roadmap.metrics.decomposability import DecomposabilityGap, mean_decomposability_gap
from roadmap.metrics.graded import graded_metrics
from roadmap.metrics.ranking import retrieval_metrics
from roadmap.metrics.revisited import (
    GroundTruth,
    load_ground_truth,
    revisited_metrics,
    revisited_metrics_of_vectors,
    trapezoidal_average_precision,
)

__all__ = [
    "DecomposabilityGap",
    "GroundTruth",
    "average_precision",
    "graded_metrics",
    "load_ground_truth",
    "mean_decomposability_gap",
    "retrieval_metrics",
    "revisited_metrics",
    "revisited_metrics_of_vectors",
    "trapezoidal_average_precision",
]
