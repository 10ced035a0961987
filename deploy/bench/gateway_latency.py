"""`gateway_added_p50_ms`: what the gateway adds to a request, against gRPC straight to the worker."""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import Callable

import httpx
from sealmesh.deploy.bench.figures import Summary, confidence_95
from sealmesh.deploy.bench.load import client_of
from sealmesh.deploy.bench.rigs import BenchError, MeshRig
from sealmesh.deploy.local.first_run import DEMO_TENANT
from sealmesh.deploy.local.mesh_config import LOCAL_NAME, tls_files
from sealmesh.deploy.local.state import StateFolder
from sealmesh.gateway.access.tenants import TenantDeriver, read_secret_file
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2, inference_pb2_grpc
from sealmesh.security.tls import TlsFiles, channel_credentials
from sealmesh.telemetry.runtime.channel import open_channel

MAX_TOKENS = 1
_WARM_UP = 5
_PATH = "/v1/chat/completions"


async def measure_gateway(mesh: MeshRig, *, pairs: int, tell: Callable[[str], None]) -> dict[str, object]:
    """The same unary request (one token) by HTTP through the gateway and by gRPC to the worker, in turns."""
    endpoint = mesh.endpoint
    body = json.dumps(
        {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
    ).encode()
    tenant = TenantDeriver(read_secret_file(mesh.state.gateway_secret)).context(DEMO_TENANT, 1)
    channel = open_channel(
        mesh.worker_address, channel_credentials(_operator(mesh.state)), expected_role="worker"
    )
    through: list[float] = []
    straight: list[float] = []
    async with channel, client_of(endpoint) as client:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        tell(f"gateway: {pairs} pairs of requests")
        for number in range(-_WARM_UP, pairs):
            if number % 2 == 0:
                by_gateway, by_worker = await _post(client, body), await _call(stub, body, tenant)
            else:
                by_worker, by_gateway = await _call(stub, body, tenant), await _post(client, body)
            if number >= 0:
                through.append(by_gateway * 1000)
                straight.append(by_worker * 1000)
    added = [ours - theirs for ours, theirs in zip(through, straight, strict=True)]
    low, high = confidence_95(added)
    return {
        "value": round(statistics.median(added), 3),
        "confidence_95": [round(low, 3), round(high, 3)],
        "unit": "ms, median over pairs of (through the gateway - straight to the worker)",
        "added_ms": Summary.of(added).json(),
        "gateway_ms": Summary.of(through).json(),
        "worker_ms": Summary.of(straight).json(),
    }


async def _post(client: httpx.AsyncClient, body: bytes) -> float:
    started = time.perf_counter()
    response = await client.post(_PATH, content=body, headers={"Content-Type": "application/json"})
    elapsed = time.perf_counter() - started
    if response.status_code != httpx.codes.OK or response.json()["usage"]["completion_tokens"] != MAX_TOKENS:
        raise BenchError(f"the gateway answered HTTP {response.status_code}: {response.text[:300]}")
    return elapsed


async def _call(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, body: bytes, tenant: types_pb2.TenantContext
) -> float:
    request = inference_pb2.ServeOpenAIRequest(
        request_id=uuid.uuid4().hex, path=_PATH, body=body, tenant=tenant
    )
    started = time.perf_counter()
    status, finished = 0, False
    async for response in stub.ServeOpenAI(request):
        status = response.head.status or status
        finished = finished or response.HasField("finish")
    elapsed = time.perf_counter() - started
    if status != httpx.codes.OK or not finished:
        raise BenchError(f"the worker answered status {status} and {'a' if finished else 'no'} finish")
    return elapsed


def _operator(state: StateFolder) -> TlsFiles:
    certificate, key = tls_files(state, "operator", LOCAL_NAME)
    return TlsFiles(state.tls / "ca.pem", certificate, key)
