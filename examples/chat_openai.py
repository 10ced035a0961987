"""Ask one question with the OpenAI client.

Needs `pip install openai`. Reads SEALMESH_API_KEY (or OPENAI_API_KEY), SEALMESH_URL and SEALMESH_MODEL.
"""

from __future__ import annotations

import os
import sys

import openai


def main() -> None:
    """Print the answer."""
    client = openai.OpenAI(
        base_url=os.environ.get("SEALMESH_URL", "http://127.0.0.1:8080") + "/v1",
        api_key=os.environ.get("SEALMESH_API_KEY"),
    )
    model = os.environ.get("SEALMESH_MODEL") or client.models.list().data[0].id
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=64, temperature=0
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
