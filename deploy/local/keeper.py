"""Ends what a supervisor leaves behind when it is killed.

PR_SET_PDEATHSIG reaches a supervisor's children but not their children (vLLM's EngineCore, Redis). The
keeper is a small process in a session of its own that waits for the supervisor's end of a pipe to close,
which the kernel does however the supervisor ends, and then ends every process of the mesh that is left.

Started as `python -m sealmesh.deploy.local.keeper MESH_ID MESH_JSON GRACE_S` with the pipe as standard
input. MESH_JSON is there only when the supervisor did not stop in order.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from sealmesh.deploy.local.processes import end_family
from sealmesh.deploy.local.record import read_record


def main() -> int:
    mesh_id, record_file, grace_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    # Signals to the terminal's foreground group are the supervisor's business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 64):
        pass
    # The supervisor's own children have had SIGTERM from the kernel and may drain; asking their children
    # as well would take the engine away from under a draining worker.
    record = read_record(record_file)
    sessions = record.sessions() if record is not None and record.mesh_id == mesh_id else []
    end_family(mesh_id, sessions=sessions, grace_s=grace_s, terminate=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
