"""Sealed models, format version 1 (docs/sealed-format.md)."""
