"""Roots, slots, signatures and wrapped keys."""
