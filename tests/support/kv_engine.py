"""A plain vLLM engine with our KV connector in a process of its own, driven by JSON lines.

As a program: reads a request per line from stdin, writes an answer per line to the descriptor in argv.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """What one request gave: greedy tokens, prompt tokens that were not computed, seconds."""

    tokens: list[int]
    cached_tokens: int
    ttft_s: float
    e2e_s: float


class KVEngine:
    """A running engine; `with` starts and stops it.

    Args:
        model: Folder of a plain model.
        extra: kv_connector_extra_config; None runs without a connector.
        arguments: Further vLLM engine arguments.
    """

    def __init__(
        self, model: Path, extra: Mapping[str, object] | None, log: Path, **arguments: object
    ) -> None:
        self._spec = {"model": str(model), "extra": extra, "arguments": arguments}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Our plugins register loaders that these engines do not need.
            "VLLM_PLUGINS": "none",
        }
        command = [sys.executable, "-m", "tests.support.kv_engine", json.dumps(self._spec), str(writing)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                env=environment,
                cwd=Path(__file__).parents[2],
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        assert self._read() == {"ready": True}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        tenant: Mapping[str, object] | None = None,
        salt: str = "",
    ) -> Answer:
        """Greedy tokens for a prompt of token ids."""
        return self.generate_together([prompt], max_tokens, tenant=tenant, salt=salt)[0]

    def generate_together(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        tenant: Mapping[str, object] | None = None,
        salt: str = "",
    ) -> list[Answer]:
        """The same for several prompts at once."""
        request = {"prompts": prompts, "max_tokens": max_tokens, "tenant": tenant, "salt": salt}
        with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return [Answer(**answer) for answer in self._read()["answers"]]

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise AssertionError(f"the engine died: {self._log.read_text(errors='replace')[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _generate(
    engine: Any, request: Mapping[str, Any], prompt: list[int], name: str
) -> dict[str, object]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
    if request["tenant"] is not None:
        sampling.extra_args = {"kv_transfer_params": {"sealmesh": request["tenant"]}}
    inputs = TokensPrompt(prompt_token_ids=prompt)
    if request["salt"]:
        inputs["cache_salt"] = request["salt"]
    started = time.perf_counter()
    first = 0.0
    output: Any = None
    async for step in engine.generate(inputs, sampling, name):
        first = first or time.perf_counter() - started
        output = step
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached_tokens": output.num_cached_tokens,
        "ttft_s": first,
        "e2e_s": time.perf_counter() - started,
    }


async def _serve(spec: Mapping[str, Any], answers: int) -> None:
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": spec["model"],
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "prefix_caching_hash_algo": "sha256_cbor",
        **spec["arguments"],
    }
    if spec["extra"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="SealmeshKVConnector",
            kv_connector_module_path="sealmesh.inference.kv_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=spec["extra"],
        )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        warm = {"max_tokens": 2, "tenant": None, "salt": ""}
        await _generate(engine, warm, [1, 2, 3], "warm-up")
        with os.fdopen(answers, "w") as out:
            print(json.dumps({"ready": True}), file=out, flush=True)
            number = 0
            while line := await asyncio.to_thread(sys.stdin.readline):
                request = json.loads(line)
                number += 1
                results = await asyncio.gather(
                    *(
                        _generate(engine, request, prompt, f"request-{number}-{position}")
                        for position, prompt in enumerate(request["prompts"])
                    )
                )
                print(json.dumps({"answers": results}), file=out, flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1]), int(sys.argv[2])))
