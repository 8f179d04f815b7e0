"""Training: settings in, a run folder out."""

from roadmap.engine.auto import resolve
from roadmap.engine.continuation import fit_or_resume
from roadmap.engine.forecast import Plan, plan
from roadmap.engine.state import TrainState
from roadmap.engine.stopping import Stopped
from roadmap.engine.training import fit, resume
from roadmap.engine.watch import NonFiniteError

__all__ = ["NonFiniteError", "Plan", "Stopped", "TrainState", "fit", "fit_or_resume", "plan", "resolve", "resume"]
