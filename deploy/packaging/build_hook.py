"""Hatch build hook that lays out the ``sealmesh`` import package.

The repository has one top-level folder per service; the distribution has one import package.
A wheel gets ``package_root.py`` as ``sealmesh/__init__.py``. An editable install gets a tree of
relative links, ``.dev/sealmesh/<name>``, so that plain path entries (and no import hook) resolve
``sealmesh.*`` for the interpreter, mypy, pyright and pytest alike.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT_MODULE = "deploy/packaging/package_root.py"


class SealmeshBuildHook(BuildHookInterface[BuilderConfig]):
    """Called by hatchling for the wheel target only (a global hook would break the sdist)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version != "editable":
            build_data["force_include"][str(root / ROOT_MODULE)] = "sealmesh/__init__.py"
            return
        links = root / ".dev/sealmesh"
        links.mkdir(parents=True, exist_ok=True)
        sources = {Path(target).name: source for source, target in self.build_config.sources.items()}
        for name, source in {**sources, "__init__.py": ROOT_MODULE}.items():
            link = links / name
            target = os.path.relpath(root / source, links)
            if link.is_symlink() and link.readlink() != Path(target):
                link.unlink()
            if not link.is_symlink():
                link.symlink_to(target)
