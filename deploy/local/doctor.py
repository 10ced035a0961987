"""`sealmesh doctor`: whether this machine can run a mesh, and what to do where it cannot.

Looks at files, versions and sockets only and never imports torch or vLLM, so it answers within seconds
also where the engine is broken. `run_checks` is the whole of it; the command line prints the result.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from sealmesh.deploy.local import doctor_host, doctor_mesh, doctor_packages
from sealmesh.deploy.local.doctor_check import Check, Status
from sealmesh.deploy.local.state import StateFolder

__all__ = ["Check", "Report", "Status", "run_checks"]


@dataclass(frozen=True)
class Report:
    """What was found, in the order in which things depend on one another."""

    checks: tuple[Check, ...]
    seconds: float
    """Wall time of all checks."""

    @property
    def status(self) -> Status:
        """The worst of all: "ok", "warn" or "fail"."""
        found = {check.status for check in self.checks}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def to_json(self) -> str:
        """One JSON object: `status`, `seconds` and `checks`, each with name, status, detail and hint."""
        body = {
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "checks": [asdict(check) for check in self.checks],
        }
        return json.dumps(body, indent=2, ensure_ascii=False)


def run_checks(state: StateFolder) -> Report:
    """Every check, for the mesh of this state folder, which need not exist yet."""
    began = time.monotonic()
    mesh = doctor_mesh.MeshView.of(state)
    packages = doctor_packages.installed_packages()
    found: list[Check] = []
    for name, check in _plan(state, mesh, packages):
        found.extend(_guarded(name, check))
    return Report(tuple(found), time.monotonic() - began)


def _plan(
    state: StateFolder, mesh: doctor_mesh.MeshView, packages: doctor_packages.Packages
) -> Sequence[tuple[str, Callable[[], Iterable[Check]]]]:
    host = doctor_host
    return (
        ("device", mesh.check_device),
        (
            "python",
            lambda: doctor_packages.check_python(
                sys.version_info[:2], sys.prefix, sysconfig.get_platform(), platform.libc_ver()
            ),
        ),
        ("engine", lambda: doctor_packages.check_engine(packages)),
        ("engine device", lambda: mesh.check_engine_device(packages)),
        ("plugins", lambda: doctor_packages.check_plugins(os.environ)),
        ("SM4", host.check_sm4),
        ("settings", mesh.check_settings),
        ("state", lambda: doctor_mesh.check_permissions(state)),
        ("Redis", mesh.check_redis),
        ("ports", mesh.check_ports),
        ("memory", mesh.check_memory),
        ("private memory", lambda: host.check_private_folder(mesh.private_dir)),
        ("disk", lambda: host.check_disk(state.root)),
        ("swap", host.check_swap),
        ("open files", host.check_open_files),
        ("proxy", lambda: host.check_proxy(os.environ)),
        ("logs", lambda: doctor_mesh.check_logs(state)),
    )


def _guarded(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    try:
        return [replace(found, name=found.name or name) for found in check()]
    except Exception as error:  # noqa: BLE001  one check that breaks must not hide the others
        detail = f"the check itself broke: {type(error).__name__}: {error}"
        return [Check(name, "fail", detail, "report it; it is a defect in sealmesh doctor")]
