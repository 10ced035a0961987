"""The worker with the real engine: a sealed model from a real vault, over real mTLS."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import psutil
import pytest
from sealmesh.deploy.local.demo_model import convert_demo_model
from sealmesh.deploy.local.tiny_deepseek import make_tiny_deepseek
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2 as pb
from sealmesh.protos.inference.v1 import inference_pb2_grpc
from sealmesh.security.keys.signing import create_signing_key, load_signer
from sealmesh.security.keys.sources import KeyFileSource, create_root_key
from sealmesh.security.sealed.writer import seal_folder
from sealmesh.security.tls import LocalAuthority, channel_credentials
from sealmesh.telemetry.runtime.channel import open_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import EXIT_REFUSED

from tests.support.service_process import ServiceProcess, vault_flags

pytestmark = pytest.mark.engine

START_S = 400.0
SMOL = "smollm2"
DEEPSEEK = "tiny-deepseek"
TENANT = types_pb2.TenantContext(handle="ab" * 16, epoch=1, cache_salt="cd" * 16)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Sealed:
    """Two sealed models, the keys that open them, and a vault that serves them."""

    folder: Path
    plain: Path
    models: Path
    verifying_key: Path
    authority: LocalAuthority
    vault: ServiceProcess
    private: Path
    """In memory; where workers open configuration and tokenizer."""

    def worker(self, model: str, *flags: str) -> ServiceProcess:
        """A worker for one of the models, not started."""
        return ServiceProcess(
            "sealmesh.inference",
            ("worker", "worker-0"),
            self.authority,
            [
                *("--model", model, "--vault-address", self.vault.grpc_address),
                *("--verifying-key-file", str(self.verifying_key), "--private-dir", str(self.private)),
                *("--max-model-len", "1024", *flags),
            ],
            start_timeout_s=START_S,
        )


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    folder = tmp_path_factory.mktemp("worker")
    plain = convert_demo_model(folder / "plain").folder
    tiny = make_tiny_deepseek(folder / "tiny", variant="v2", tokenizer_from=plain)
    root_key, private, public = (folder / name for name in ("root.key", "sign.pem", "verify.pem"))
    create_root_key(root_key)
    create_signing_key(private, public)
    for name, source in ((SMOL, plain), (DEEPSEEK, tiny)):
        slot = KeyFileSource.from_file(root_key)
        seal_folder(
            source, folder / "models" / name, slots=[slot], signer=load_signer(private), name=name, version=1
        )
        slot.close()
    authority = LocalAuthority(folder / "tls").create()
    allow = json.dumps({SMOL: ["worker/worker-0"], DEEPSEEK: ["worker/worker-0"]})
    vault = ServiceProcess(
        "sealmesh.security.vault",
        ("vault", "vault"),
        authority,
        vault_flags(folder, folder / "models", public, root_key, allow),
    )
    with vault, TemporaryDirectory(dir="/dev/shm") as memory:
        yield Sealed(folder, plain, folder / "models", public, authority, vault, Path(memory))


@pytest.fixture(scope="module")
def worker(sealed: Sealed) -> Iterator[ServiceProcess]:
    with sealed.worker(SMOL, "--trace-dir", str(sealed.folder / "traces")) as process:
        yield process


@dataclass
class Answer:
    """What ServeOpenAI sent."""

    head: pb.ResponseHead = field(default_factory=pb.ResponseHead)
    events: list[pb.JsonEvent] = field(default_factory=list)
    finish: pb.ServeFinish | None = None

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(event.data) for event in self.events]

    @property
    def text(self) -> str:
        """Content of the first choice, whole or put together."""
        parts = []
        for document in self.documents:
            for choice in document["choices"]:
                if choice["index"] == 0:
                    message = choice.get("message") or choice.get("delta") or {}
                    parts.append(message.get("content") or choice.get("text") or "")
        return "".join(parts)

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Token ids by choice."""
        found: dict[int, list[int]] = {}
        for event in self.events:
            for choice in event.tokens:
                found.setdefault(choice.index, []).extend(choice.token_ids)
        return found


