"""Random operations on vLLM's own scheduler and KVortex's two sides, over devices that hold tags.

Requests come, are scheduled, preempted, aborted, finish; copies end in every order, layer by layer, done, failed, too
late, twice or never; caches are reset, the clock jumps, RAM is smaller than what is pinned; loads go with the step,
before it, or wait for the next. After each operation the invariants of docs/invariants.md are checked as far as a CPU
can see them. Short here; an hour's worth:

    KVORTEX_RANDOM_STEPS=1000000 pytest tests/unit/vllm_plugin/test_engine_machine.py
"""

from __future__ import annotations

import atexit
import importlib
import os
import random
import warnings
from collections import Counter
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvortex.cache.index import KeyState, SlotState
from kvortex.cache.load_choice import Way
from kvortex.cache.policies import EVICTION_POLICIES
from kvortex.messages import Direction, JobId, Outcome
from tests.unit.vllm_plugin.sim_import import import_sim

steps = import_sim()
sim = steps.sim
jobs = importlib.import_module("kvortex.vllm_plugin.jobs")

STEPS = int(os.environ.get("KVORTEX_RANDOM_STEPS", "1200"))
STEPS_AN_EXAMPLE = 120
MOST_LIVE = 8
TALKS = [[3 + (7 * talk + 3 * i) % 500 for i in range(200)] for talk in range(5)]
"""Prompts are prefixes of these, with tails of their own."""
WAYS = [Way.BEFORE_STEP, Way.WITH_STEP, Way.BEFORE_STEP, Way.WITH_STEP, Way.NEXT_STEP, Way.COMPUTE]
SALTS = [None, None, None, None, "salt"]
SESSIONS = [None, "a", "b"]
ANY = st.integers(0, 10**6)

_configs: dict[bool, Any] = {}


