"""A chat client that tells the server when its user begins to type, so that the conversation is back in VRAM by then.

    kvortex serve MODEL --set kv_cache.prefetch_enabled=true
    python examples/prefetch_hint.py --url http://localhost:8000

Without `prefetch_enabled`, which is off by default, the server refuses each hint with 409: answers are the same, later.
"""

from __future__ import annotations

import argparse
import sys
import threading
import uuid

import httpx


class Chat:
    """One conversation, under a session name of its own."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model
        self._session = f"prefetch-hint-{uuid.uuid4()}"
        self._messages: list[dict[str, str]] = []

    def say(self, text: str) -> str:
        """The answer to what the user said."""
        self._messages.append({"role": "user", "content": text})
        answer = self._http.post(
            "/v1/chat/completions",
            json={"model": self._model, "messages": self._messages, "max_tokens": 256},
            headers={"X-Session-Id": self._session},
        )
        answer.raise_for_status()
        content = str(answer.json()["choices"][0]["message"]["content"])
        self._messages.append({"role": "assistant", "content": content})
        return content

    def user_is_typing(self) -> None:
        """Tells the server; sent beside the typing, and nothing is lost if it fails."""
        if self._messages:
            threading.Thread(target=self._hint, daemon=True).start()

    def _hint(self) -> None:
        try:
            answer = self._http.post("/kvortex/prefetch", json={"session": self._session}, timeout=2.0)
        except httpx.HTTPError as error:
            print(f"(no hint: {error})", file=sys.stderr)
            return
        if answer.status_code != httpx.codes.ACCEPTED:
            print(f"(no hint: {answer.status_code} {answer.text})", file=sys.stderr)
            return
        found = answer.json()
        print(f"({found['ram_blocks']} blocks on their way, {found['vram_blocks']} there)", file=sys.stderr)


def main() -> None:
    """Reads lines, prints answers; an empty line ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key")
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(base_url=options.url, headers=headers, timeout=600) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        chat = Chat(http, model)
        while True:
            # A terminal hands over whole lines; a client with a text field hints at the first key instead.
            chat.user_is_typing()
            try:
                text = input("> ").strip()
            except EOFError:
                return
            if not text:
                return
            print(chat.say(text))


if __name__ == "__main__":
    main()
