"""Whether and when a process that ended is started again. Pure: uptimes in, delays out."""

import signal

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True):
    """Start again up to `max_restarts` times, waiting longer each time that it ended soon after its start."""

    max_restarts: int = 0
    backoff_s: float = 0.5
    max_backoff_s: float = 10.0
    healthy_after_s: float = 30.0  # who ran this long waits `backoff_s` again


class Restarts:
    """Counts the restarts of one process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._quick = 0
        self.num = 0

    def after(self, uptime_s: float) -> float | None:
        """Seconds to wait before the next start, or None when there is none."""
        if self.num >= self._policy.max_restarts:
            return None
        if uptime_s >= self._policy.healthy_after_s:
            self._quick = 0
        delay = min(self._policy.backoff_s * 2**self._quick, self._policy.max_backoff_s)
        self._quick += 1
        self.num += 1
        return float(delay)


def reason(returncode: int) -> str:
    """A return code (negative: a signal) in words."""
    if returncode == 0:
        return "ended normally"
    if returncode > 0:
        return f"exit status {returncode}"
    try:
        return f"killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"killed by signal {-returncode}"
