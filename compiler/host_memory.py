"""What the host can still give, so that more is refused and not taken until the process ends."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory() -> int:
    """Bytes of the host that processes may still take; those that the machine has where nothing says that."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
