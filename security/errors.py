"""The errors of this area, so that the same failure reads the same wherever it is found."""

from __future__ import annotations

from pathlib import PurePath

import grpc
from sealmesh.telemetry.runtime.errors import SealmeshError


def integrity_failure(
    message: str, *, file: str | PurePath = "", tensor: str = "", chunk: int | None = None
) -> SealmeshError:
    """DATA_LOSS/INTEGRITY_FAILURE; the message ends with the place: file, tensor and chunk."""
    metadata = {}
    place = []
    for name, value in (
        ("file", str(file)),
        ("tensor", tensor),
        ("chunk", "" if chunk is None else str(chunk)),
    ):
        if value:
            metadata[name] = value
            place.append(f"{name} {value}")
    text = f"{message} ({', '.join(place)})" if place else message
    return SealmeshError(grpc.StatusCode.DATA_LOSS, "INTEGRITY_FAILURE", text, metadata=metadata)


def slot_mismatch(message: str) -> SealmeshError:
    """UNAUTHENTICATED/KEY_SLOT_MISMATCH: the secret opens no slot."""
    return SealmeshError(grpc.StatusCode.UNAUTHENTICATED, "KEY_SLOT_MISMATCH", message)


def configuration_invalid(message: str) -> SealmeshError:
    """FAILED_PRECONDITION/CONFIGURATION_INVALID: a setting or a file that a setting names is wrong."""
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)


def invalid_request(message: str) -> SealmeshError:
    """INVALID_ARGUMENT/INVALID_REQUEST: what was asked for makes no sense as it stands."""
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message)


def not_found(message: str) -> SealmeshError:
    """NOT_FOUND/NOT_FOUND: nothing is there."""
    return SealmeshError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", message)


def already_exists(message: str) -> SealmeshError:
    """ALREADY_EXISTS/INVALID_REQUEST: refuses to overwrite."""
    return SealmeshError(grpc.StatusCode.ALREADY_EXISTS, "INVALID_REQUEST", message)
