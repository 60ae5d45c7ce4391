"""Readings of a GPU's sensors while it trains: utilisation, temperature and power of each step."""

import statistics
import threading

import torch

from engine.core.hardware import Gauges, detect, read_gauges

EVERY_S = 1.0  # seconds between two readings


class Telemetry:
    """Reads a GPU's sensors in a thread, until `close` is called or this process ends."""

    def __init__(self, visible: str, every_s: float = EVERY_S) -> None:
        """Read the sensors now, and then every `every_s` seconds. `visible` is the GPU's UUID."""
        self.visible = visible
        self._every_s = every_s
        self._lock = threading.Lock()
        self._seen: list[Gauges] = []
        self._over = threading.Event()
        self._look()
        threading.Thread(target=self._keep_looking, name="telemetry", daemon=True).start()

    def close(self) -> None:
        """Stop reading the sensors."""
        self._over.set()

    def step(self) -> dict[str, float]:
        """Return the metrics of all readings since the last call: mean utilisation and power,
        highest temperature. A sensor that the GPU does not have is left out."""
        self._look()  # a step may be shorter than the time between two readings
        with self._lock:
            seen, self._seen = self._seen, []
        shares = [one.utilization for one in seen if one.utilization is not None]
        degrees = [one.temperature for one in seen if one.temperature is not None]
        watts = [one.power for one in seen if one.power is not None]
        metrics: dict[str, float] = {}
        if shares:
            metrics["gpu_utilization"] = statistics.fmean(shares)
        if degrees:
            metrics["gpu_temperature"] = max(degrees)
        if watts:
            metrics["gpu_power"] = statistics.fmean(watts)
        return metrics

    def _keep_looking(self) -> None:
        """Read the sensors every `_every_s` seconds until `close` is called."""
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        """Read the sensors once and keep the reading, if the driver answers."""
        gauges = read_gauges(self.visible)
        if gauges is not None:
            with self._lock:
                self._seen.append(gauges)


def telemetry_of(device: torch.device) -> Telemetry | None:
    """Start reading the sensors of the GPU that this process trains on; None on a CPU."""
    return Telemetry(detect().device.visible) if device.type == "cuda" else None
