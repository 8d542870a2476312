"""Before a run: does it fit, how long will it take, and what is the machine."""

from bmtrain.plan.forecast import Forecast, Forecaster, Source, forecast
from bmtrain.plan.machine import GPUS, Machine
from bmtrain.plan.settings import Settings

__all__ = ["GPUS", "Forecast", "Forecaster", "Machine", "Settings", "Source", "forecast"]
