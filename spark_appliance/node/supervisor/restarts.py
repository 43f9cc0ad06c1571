"""How often the whole group may be started again, and after what wait."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Restarts:
    """Counts restarts in a sliding window; times are seconds of a monotonic clock."""

    limit: int
    window: float
    backoff: tuple[int, ...]
    times: list[float] = field(default_factory=list)

    def next(self, now: float) -> float | None:
        """Count one restart and return the seconds to wait before it; None: no more are left."""
        self.times = [moment for moment in self.times if now - moment < self.window]
        used = len(self.times)
        if used >= self.limit:
            return None
        self.times.append(now)
        return float(self.backoff[min(used, len(self.backoff) - 1)]) if self.backoff else 0.0
