"""First code of every child: ask the kernel to kill it when the launcher dies, then become the real program.

Run by path, isolated (`python -I -S boot.py LAUNCHER_PID PROGRAM ARGS...`), so it imports nothing of PSRL. The request
survives exec. A launcher that died before it was made is noticed by the changed parent; nobody is left to hear of it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != launcher:
        os._exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
