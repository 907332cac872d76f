"""PeakMemory: how much memory a process needs at most, beyond what it held when the watch began."""

from __future__ import annotations

from pathlib import Path

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK_AGAIN = "5"  # the kernel's word for: count the peak from now on


class PeakMemory:
    """Watches the resident memory of this process, which Linux counts; elsewhere nothing is known.

    Pages of files do not count: they are libraries, whose code is read when it first runs.
    """

    def __init__(self) -> None:
        self._before = _sizes()

    def forget(self) -> None:
        """Leave out the peak so far: of what was built, say, before it was cut."""
        if self._before:
            FORGET.write_text(PEAK_AGAIN)

    def beyond(self, other: int) -> int | None:
        """The peak since then in bytes, less `other` bytes that do not count; None where it is not known."""
        now, before = _sizes(), self._before
        if not now or not before:
            return None
        code = now["RssFile"] - before["RssFile"]
        return max(0, now["VmHWM"] - before["VmRSS"] - code - other)


def _sizes() -> dict[str, int]:
    """Bytes by the kernel's names; empty where it does not tell."""
    names = ("VmRSS", "VmHWM", "RssFile")
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    told = dict(line.split(":", 1) for line in lines if line.startswith(names))
    return {name: 1024 * int(told[name].split()[0]) for name in names} if len(told) == len(names) else {}
