"""Errors: their details, their HTTP statuses, and the way back."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.protos.common.v1 import errors_pb2
from sealmesh.telemetry.runtime.errors import DOMAIN, REASONS, STATUS_DETAILS_KEY, Reason, SealmeshError

Code = grpc.StatusCode


def rpc_error(code: Code, details: str = "", status: bytes | None = None) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(*(((STATUS_DETAILS_KEY, status),) if status is not None else ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=details)


def test_reasons_are_those_of_the_contract() -> None:
    prefix = "ERROR_REASON_"
    contract = {name.removeprefix(prefix) for name in errors_pb2.ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert set(REASONS) == contract


def test_every_detail_is_packed_where_it_applies() -> None:
    error = SealmeshError(
        Code.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        "out of tokens",
        metadata={"limit": "10"},
        field="max_tokens",
        retry_after_s=1.5,
        quota_subject="tenant",
    )
    status = error.to_status()
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    for packed, detail in zip(status.details, (info, bad_request, quota, retry), strict=True):
        assert packed.Unpack(detail)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, "QUOTA_EXCEEDED", {"limit": "10"})
    assert bad_request.field_violations[0].field == "max_tokens"
    assert quota.violations[0].subject == "tenant"
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert status.code == Code.RESOURCE_EXHAUSTED.value[0]


def test_only_error_info_without_more() -> None:
    assert len(SealmeshError(Code.INTERNAL, "INTERNAL", "x").to_status().details) == 1


@given(
    code=st.sampled_from([code for code in Code if code is not Code.OK]),
    reason=st.sampled_from(REASONS),
    message=st.text(max_size=200),
    metadata=st.dictionaries(st.text(max_size=10), st.text(max_size=50), max_size=3),
    field=st.none() | st.text(min_size=1, max_size=20),
    retry_ms=st.none() | st.integers(0, 10**6),
    subject=st.none() | st.text(min_size=1, max_size=20),
)
def test_round_trip(
    code: Code,
    reason: Reason,
    message: str,
    metadata: dict[str, str],
    field: str | None,
    retry_ms: int | None,
    subject: str | None,
) -> None:
    error = SealmeshError(
        code,
        reason,
        message,
        metadata=metadata,
        field=field,
        retry_after_s=None if retry_ms is None else retry_ms / 1000,
        quota_subject=subject,
    )
    back = SealmeshError.from_rpc_error(rpc_error(code, message, error.to_status().SerializeToString()))
    assert vars(back) == vars(error)
    assert back.http_status == error.http_status


def test_long_texts_are_cut_to_fit_trailers() -> None:
    error = SealmeshError(Code.INTERNAL, "INTERNAL", "x" * 100_000, metadata={"key": "y" * 100_000})
    assert len(error.to_status().SerializeToString()) < 4096


@pytest.mark.parametrize(
    ("code", "reason", "http"),
    [
        (Code.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", 503),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504),
        (Code.CANCELLED, "CANCELLED", 499),
        (Code.UNAUTHENTICATED, "CREDENTIAL_INVALID", 401),
        (Code.UNIMPLEMENTED, "UNKNOWN_METHOD", 404),
        (Code.INTERNAL, "INTERNAL", 500),
        (Code.UNKNOWN, "INTERNAL", 500),
    ],
)
def test_foreign_errors_are_mapped_by_code(code: Code, reason: str, http: int) -> None:
    error = SealmeshError.from_rpc_error(rpc_error(code, "told by the channel"))
    assert (error.code, error.reason, error.http_status) == (code, reason, http)
    assert error.message == "told by the channel"


def test_details_of_another_domain_do_not_set_the_reason() -> None:
    status = status_pb2.Status(code=Code.NOT_FOUND.value[0], message="no")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUOTA_EXCEEDED", domain="example.com"))
    error = SealmeshError.from_rpc_error(rpc_error(Code.NOT_FOUND, "no", status.SerializeToString()))
    assert error.reason == "NOT_FOUND"


@pytest.mark.parametrize(
    "status", [b"\xff\xff\xff", SealmeshError.internal().to_status().SerializeToString()]
)
def test_details_that_are_broken_or_of_another_code_are_ignored(status: bytes) -> None:
    error = SealmeshError.from_rpc_error(rpc_error(Code.UNAVAILABLE, "gone", status))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE")


@pytest.mark.parametrize(
    ("code", "reason", "http"),
    [
        (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE", 413),
        (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", 429),
        (Code.UNAUTHENTICATED, "KEY_SLOT_MISMATCH", 401),
        (Code.FAILED_PRECONDITION, "CONFIGURATION_INVALID", 500),
        (Code.FAILED_PRECONDITION, "LEASE_EXPIRED", 400),
        (Code.DATA_LOSS, "INTEGRITY_FAILURE", 500),
        (Code.NOT_FOUND, "UNKNOWN_METHOD", 404),
    ],
)
def test_http_statuses_of_the_contract(code: Code, reason: Reason, http: int) -> None:
    assert SealmeshError(code, reason, "x").http_status == http


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_an_http_status(code: Code) -> None:
    assert 200 <= SealmeshError(code, "INTERNAL", "x").http_status < 600
