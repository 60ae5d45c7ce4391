"""Readings of a GPU's sensors while it trains: utilisation, temperature and power of each step."""

import statistics
import threading

import torch

from engine.core.hardware import Gauges, detect, read_gauges

EVERY_S = 1.0  # seconds between two readings


class Telemetry:
    """Reads a GPU's sensors in a thread, until `close` is called or this process ends."""

    def __init__(self, visible: str, every_s: float = EVERY_S) -> None:
        """Read the sensors now, and then every `every_s` seconds in a thread. `visible` is the
        GPU's UUID, as CUDA_VISIBLE_DEVICES names it."""
        self.visible = visible
        self._every_s = every_s
        self._lock = threading.Lock()
        self._readings: list[Gauges] = []
        self._stopped = threading.Event()
        self._read_sensors()
        threading.Thread(target=self._read_repeatedly, name="telemetry", daemon=True).start()

    def close(self) -> None:
        """Make the thread that reads the sensors stop. Does not wait for it."""
        self._stopped.set()

    def step(self) -> dict[str, float]:
        """Return the metrics of all readings since the last call, by name: mean utilisation and
        power, highest temperature. A sensor that the GPU does not have is left out."""
        self._read_sensors()  # a step may be shorter than the time between two readings
        with self._lock:  # the thread may append a reading meanwhile
            readings, self._readings = self._readings, []
        shares = [reading.utilization for reading in readings if reading.utilization is not None]
        degrees = [reading.temperature for reading in readings if reading.temperature is not None]
        watts = [reading.power for reading in readings if reading.power is not None]
        metrics: dict[str, float] = {}
        if shares:
            metrics["gpu_utilization"] = statistics.fmean(shares)
        if degrees:
            metrics["gpu_temperature"] = max(degrees)
        if watts:
            metrics["gpu_power"] = statistics.fmean(watts)
        return metrics

    def _read_repeatedly(self) -> None:
        """Read the sensors every `_every_s` seconds until `close` is called."""
        while not self._stopped.wait(self._every_s):
            self._read_sensors()

    def _read_sensors(self) -> None:
        """Read the sensors once and store the reading for `step`, if the driver answers."""
        gauges = read_gauges(self.visible)
        if gauges is not None:
            with self._lock:
                self._readings.append(gauges)


def telemetry_of(device: torch.device) -> Telemetry | None:
    """Start reading the sensors of the GPU that this process trains on. Returns None if `device` is
    no GPU."""
    return Telemetry(detect().device.visible) if device.type == "cuda" else None