def config(overlap: bool) -> Any:
    if overlap not in _configs:
        folder = Path(mkdtemp(prefix="kvortex-machine-"))
        atexit.register(rmtree, folder, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _configs[overlap] = sim.vllm_config(folder, overlap=overlap, max_running=4)
    return _configs[overlap]


class EngineMachine(RuleBasedStateMachine):
    engine: Any

    @initialize(
        overlap=st.booleans(),
        num_ranks=st.integers(1, 2),
        num_blocks=st.sampled_from([20, 48, 16, 28]),
        num_slots=st.sampled_from([80, 60, 30, 12, 4]),
        threshold=st.sampled_from([0.0, 0.0, 0.5, 0.85]),
        prefetch=st.booleans(),
        policy=st.sampled_from(EVICTION_POLICIES),
    )
    def start(self, overlap: bool, num_ranks: int, num_blocks: int, num_slots: int, **options: Any) -> None:
        self.dice = random.Random(0)
        self.names = 0
        self.resets = 0
        self.reset_at = 0
        self.ways = [Way.BEFORE_STEP]
        self.before: dict[str, float] = {}
        self.engine = sim.SimEngine(
            config(overlap),
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_ranks=num_ranks,
            settings={
                "offload_threshold": options["threshold"],
                "offload_target": options["threshold"] / 2,
                "prefetch_enabled": options["prefetch"],
                "eviction_policy": options["policy"],
                "transfer_timeout": 10.0,
            },
        )
        self.engine.side._choice.way = self._way

    def _way(self, *_: Any, may_go_with_step: bool = True, **__: Any) -> Way:
        way = self.dice.choice(self.ways)
        assert may_go_with_step
        return way

    # ---- requests

    @precondition(lambda self: len(self.engine.live) < MOST_LIVE)
    @rule(
        talk=st.sampled_from(range(len(TALKS))),
        blocks=st.sampled_from([10, 6, 4, 2, 1]),
        more=st.integers(0, sim.BLOCK_SIZE),
        tail=st.sampled_from([0, 0, 0, 1, 12]),
        max_tokens=st.sampled_from([1, 2, 5, 20]),
        salt=st.sampled_from(SALTS),
        session=st.sampled_from(SESSIONS),
    )
    def request(self, talk: int, blocks: int, more: int, tail: int, **options: Any) -> None:
        self.names += 1
        own = [(self.names * 31 + i) % 500 for i in range(tail)]
        self.engine.add(f"r{self.names}", TALKS[talk][: blocks * sim.BLOCK_SIZE + more] + own, **options)

    @precondition(lambda self: not self.engine.live)
    @rule(rounds=st.integers(1, 2), blocks=st.sampled_from([10, 6]))
    def all_talks_come_in_turn(self, rounds: int, blocks: int) -> None:
        """So that VRAM loses some of them and RAM keeps some."""
        for talk in [*range(len(TALKS))] * rounds:
            self.request(talk, blocks, 3, 0, max_tokens=1, salt=None, session=SESSIONS[talk % 3])
            self.run(6, 0.01)

    @precondition(lambda self: self.engine.live)
    @rule(index=ANY)
    def abort(self, index: int) -> None:
        live = self.engine.live
        self.engine.abort(live[index % len(live)])

    def in_ram_only(self, talk: int) -> tuple[int, int]:
        """(leading blocks of a talk that VRAM has, those behind them that RAM has)."""
        keys = self.engine.keys_of(TALKS[talk])
        residency, index = self.engine.side._residency, self.engine.side._index
        in_vram = next((i for i, key in enumerate(keys) if not residency.holds(key)), len(keys))
        return in_vram, len(index.match(keys[in_vram:]))

    @precondition(lambda self: len(self.engine.live) < MOST_LIVE)
    @rule(more=st.integers(1, 12), steps=st.integers(1, 3), times=st.integers(1, 2), session=st.sampled_from(SESSIONS))
    def request_for_what_ram_has(self, more: int, steps: int, times: int, session: str | None) -> None:
        self._refreshed()
        talk = max(range(len(TALKS)), key=lambda talk: self.in_ram_only(talk)[1])
        fitting = (self.engine.free_at_start - 1) * sim.BLOCK_SIZE  # a prompt that VRAM cannot hold waits for ever
        tokens = min(fitting, sum(self.in_ram_only(talk)) * sim.BLOCK_SIZE + more)
        for _ in range(times):
            self.names += 1
            self.engine.add(f"r{self.names}", TALKS[talk][:tokens], max_tokens=2, session=session)
        self.steps_without_copies(steps)

    @precondition(lambda self: self.engine.wishes)
    @rule(session=st.sampled_from(["a", "b", "unknown", None]), talk=st.sampled_from(range(len(TALKS))))
    def hint(self, session: str | None, talk: int) -> None:
        self.engine.side.hint(session, None if session else TALKS[talk])
        self.steps_without_copies(2)

    # ---- steps

    @property
    def wants_step(self) -> bool:
        return self.engine.scheduler.has_requests() or self.engine.side.may_prefetch()["due"]

    def step(self) -> None:
        engine = self.engine
        if engine.may_schedule and self.wants_step:
            engine.schedule()
        elif engine.in_flight:
            engine.take_output()

    @rule(steps=st.integers(1, 4))
    def steps_without_copies(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def output(self) -> None:
        self.engine.take_output()

    @rule(steps=st.integers(4, 16), seconds=st.sampled_from([0.0, 0.01, 0.5]))
    def run(self, steps: int, seconds: float) -> None:
        """Steps with copies that end well."""
        for _ in range(steps):
            self.end_all()
            self.step()
            self.engine.clock.advance(seconds)

    @rule(ways=st.lists(st.sampled_from(WAYS), min_size=1, max_size=4), seed=ANY)
    def choose_ways(self, ways: list[Way], seed: int) -> None:
        self.ways = ways
        self.dice.seed(seed)

    # ---- devices: kernels and copies

    def device(self, rank: int) -> Any:
        return self.engine.devices[rank % len(self.engine.devices)]

    def end_all(self) -> None:
        for device in self.engine.devices:
            for job_id in device.held:
                device.release(job_id)

    @rule(rank=ANY, kernels=st.integers(1, 4))
    def kernels_run(self, rank: int, kernels: int) -> None:
        device = self.device(rank)
        device.run(device.done + kernels)

    def held(self, direction: Direction) -> list[tuple[Any, JobId]]:
        devices = self.engine.devices
        return [(device, job) for device in devices for job in device.held if device.direction(job) is direction]

    @precondition(lambda self: self.held(Direction.STORE))
    @rule(index=ANY, event=st.sampled_from(["end", "fail", "time_out", "part", "lose"]))
    def store(self, index: int, event: str) -> None:
        held = self.held(Direction.STORE)
        device, job_id = held[index % len(held)]
        if event == "lose":
            device.lose(job_id)
        else:
            self.copy(device, job_id, event, index)

    @precondition(lambda self: self.held(Direction.LOAD))
    @rule(index=ANY, event=st.sampled_from(["fail", "end", "time_out", "part"]))
    def load(self, index: int, event: str) -> None:
        held = self.held(Direction.LOAD)
        self.copy(*held[index % len(held)], event, index)

    def copy(self, device: Any, job_id: JobId, event: str, index: int) -> None:
        if event == "end":
            device.release(job_id)
        elif event == "part" or not device.may_fail(job_id):
            device.copy_layer(job_id, index % sim.LAYERS)
        else:
            device.fail(job_id, Outcome.FAILED if event == "fail" else Outcome.TIMED_OUT)

    @precondition(lambda self: any(device.answered for device in self.engine.devices))
    @rule(rank=ANY, index=ANY, event=st.sampled_from(["twice", "find", "promise"]))
    def answer(self, rank: int, index: int, event: str) -> None:
        device = self.device(rank)
        if event == "twice":
            device.answer_again(index)
        elif event == "promise":
            device.promise_next = 1 + index % 3
        elif device.lost:
            device.find(device.lost[0])

    # ---- clocks and resets

    @rule(seconds=st.sampled_from([0.3, 2.0, 25.0, 1000.0, 1e7]))
    def clock_jumps(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @precondition(lambda self: self.engine.steps - self.reset_at > 40)
    @rule(kind=st.sampled_from(["connector", "vram", "running"]))
    def reset(self, kind: str) -> None:
        """vLLM refuses its own while blocks are in use, and says so."""
        engine = self.engine
        self.reset_at = engine.steps
        if kind == "connector":
            self.resets += 1
            assert engine.connector.reset_cache() is True
            assert engine.side._index.ready == engine.side._index.writing == 0
            return
        try:
            done = engine.reset_vram(running=kind == "running")
        except RuntimeError:
            done = False
        used = engine.free_at_start - engine.pool.get_num_free_blocks()
        assert done == (used == 0), (done, used)
        self.resets += done

    # ---- after each operation

    def _refreshed(self) -> None:
        side = self.engine.side
        with side._lock:
            side.view.refresh()

    @invariant()
    def a_lookup_finds_what_was_computed_for_its_key(self) -> None:
        """Invariants 1 and 2: the bytes of every visible slot are complete on every rank, and its key's."""
        self._refreshed()
        index = self.engine.side._index
        for slot in range(index.num_slots):
            if index.slot_state(slot) is not SlotState.READY:
                continue
            key = index.key_of(slot)
            for rank, device in enumerate(self.engine.devices):
                for layer in range(sim.LAYERS):
                    found, right = device.ram[layer, slot], self.engine.expected(key, rank, layer)
                    assert np.array_equal(found, right), (
                        f"slot {slot}, rank {rank}, layer {layer}: {found}, not {right}"
                    )

    @invariant()
    def pins_are_those_of_loads_under_way_and_nobody_elses(self) -> None:
        """Invariant 4."""
        wanted = Counter[int]()
        for job in self.engine.side._jobs._jobs.values():
            if not isinstance(job, jobs.StoreJob):
                wanted.update(job.slots)
        assert self.engine.side._index._pins == wanted

    @invariant()
    def reserved_slots_are_those_of_stores_under_way(self) -> None:
        """Invariant 5: each in one place."""
        side = self.engine.side
        side._index.check()
        side._residency.check()
        if side._prefetcher is not None:
            side._prefetcher.check()
        stores = [job for job in side._jobs._jobs.values() if isinstance(job, jobs.StoreJob)]
        written = Counter(slot for job in stores for slot in job.slots)
        assert written == Counter([*side._index._writing.values(), *side._index._doomed_writing])
        assert all(side._index.state_of(key) is KeyState.WRITING for key in side._index._writing)

    @invariant()
    def everything_is_counted_once_and_nothing_falls(self) -> None:
        """Invariant 9."""
        counted = self.engine.side.snapshot()
        tokens, store, load = counted["tokens"], counted["store"], counted["load"]
        assert tokens["vram_hit"] + tokens["ram_hit"] + tokens["computed"] == tokens["queried"], tokens
        assert sum(counted["missed"].values()) == tokens["computed"], counted
        ordered = self.engine.ordered
        ended = load["blocks"] + counted["failures"]["load"]
        assert ended + load["in_flight"] == ordered["loads"] + ordered["prefetches"], (load, counted["failures"])
        lost = counted["failures"]["store"] + counted["refused"]["source_reused"]
        overdue = sum(
            len(job.slots)
            for job in self.engine.side._jobs._jobs.values()
            if isinstance(job, jobs.StoreJob) and job.overdue
        )
        by_reset = ordered["stores"] - (store["blocks"] + lost + store["in_flight"] - overdue)
        assert by_reset == 0 or (by_reset > 0 and self.resets), (by_reset, counted)
        now = {
            **{f"tokens.{k}": v for k, v in tokens.items()},
            **{f"refused.{k}": v for k, v in counted["refused"].items()},
            **{f"failures.{k}": v for k, v in counted["failures"].items()},
            **{f"prefetch.{k}": v for k, v in counted["prefetch"].items()},
            **{f"evicted.{k}": v for k, v in counted["evicted"].items()},
            "stored": store["blocks"],
            "loaded": load["blocks"],
        }
        fell = {k: (self.before[k], v) for k, v in now.items() if v < self.before.get(k, 0)}
        assert not fell, fell
        self.before = now

    @invariant()
    def nothing_is_remembered_of_what_is_over(self) -> None:
        """Invariants 7 and 10: no table outgrows what is live."""
        engine, side = self.engine, self.engine.side
        live = set(engine.scheduler.requests)
        assert side._requests.keys() <= live
        assert set(side._jobs._load_of) <= live
        assert side._jobs.unanswered <= side._index.num_slots + len(live)
        assert len(side._jobs._source_of) + len(side._jobs._target_of) <= engine.free_at_start
        if side._prefetcher is not None:
            assert side._prefetcher.held_blocks <= engine.free_at_start
            assert side._prefetcher._sessions.keys() <= live

    # ---- the end

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.drain()
            finally:
                self.engine.close()

    def drain(self) -> None:
        """Whatever was done: with copies that end and a clock that runs, all requests end right and nothing is left."""
        engine = self.engine
        self.ways = list(Way)
        for _ in range(800):
            is_idle = not (engine.live or engine.in_flight or self.wants_step)
            if is_idle and not engine.side.snapshot()["store"]["in_flight"]:
                break
            if is_idle and not any(device.lost for device in engine.devices):
                # Nothing steps for a store that was given up: its answer comes in with the next request.
                self.request(talk=0, blocks=1, more=0, tail=0, max_tokens=1, session=None, salt=None)
            self.end_all()
            self.step()
            engine.clock.advance(0.3)
            if not engine.live and not engine.in_flight:
                for device in engine.devices:
                    for job_id in device.lost:
                        device.find(job_id)
        assert not engine.live, f"requests do not end: {engine.live}"
        for wish in engine.wishes.values():
            assert wish.gone or len(wish.said) == wish.max_tokens
        self.a_lookup_finds_what_was_computed_for_its_key()
        self.pins_are_those_of_loads_under_way_and_nobody_elses()
        self.reserved_slots_are_those_of_stores_under_way()
        self.everything_is_counted_once_and_nothing_falls()
        counted = engine.side.snapshot()
        assert not engine.side.busy
        assert counted["store"]["in_flight"] == counted["load"]["in_flight"] == 0
        assert counted["tiers"]["ram"]["pinned_blocks"] == 0
        assert counted["sessions"]["active"] == 0
        assert engine.side._index.writing == engine.side._index.doomed == 0
        assert engine.pool.get_num_free_blocks() == engine.free_at_start
        in_vram = engine.pool.cached_block_hash_to_block._cache
        for key, entry in in_vram.items():
            for block in entry.values() if isinstance(entry, dict) else (entry,):
                for rank, device in enumerate(engine.devices):
                    for layer in range(sim.LAYERS):
                        found = device.vram[layer, block.block_id]
                        assert np.array_equal(found, engine.expected(key, rank, layer)), (block.block_id, rank, layer)
        told = sum(len(wish.prompt) for wish in engine.wishes.values() if not wish.gone)
        everything = sum(len(wish.prompt) for wish in engine.wishes.values())
        assert told <= counted["tokens"]["queried"] <= everything, (told, counted["tokens"], everything)


EngineMachine.TestCase.settings = settings(
    max_examples=max(1, STEPS // STEPS_AN_EXAMPLE),
    stateful_step_count=STEPS_AN_EXAMPLE,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine = pytest.mark.timeout(0 if STEPS > 10_000 else 300)(TestEngineMachine)
