"""Predicts a training step from the configuration that would run it: time, memory and what is exposed. No torch.

:func:`predict` takes a :class:`~optimus_cc.config.run.RunConfig` whose cluster says what its devices and links do, and
returns a :class:`Prediction`. This interface is frozen: fields may be added, none changes its meaning.
"""

from optimus_cc.simulation.predict import Breakdown, Prediction, baseline_of, predict, speedup_percent

__all__ = ["Breakdown", "Prediction", "baseline_of", "predict", "speedup_percent"]
