"""The three surfaces of the gateway in front of the real engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from tests.support.mesh import MAX_MODEL_LEN, MODEL, RunningMesh, contains_any

pytestmark = pytest.mark.engine

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
VALUES = ("11010519491231002X", "13800138000", "zhang.san@example.com", "6222021234567890128")


@pytest_asyncio.fixture
async def api(mesh: RunningMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key=mesh.api_key, max_retries=0, timeout=300
    ) as client:
        yield client


async def test_stream_and_whole_answer_say_the_same(api: openai.AsyncOpenAI) -> None:
    whole = await api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    stream = await api.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_what_the_engine_can_do_reaches_the_caller(api: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "sea": {"type": "boolean"}},
        "required": ["city", "sea"],
        "additionalProperties": False,
    }
    answer = await api.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "").keys() == {"city", "sea"}
    several = await api.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        n=2,
        seed=7,
        temperature=1,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].logprobs is not None
    assert several.choices[0].logprobs.content is not None
    assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2
    stopped = await api.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=30, stop=["8"]
    )
    assert "8" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


async def test_a_prompt_longer_than_the_context(api: openai.AsyncOpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await api.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "word " * (MAX_MODEL_LEN + 100)}],
                stream=stream,
            )
        assert str(MAX_MODEL_LEN) in caught.value.message
        assert "context length" in caught.value.message


async def test_rest_and_grpc_say_the_same(mesh: RunningMesh) -> None:
    body = {"prompt": "The capital of France is", "sampling": {"maxTokens": 8, "temperature": 0}}
    async with httpx.AsyncClient(headers=mesh.headers, timeout=300) as http:
        reply = await http.post(f"{mesh.url}/api/v1/models/{MODEL}:generateText", json=body)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    text = "".join(line.get("textDelta", "") for line in lines)
    assert "Paris" in text
    assert lines[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"
    metadata = (("authorization", f"Bearer {mesh.api_key}"),)
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateTextRequest(
            model=f"models/{MODEL}",
            prompt="The capital of France is",
            sampling=gateway_pb2.SamplingOptions(max_tokens=8, temperature=0),
        )
        parts = [part async for part in stub.GenerateText(request, metadata=metadata)]
    assert "".join(part.text_delta for part in parts) == text
    assert parts[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert parts[-1].finish.usage.completion_tokens == 8


async def test_the_model_never_sees_personal_data(
    mesh: RunningMesh, api: openai.AsyncOpenAI, note: list[str]
) -> None:
    """Logprobs show what the model itself read and wrote; the text that the caller gets has the originals."""
    faithful = asked = 0
    for value in VALUES:
        for stream in (False, True):
            messages: list[Any] = [
                {"role": "user", "content": f"Repeat this exactly and say nothing else: {value}"}
            ]
            text = tokens = ""
            if stream:
                async for chunk in await api.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_tokens=40, stream=True
                ):
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            else:
                whole = await api.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    temperature=0,
                    max_tokens=40,
                    logprobs=True,
                )
                text = whole.choices[0].message.content or ""
                logprobs = whole.choices[0].logprobs
                assert logprobs is not None
                tokens = "".join(entry.token for entry in logprobs.content or ())
                assert value not in tokens
            asked += 1
            faithful += value in text
    note.append(f"the demo model echoed {faithful} of {asked} placeholders faithfully")
    logs = sorted((mesh.state.root / "logs").glob("*.log")) + sorted((mesh.state.root / "traces").glob("*"))
    assert logs
    for path in logs:
        assert not contains_any(path, [value.encode() for value in VALUES]), path


async def test_a_caller_that_leaves_frees_the_engine(mesh: RunningMesh) -> None:
    """Counted where it matters: the engine runs nothing, soon after."""

    async def running(http: httpx.AsyncClient) -> float:
        text = (await http.get(mesh.metrics_url("worker-0"))).text
        samples = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
        ]
        assert samples, "the worker exposes no engine metrics"
        return sum(samples)

    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(headers=mesh.headers, timeout=300) as http:
        async with http.stream("POST", f"{mesh.url}/v1/chat/completions", json=body) as reply:
            lines = reply.aiter_lines()
            for _ in range(6):
                await anext(lines)
        left = time.monotonic()
        async with asyncio.timeout(5):
            while await running(http) > 0:
                pass
    assert time.monotonic() - left < 3


def test_the_examples_need_no_change(mesh: RunningMesh) -> None:
    examples = Path(__file__).parents[2] / "examples"
    environment = os.environ | {
        "SEALMESH_API_KEY": mesh.api_key,
        "SEALMESH_URL": mesh.url,
        "SEALMESH_GRPC": mesh.grpc_address,
    }
    for command in (
        [sys.executable, str(examples / "chat_openai.py")],
        [sys.executable, str(examples / "chat_grpc.py")],
        ["sh", str(examples / "generate_text_rest.sh")],
    ):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
