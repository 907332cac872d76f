"""What /proc shows: the secrets that a process holds, and the command lines and variables of all."""

from __future__ import annotations

from pathlib import Path


def secrets_of(pid: int) -> dict[str, str]:
    """The secrets that a process holds open, by name."""
    found: dict[str, str] = {}
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return found  # it has ended, or is not ours
    for path in opened:
        try:
            name = str(path.readlink())
            if name.startswith("/memfd:shoal-") and path.stat().st_mode & 0o777 == 0o600:
                found[name.removeprefix("/memfd:shoal-").split()[0]] = path.read_text()
        except OSError:
            continue  # closed meanwhile
    return found


def read_all(name: str) -> list[bytes]:
    """That file of every process."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # it has ended
    return found
