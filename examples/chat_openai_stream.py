"""Stream an answer with the OpenAI client.

Needs `pip install openai`. Reads SEALMESH_API_KEY (or OPENAI_API_KEY), SEALMESH_URL and SEALMESH_MODEL.
"""

from __future__ import annotations

import asyncio
import os
import sys

import openai


async def main() -> None:
    """Print the answer as it is made, then what it used."""
    client = openai.AsyncOpenAI(
        base_url=os.environ.get("SEALMESH_URL", "http://127.0.0.1:8080") + "/v1",
        api_key=os.environ.get("SEALMESH_API_KEY"),
    )
    model = os.environ.get("SEALMESH_MODEL") or (await client.models.list()).data[0].id
    question = " ".join(sys.argv[1:]) or "Write one sentence about the sea."
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    asyncio.run(main())
