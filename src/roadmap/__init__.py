"""Robust and decomposable average precision for image retrieval (ROADMAP, NeurIPS 2021)."""

__version__ = "0.1.0"
