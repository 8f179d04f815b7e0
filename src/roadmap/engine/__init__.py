"""Training: settings in, a run folder out."""

from roadmap.engine.fit import fit, resume
from roadmap.engine.state import TrainState
from roadmap.engine.step import NonFiniteError

__all__ = ["NonFiniteError", "TrainState", "fit", "resume"]
