"""The one error type of every service, and its two wire forms: google.rpc.Status and HTTP.

Follows google.rpc's error model (AIP-193): a status code for machines that only know gRPC, an
`ErrorInfo` with a stable reason for machines that know sealmesh, one line of prose for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, Self, cast, get_args

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

__all__ = ["DOMAIN", "REASONS", "STATUS_DETAILS_KEY", "Reason", "SealmeshError"]

DOMAIN: Final = "sealmesh.dev"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"

# Names of common.v1.ErrorReason without their prefix; a test keeps both lists equal. A Literal, so
# that a misspelt reason is found by mypy and not by a user.
Reason = Literal[
    "INVALID_REQUEST",
    "CREDENTIAL_INVALID",
    "ROLE_DENIED",
    "QUOTA_EXCEEDED",
    "MODEL_NOT_FOUND",
    "MODEL_NOT_READY",
    "CONTEXT_TOO_LONG",
    "MESSAGE_TOO_LARGE",
    "PII_BLOCKED",
    "FIELD_REFUSED",
    "INTEGRITY_FAILURE",
    "KEY_DENIED",
    "KEY_SLOT_MISMATCH",
    "LEASE_EXPIRED",
    "DEADLINE_EXCEEDED",
    "OVERLOADED",
    "ENGINE_FAILED",
    "STREAM_NOT_RESUMABLE",
    "LAYOUT_MISMATCH",
    "DEPENDENCY_UNAVAILABLE",
    "CONFIGURATION_INVALID",
    "INTERNAL",
    "UNKNOWN_METHOD",
    "NOT_FOUND",
    "CANCELLED",
]
REASONS: Final[tuple[str, ...]] = get_args(Reason)

_HTTP_BY_REASON: Final[Mapping[str, int]] = {
    "MESSAGE_TOO_LARGE": 413,
    "CONFIGURATION_INVALID": 500,
    "UNKNOWN_METHOD": 404,
}

_HTTP_BY_CODE: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAUTHENTICATED: 401,
}

# What a status without our details most likely means: it comes from the channel itself or from a
# server that is not ours.
_REASON_BY_CODE: Final[Mapping[grpc.StatusCode, Reason]] = {
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_REQUEST",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.NOT_FOUND: "NOT_FOUND",
    grpc.StatusCode.PERMISSION_DENIED: "ROLE_DENIED",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "OVERLOADED",
    grpc.StatusCode.FAILED_PRECONDITION: "INVALID_REQUEST",
    grpc.StatusCode.OUT_OF_RANGE: "INVALID_REQUEST",
    grpc.StatusCode.UNIMPLEMENTED: "UNKNOWN_METHOD",
    grpc.StatusCode.UNAVAILABLE: "DEPENDENCY_UNAVAILABLE",
    grpc.StatusCode.DATA_LOSS: "INTEGRITY_FAILURE",
    grpc.StatusCode.UNAUTHENTICATED: "CREDENTIAL_INVALID",
}

_CODE_BY_NUMBER: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

# Status and details travel in HTTP/2 trailers, which peers bound to 8 KiB by default.
_MAX_MESSAGE_CHARS: Final = 1024
_MAX_METADATA_CHARS: Final = 256


class _Failed(Protocol):
    """What grpc.RpcError (sync and aio) really offers; its base class declares nothing."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class SealmeshError(Exception):
    """A failure with a meaning that callers can act on.

    Args:
        code: canonical gRPC code.
        reason: name of a common.v1.ErrorReason without its prefix.
        message: one line: what is wrong, where, what to do. It reaches the caller, so it never holds
            prompts, answers, keys or personal data.
        metadata: short machine-readable facts, carried in ErrorInfo (values at most 256 characters).
        field: path of the offending request field; adds a BadRequest detail.
        retry_after_s: seconds after which a retry makes sense; adds a RetryInfo detail.
        quota_subject: what the exhausted quota counts for; adds a QuotaFailure detail.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        quota_subject: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason: Reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.field = field
        self.retry_after_s = retry_after_s
        self.quota_subject = quota_subject

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"SealmeshError({self.code.name}, {self.reason!r}, {self.message!r})"

    @property
    def http_status(self) -> int:
        """HTTP status that the REST skins answer with."""
        return _HTTP_BY_REASON.get(self.reason) or _HTTP_BY_CODE[self.code]

    def to_status(self) -> status_pb2.Status:
        """The error as google.rpc.Status, ErrorInfo first."""
        text = _cut(self.message, _MAX_MESSAGE_CHARS)
        details: list[message.Message] = [
            error_details_pb2.ErrorInfo(
                reason=self.reason,
                domain=DOMAIN,
                metadata={key: _cut(value, _MAX_METADATA_CHARS) for key, value in self.metadata.items()},
            )
        ]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=text)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.quota_subject is not None:
            exceeded = error_details_pb2.QuotaFailure.Violation(subject=self.quota_subject, description=text)
            details.append(error_details_pb2.QuotaFailure(violations=[exceeded]))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(max(0, round(self.retry_after_s * 1000)))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        return status_pb2.Status(code=self.code.value[0], message=text, details=[_pack(d) for d in details])

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> Self:
        """The error that `to_status` of a peer described; details of other domains are ignored."""
        code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
        reason = reason_of(code)
        metadata: dict[str, str] = {}
        field: str | None = None
        quota_subject: str | None = None
        retry_after_s: float | None = None
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        quota = error_details_pb2.QuotaFailure()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
                reason, metadata = cast("Reason", info.reason), dict(info.metadata)
            elif detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
                field = next((v.field for v in bad_request.field_violations), None)
            elif detail.Is(quota.DESCRIPTOR) and detail.Unpack(quota):
                quota_subject = next((v.subject for v in quota.violations), None)
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        return cls(
            code,
            reason,
            status.message,
            metadata=metadata,
            field=field,
            retry_after_s=retry_after_s,
            quota_subject=quota_subject,
        )

    @classmethod
    def from_rpc_error(cls, exc: grpc.RpcError) -> Self:
        """What a failed call (grpc.aio or sync) means.

        A status with our details comes back as it was raised; one without is mapped by its code, for
        example UNAVAILABLE to DEPENDENCY_UNAVAILABLE.
        """
        failed = cast("_Failed", exc)
        status = _status_of(failed.trailing_metadata())
        if status is not None and status.code == failed.code().value[0]:
            return cls.from_status(status)
        details = failed.details() or ""
        return cls(failed.code(), reason_of(failed.code(), details), details or failed.code().name)

    @classmethod
    def internal(cls) -> Self:
        """What a caller learns of an unexpected exception: nothing but that it happened."""
        return cls(
            grpc.StatusCode.INTERNAL,
            "INTERNAL",
            "internal error of the service; its log holds the cause under this trace id",
        )


def reason_of(code: grpc.StatusCode, details: str = "") -> Reason:
    """The reason that a bare status code most likely stands for."""
    # gRPC core reports its own size limit with the code of an exhausted quota, told apart by text only.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return "MESSAGE_TOO_LARGE"
    return _REASON_BY_CODE.get(code, "INTERNAL")


def _status_of(trailers: Iterable[tuple[str, str | bytes]] | None) -> status_pb2.Status | None:
    for key, value in trailers or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except message.DecodeError:
                # A peer that is not ours may put anything here; the bare code still tells enough.
                return None
    return None


def _pack(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
