"""A tiny service for supervisor tests: answers /readyz and /healthz and misbehaves on request.

Its flags: `--port`, `--journal FILE` (a line is appended at start and at an ordered stop), `--grandchild`
(starts a process in another session, as a daemonised Redis is), `--nameless` (the grandchild stays in the
session and shows no environment, as a program that sets its title), `--exit CODE` (prints and ends at once),
`--ignore-term` (must be killed), `--sick-file FILE` (while it exists, /healthz answers 503).
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="service")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--grandchild", type=Path)
    parser.add_argument("--nameless", action="store_true")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--sick-file", type=Path)
    arguments = parser.parse_args()

    def journal(event: str) -> None:
        if arguments.journal is not None:
            with arguments.journal.open("a") as file:
                file.write(f"{event} {arguments.name}\n")

    if arguments.exit is not None:
        print("first line of the reason", "second line of the reason", sep="\n", flush=True)
        sys.exit(arguments.exit)
    if arguments.grandchild is not None:
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
            start_new_session=not arguments.nameless,
            env={} if arguments.nameless else None,
        )
        arguments.grandchild.write_text(str(child.pid))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sick = arguments.sick_file is not None and arguments.sick_file.exists()
            self.send_response(503 if sick and self.path == "/healthz" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def terminate(*_: object) -> None:
        if not arguments.ignore_term:
            journal("stop")
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    http.server.ThreadingHTTPServer.allow_reuse_address = True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    journal("start")
    print(f"{arguments.name} listens", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
