"""Conversations about several documents in turn, with the OpenAI client: each one's KV is back when its turn comes.

    pip install openai
    kvortex serve MODEL
    python examples/openai_sessions.py report.txt contract.txt      # --url, --api-key or OPENAI_API_KEY

Nothing in the client is special: blocks are found by what the prompt says. A name for each conversation lets the server
know which requests belong together: `prompt_cache_key` in the body, as here, or a header `X-Session-Id`. Give two
conversations two names, and one conversation the same name in every turn. KVortex looks at names only where it
prefetches: `--set kv_cache.prefetch_enabled=true`.
"""

from __future__ import annotations

import argparse
import os
import uuid
from pathlib import Path
from typing import NamedTuple

import httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = ("What is this about?", "What follows from it?", "What is missing?")


class Tokens(NamedTuple):
    """Prompt tokens of all requests so far, by where their KV came from."""

    vram_hit: int
    ram_hit: int
    computed: int


class Conversation:
    """Questions about one document; each turn sends all that was said before it."""

    def __init__(self, client: OpenAI, model: str, document: Path) -> None:
        self._client = client
        self._model = model
        self._name = f"{document.name}-{uuid.uuid4()}"  # another run, or another user, may have a file of that name
        self._messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": document.read_text()}]

    def ask(self, question: str, max_tokens: int) -> str:
        self._messages.append({"role": "user", "content": question})
        completion = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            max_tokens=max_tokens,
            temperature=0,
            prompt_cache_key=self._name,  # or extra_headers={"X-Session-Id": self._name}
        )
        answer = completion.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": answer})
        return answer


def served(server: httpx.Client) -> Tokens:
    """The server's counters; they only grow."""
    tokens = server.get("/kvortex/stats").raise_for_status().json()["tokens"]
    return Tokens(*(tokens[name] for name in Tokens._fields))


def main() -> None:
    """Asks every question about every document, one document after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    headers = {"Authorization": f"Bearer {options.api_key}"}
    with client, httpx.Client(base_url=options.url, headers=headers, timeout=30) as server:
        model = client.models.list().data[0].id
        conversations = [(document, Conversation(client, model, document)) for document in options.documents]
        for turn, question in enumerate(QUESTIONS, start=1):
            for document, conversation in conversations:
                before = served(server)
                answer = conversation.ask(question, options.max_tokens)
                now = served(server)
                vram, ram, computed = (after - earlier for after, earlier in zip(now, before, strict=True))
                print(f"{document}, turn {turn}: {vram} tokens from VRAM, {ram} from RAM, {computed} computed")
                print(f"  {answer}")


if __name__ == "__main__":
    main()
