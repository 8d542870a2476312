"""Before a run: does it fit, where does its memory peak, and what is the machine."""

from model_center.plan.forecast import Forecast, Source, forecast
from model_center.plan.settings import GPUS, Machine, Settings

__all__ = ["GPUS", "Forecast", "Machine", "Settings", "Source", "forecast"]
