"""sealmesh: a mesh that serves LLMs from sealed weights, behind a PII filter, with a persistent KV cache."""

from importlib.metadata import version as _version

__all__ = ["__version__"]
__version__ = _version("sealmesh")
