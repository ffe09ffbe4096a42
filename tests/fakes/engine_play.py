"""An engine in virtual time, whose steps and link cost what they are said to, around the server's own `LoadChoice`."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kvortex.cache.costs import PromptWork, StepCosts, prompt_work
from kvortex.cache.load_choice import LoadChoice, Way
from kvortex.messages import LinkFacts

BYTES_A_TOKEN = 1000


@dataclass(frozen=True)
class Machine:
    """What steps cost in truth; seconds."""

    decode_s: float = 8e-3
    start_s: float = 3e-3
    token_s: float = 80e-6
    pair_s: float = 30e-9
    noise: float = 0.1

    def seconds(self, work: PromptWork) -> float:
        start_s = self.start_s if work.tokens else 0.0
        return self.decode_s + start_s + self.token_s * work.tokens + self.pair_s * work.pairs


@dataclass
class Ask:
    """A request whose first `told` tokens lie in RAM."""

    told: int
    new: int
    left: int
    ready_s: float = 0.0
    known: bool = False


@dataclass
class Play:
    """One engine; what it learnt stays from one `run` to the next."""

    machine: Machine
    bytes_per_s: float
    by_layer: bool
    forced: str = ""
    now_s: float = 0.0
    link_free_s: float = 0.0
    declined: int = 0
    costs: StepCosts = field(default_factory=StepCosts)
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        self.choice = LoadChoice(self.costs, lambda: self.now_s)
        if self.forced:
            self.choice._or_compute = lambda way, *_: Way.COMPUTE if self.forced == "never" else way  # type: ignore
        self.choice.heard_of(0, LinkFacts(self.bytes_per_s, self.by_layer))

    def run(self, asks: list[Ask], at_once: int) -> float:
        """Seconds until all are answered, `at_once` at a time."""
        begin_s = self.now_s
        left, waiting, loading, running = deque(asks), deque[Ask](), deque[Ask](), list[Ask]()
        while left or waiting or loading or running:
            while left and len(waiting) + len(loading) + len(running) < at_once:
                waiting.append(left.popleft())
            num_running, work, load_s = len(running), PromptWork(), 0.0
            while loading and loading[0].ready_s <= self.now_s:
                ask = loading.popleft()
                work += prompt_work(ask.told, ask.told + ask.new)
                running.append(ask)
            self.choice.begin_step(len(running) + len(loading) + sum(one.known for one in waiting))
            while waiting:
                ask = waiting[0]
                num_bytes = ask.told * BYTES_A_TOKEN
                hit, rest = prompt_work(0, ask.told), prompt_work(ask.told, ask.told + ask.new)
                ask.known = True
                num_known = len(running) + len(loading) + sum(one.known for one in waiting)
                way = self.choice.way(num_bytes, hit, rest, num_running, num_known)
                if way is Way.NEXT_STEP:
                    break
                waiting.popleft()
                if way is Way.BEFORE_STEP:
                    self.choice.goes_before_step(num_bytes)
                    self.link_free_s = max(self.now_s, self.link_free_s) + num_bytes / self.bytes_per_s
                    ask.ready_s = self.link_free_s
                    loading.append(ask)
                    continue
                work += rest
                running.append(ask)
                if way is Way.WITH_STEP:
                    self.choice.goes_with_step(num_bytes, rest)
                    load_s += num_bytes / self.bytes_per_s
                else:
                    work += hit
                    self.declined += 1
            self._step(work, load_s, idle=not running)
            for ask in running:
                ask.left -= 1
            running = [ask for ask in running if ask.left]
        return self.now_s - begin_s

    def _step(self, work: PromptWork, load_s: float, *, idle: bool) -> None:
        if idle:
            self.now_s += 1e-3
            return
        compute_s = self.machine.seconds(work) * self.rng.uniform(1 - self.machine.noise, 1 + self.machine.noise)
        if load_s:
            self.link_free_s = max(self.now_s, self.link_free_s) + load_s
            self.now_s += max(compute_s, load_s) if self.by_layer else compute_s + load_s
            return
        self.now_s += compute_s
        self.costs.saw(work, compute_s)
