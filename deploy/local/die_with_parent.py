"""Runs a command that is told to stop when the process that started it dies.

Called as a script, `python -I -S die_with_parent.py PARENT_PID COMMAND…`, because it then starts in
some 15 ms. A `preexec_fn` would do the same in the forked child of a process with threads, which is not
safe. The process id stays: the command replaces this script.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>; survives execve


def main() -> None:
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the call above
        sys.exit("the supervisor is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
