"""What the demo says to a server and how it listens: conversations over POST /v1/chat/completions."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

ANSWER_TOKENS = 24
# Turn 1 tells a long story, later turns add to it; about 17 tokens an entry.
ENTRIES = {1: 46, 2: 7, 3: 7}
QUESTIONS = {
    1: "What was sold most often?",
    2: "Who should be asked about it first?",
    3: "Write one more entry.",
}

Message = dict[str, str]


class RequestError(Exception):
    """A request failed, or its answer is none."""


class Answer(NamedTuple):
    """What came back: the text, the prompt's length, and the seconds from the request to the first text."""

    text: str
    prompt_tokens: int
    ttft_s: float


class Conversation:
    """One conversation with one server: each turn sends everything said before it, as chat clients do."""

    def __init__(self, http: httpx.Client, name: str) -> None:
        self._http = http
        self._name = name
        self._messages: list[Message] = []

    def turn(self, number: int) -> Answer:
        """Says the next thing, turn 1 first. Raises RequestError."""
        self._messages.append({"role": "user", "content": user_message(self._name, number)})
        answer = ask(self._http, self._messages, session=self._name)
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def user_message(name: str, number: int) -> str:
    """The logbook entries and question of one turn: differs between conversations, the same in every run."""
    random_ = random.Random(f"{name}{number}")
    entries = []
    for day in range(1, ENTRIES[number] + 1):
        who = random_.choice(["the baker", "a sailor", "the miller", "our captain", "a widow", "the joiner"])
        did = random_.choice(["bought", "sold", "lost", "found", "carried home", "gave away", "asked for"])
        what = random_.choice(["barrels of salt", "sacks of flour", "ropes", "lamps", "oak planks", "coats"])
        where = random_.choice(["at the harbour", "near the mill", "under the bridge", "by the old church"])
        entries.append(f"Day {day}: {who} {did} {random_.randint(2, 90)} {what} {where}.")
    return f"Logbook {name}, part {number}. {' '.join(entries)} {QUESTIONS[number]}"


def ask(http: httpx.Client, messages: list[Message], *, session: str) -> Answer:
    """One greedy chat completion, streamed so that its first token can be timed. Raises RequestError."""
    request = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, prompt_tokens, ttft_s = "", 0, None
    sent = time.monotonic()
    try:
        with http.stream("POST", "/v1/chat/completions", json=request, headers={"X-Session-Id": session}) as response:
            if response.status_code != 200:
                raise RequestError(f"{response.status_code}: {response.read().decode(errors='replace')}")
            for line in response.iter_lines():
                event = parse_event(line)
                prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
                for choice in event.get("choices", []):
                    if piece := choice["delta"].get("content"):
                        ttft_s = ttft_s or time.monotonic() - sent
                        text += piece
    except httpx.TransportError as error:
        raise RequestError(repr(error)) from error
    if ttft_s is None or not prompt_tokens:
        raise RequestError(f"the answer has no text or no usage: {text!r}, {prompt_tokens} prompt tokens")
    return Answer(text, prompt_tokens, ttft_s)


def parse_event(line: str) -> Mapping[str, Any]:
    """The JSON of one line of an event stream; nothing for lines that carry none. Raises RequestError."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return {}
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise RequestError(str(event["error"]))
    return event
