"""Cleans up after a launcher that was killed: process groups and private folders, within moments.

The parent-death signal (`psrl.launch.boot`) reaches a launcher's children, not theirs. So each launcher starts one
guard and tells it over a pipe what exists:

    +GROUP    a process group lives        -GROUP    it is gone        rm PATH    a folder to remove at the end

The end of the pipe, however it came about, is the launcher's end: the guard kills the groups left, removes the folders,
and ends. Run by path, isolated, in a session of its own; it imports nothing of PSRL.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        line = line.rstrip("\n")
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
        elif line.startswith("rm "):
            folders.append(line[3:])
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
