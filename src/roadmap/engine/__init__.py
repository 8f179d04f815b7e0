"""Training: settings in, a run folder out."""

from roadmap.engine.auto import resolve
from roadmap.engine.fit import fit, resume
from roadmap.engine.forecast import Plan, plan
from roadmap.engine.state import TrainState
from roadmap.engine.step import NonFiniteError

__all__ = ["NonFiniteError", "Plan", "TrainState", "fit", "plan", "resolve", "resume"]
