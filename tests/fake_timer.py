"""A timer that does not measure: what is around the timing can be tested on any machine, in no time."""

from __future__ import annotations

import contextlib

from retrograd.bench.timing import Timing, plan_calls


class FakeTimer:
    """Runs each call once and says it took a millisecond."""

    device = "cpu"
    rounds = 1
    discarded = 0
    keeps_data = False

    def facts(self):
        return {"gpu": "cpu"}

    def plan(self, touched_bytes):
        return plan_calls(touched_bytes)

    def cold(self, touched_bytes):
        return True

    def scope(self):
        return contextlib.nullcontext()

    def time(self, call, sets, calls):
        for i in range(sets):
            call(i)
        return Timing(1.0, "fake")

    def copy_gb_per_s(self):
        return 1000.0

    def extra_bytes(self, call):
        call()