class Client:
    """The worker as the gateway sees it."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
        self.stub = stub

    def open(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", method: str = ""
    ) -> grpc.aio.UnaryStreamCall[pb.ServeOpenAIRequest, pb.ServeOpenAIResponse]:
        request = pb.ServeOpenAIRequest(
            request_id=uuid.uuid4().hex,
            path=path,
            method=method,
            body=b"" if method == "GET" else json.dumps({"model": SMOL, "temperature": 0, **body}).encode(),
            tenant=TENANT,
        )
        return self.stub.ServeOpenAI(request)

    async def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions", method: str = "") -> Answer:
        answer = Answer()
        async for response in self.open(body, path, method):
            assert answer.finish is None, "nothing may follow the finish"
            match response.WhichOneof("event"):
                case "head":
                    assert not answer.events
                    answer.head = response.head
                case "json":
                    assert response.json.sequence == len(answer.events)
                    answer.events.append(response.json)
                case "finish":
                    answer.finish = response.finish
        assert answer.finish is not None
        return answer

    async def chat(self, **body: Any) -> Answer:
        return await self.ask({"messages": QUESTION, "max_tokens": 20, **body})


@asynccontextmanager
async def connected(process: ServiceProcess, authority: LocalAuthority) -> AsyncIterator[Client]:
    files = authority.issue("gateway", "gateway")
    channel = open_channel(process.grpc_address, channel_credentials(files), expected_role="worker")
    async with channel:
        yield Client(inference_pb2_grpc.InferenceServiceStub(channel))


@pytest.fixture
async def client(worker: ServiceProcess, sealed: Sealed) -> AsyncIterator[Client]:
    async with connected(worker, sealed.authority) as client:
        yield client


async def test_answers_from_a_sealed_model(client: Client) -> None:
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.sealed, info.max_context_tokens) == (SMOL, True, 1024)
    assert len(info.version) == 64

    whole = await client.chat()
    assert whole.head.status == 200
    assert whole.head.content_type == "application/json"
    assert whole.text == "The capital of France is Paris."
    assert whole.finish is not None
    (document,) = whole.documents
    usage = document["usage"]
    assert whole.finish.usage.prompt_tokens == usage["prompt_tokens"] > 0
    assert whole.finish.usage.completion_tokens == usage["completion_tokens"] == len(whole.tokens[0])


async def test_a_stream_says_the_same_in_pieces(client: Client) -> None:
    whole = await client.chat()
    streamed = await client.chat(stream=True)
    assert streamed.head.content_type == "text/event-stream"
    assert len(streamed.events) > 5
    assert streamed.text == whole.text
    assert streamed.tokens == whole.tokens
    # Nobody asked for usage or token ids: the events show neither, the finish counts all the same.
    assert all(document["choices"] and "usage" not in document for document in streamed.documents)
    assert all(document.get("prompt_token_ids") is None for document in streamed.documents)
    assert all(document["choices"][0].get("token_ids") is None for document in streamed.documents)
    assert streamed.finish is not None
    assert whole.finish is not None
    assert streamed.finish.usage == whole.finish.usage

    asked = await client.chat(stream=True, stream_options={"include_usage": True})
    assert asked.documents[-1]["choices"] == []
    assert asked.documents[-1]["usage"]["completion_tokens"] == len(asked.tokens[0])


async def test_the_openai_surface(client: Client) -> None:
    seeded = {"temperature": 1.0, "seed": 7, "n": 3, "stream": True, "max_tokens": 6}
    first, second = await client.chat(**seeded), await client.chat(**seeded)
    assert sorted(first.tokens) == [0, 1, 2]
    assert first.tokens == second.tokens
    assert first.finish is not None
    assert first.finish.usage.completion_tokens == sum(map(len, first.tokens.values()))

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    formatted = await client.chat(
        messages=[{"role": "user", "content": "Describe a person as JSON with name and age."}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    assert set(json.loads(formatted.text)) == {"name", "age"}

    probable = await client.chat(logprobs=True, top_logprobs=2)
    logprobs = probable.documents[0]["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == len(probable.tokens[0])
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)

    stopped = await client.chat(stop=["Paris"])
    assert stopped.text == "The capital of France is "
    assert stopped.documents[0]["choices"][0]["finish_reason"] == "stop"

    prompts = {"prompt": ["The capital of France is", "Two and two make"], "max_tokens": 4, "stream": True}
    completed = await client.ask(prompts, "/v1/completions")
    assert sorted(completed.tokens) == [0, 1]
    assert completed.finish is not None
    assert completed.finish.usage.completion_tokens == 8

    listed = await client.ask({}, "/v1/models", "GET")
    assert listed.documents[0]["data"][0]["id"] == SMOL


async def test_errors_of_the_openai_layer_come_whole(client: Client) -> None:
    unknown = await client.chat(model="nobody")
    assert unknown.head.status == 404
    assert unknown.documents[0]["error"]["param"] == "model"
    long = await client.chat(messages=[{"role": "user", "content": "word " * 2000}])
    assert long.head.status == 400
    assert "1024" in long.documents[0]["error"]["message"]
    invalid = await client.chat(temperature=-1, stream=True)
    assert invalid.head.status == 400


async def test_generate_from_text_and_tokens(client: Client) -> None:
    async def generate(**fields: Any) -> tuple[list[int], str, pb.GenerateFinish]:
        ids: list[int] = []
        text = ""
        request = pb.GenerateRequest(request_id=uuid.uuid4().hex, model=SMOL, tenant=TENANT, **fields)
        async for response in client.stub.Generate(request):
            if response.WhichOneof("event") == "finish":
                return ids, text, response.finish
            ids.extend(response.delta.token_ids)
            text += response.delta.text
        raise AssertionError("no finish")

    sampling = pb.SamplingParams(max_tokens=4, temperature=0)
    ids, text, finish = await generate(text="The capital of France is", sampling=sampling)
    assert text.startswith(" Paris")
    assert finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert finish.usage.completion_tokens == len(ids) == 4

    with pytest.raises(grpc.RpcError) as out_of_vocabulary:
        await generate(tokens=pb.TokenIds(ids=[10**9]), sampling=sampling)
    assert SealmeshError.from_rpc_error(out_of_vocabulary.value).reason == "INVALID_REQUEST"


async def test_a_client_that_leaves_frees_the_engine(client: Client) -> None:
    watch = client.stub.WatchLoad(pb.WatchLoadRequest(interval_ms=100))
    story = {"messages": QUESTION, "max_tokens": 900, "ignore_eos": True}

    async def until(running: int) -> float:
        started = time.perf_counter()
        while True:
            report = await watch.read()
            assert isinstance(report, pb.WatchLoadResponse)
            if report.running_requests == running:
                break
            assert time.perf_counter() - started < 30, report
        return time.perf_counter() - started

    for stream in (True, False):
        call = client.open({**story, "stream": stream})
        await until(1)
        call.cancel()
        # The engine was told within 100 ms; reports come every 100 ms, after the step that runs.
        assert await until(0) < 1.0
    watch.cancel()


async def test_the_prefix_cache_is_the_tenants_own(client: Client) -> None:
    text = "The river runs through hills and fields. " * 40
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    first, second = await client.ask(body), await client.ask(body)
    assert first.finish is not None
    assert second.finish is not None
    assert first.finish.usage.cached_tokens == 0
    assert second.finish.usage.cached_tokens > 0
    details = second.documents[0]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == second.finish.usage.cached_tokens

    other = pb.ServeOpenAIRequest(
        request_id=uuid.uuid4().hex,
        path="/v1/chat/completions",
        # A caller's own salt must not reach the engine.
        body=json.dumps({"model": SMOL, **body, "cache_salt": TENANT.cache_salt}).encode(),
        tenant=types_pb2.TenantContext(handle="ef" * 16, epoch=1, cache_salt="01" * 16),
    )
    usage = [r.finish.usage async for r in client.stub.ServeOpenAI(other) if r.HasField("finish")]
    assert usage[0].cached_tokens == 0

    assert (await client.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).reset
    third = await client.ask(body)
    assert third.finish is not None
    assert third.finish.usage.cached_tokens == 0


async def test_spans_of_a_request(client: Client, sealed: Sealed) -> None:
    await client.chat(stream=True)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        spans = [
            json.loads(line)
            for path in (sealed.folder / "traces").glob("worker-*.jsonl")
            for line in path.read_text().splitlines()
        ]
        engine = [span for span in spans if span["name"] == "engine.generate"]
        if engine and any(span["span_id"] == engine[-1]["parent_span_id"] for span in spans):
            break
    parent = next(span for span in spans if span["span_id"] == engine[-1]["parent_span_id"])
    assert parent["name"] == "sealmesh.inference.v1.InferenceService/ServeOpenAI"
    attributes = engine[-1]["attributes"]
    assert attributes["gen_ai.usage.output_tokens"] > 0
    assert attributes["gen_ai.response.finish_reason"] in ("stop", "length")


def test_the_weights_stay_sealed_on_disk(worker: ServiceProcess, sealed: Sealed) -> None:
    """No process of the worker has a file with weights open, and its folder in memory holds none."""
    processes = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
    # The server, the engine core, and one that computes; resource trackers aside.
    assert len(processes) >= 3
    opened = {file.path for process in processes for file in process.open_files()}
    assert not any(path.endswith(".safetensors") for path in opened)
    private = [path for folder in sealed.private.glob("sealmesh-model-*") for path in folder.rglob("*")]
    assert any(path.name == "config.json" for path in private)
    assert not any(path.suffix == ".safetensors" for path in private)
    needle = (sealed.plain / "model.safetensors").read_bytes()[-4096:]
    assert not any(needle in path.read_bytes() for path in private if path.is_file())


def test_no_process_outlives_a_killed_worker(worker: ServiceProcess, sealed: Sealed) -> None:
    """Last in this module for the shared worker: it is gone afterwards."""
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children
    worker.kill()
    _gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


async def test_a_tiny_deepseek_through_the_same_path(sealed: Sealed) -> None:
    with sealed.worker(DEEPSEEK, "--no-allow-plaintext") as process:
        async with connected(process, sealed.authority) as client:
            answer = await client.chat(model=DEEPSEEK, max_tokens=8, ignore_eos=True)
            again = await client.chat(model=DEEPSEEK, max_tokens=8, ignore_eos=True, stream=True)
            assert len(answer.tokens[0]) == 8
            assert len(again.tokens[0]) == 8
            # Random weights: only the first word is sure not to hang on a rounding error.
            assert again.tokens[0][0] == answer.tokens[0][0]
        engine = psutil.Process(process.pid).children()
        core = max(engine, key=lambda child: child.memory_info().rss)
        core.kill()
        # A dead engine ends the worker with one line, so that a supervisor starts it anew.
        assert process.wait_exit(60) == 1
        assert any("the engine process ended unexpectedly" in line for line in process.log)


def test_a_changed_tensor_fails_the_load_and_is_named(sealed: Sealed, tmp_path: Path) -> None:
    copied = tmp_path / DEEPSEEK
    shutil.copytree(sealed.models / DEEPSEEK, copied)
    (victim,) = copied.glob("model.safetensors*")
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    process = sealed.worker(DEEPSEEK, "--model-dir", str(copied))
    process.start(wait_ready=False)
    assert process.wait_exit(START_S) == EXIT_REFUSED
    (error,) = [
        line
        for text in process.log
        if text.startswith("{") and (line := json.loads(text))["level"] == "error"
    ]
    # A person looks at the last line, and no traceback may bury it.
    assert json.loads(process.log[-1]) == error
    assert "Traceback" not in "\n".join(process.log)
    assert error["reason"] == "INTEGRITY_FAILURE"
    assert victim.name in error["event"]
    assert "tensor" in error["event"]
    assert "chunk" in error["event"]
