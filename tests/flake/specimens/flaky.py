"""Tests that fail sometimes, each in a way of its own, and healthy neighbours. Run by the tests beside, never collected."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

_seen: list[int] = []
_flags: set[str] = set()


def _secret() -> random.Random:
    """A source that no seed controls: a counter in a file, as good as the time of day, and the same in every test run."""
    path = Path(os.environ["SPECIMEN_COUNTER"])
    count = int(path.read_text()) if path.exists() else 0
    path.write_text(str(count + 1))
    return random.Random(count)


def steady():
    """Healthy: errors far below the tolerance."""
    x = np.random.rand(50)
    np.testing.assert_allclose(x * (1 + 1e-8 * np.random.rand(50)), x, rtol=1e-6)


def seeds_itself():
    """Healthy, but draws the same data at every seed."""
    rng = np.random.default_rng(0)
    x = rng.random(50)
    np.testing.assert_allclose(x * (1 + 1e-8 * rng.random(50)), x, rtol=1e-6)


def one_seed_in_five(seed):
    """Seed flake of known probability: every fifth seed fails."""
    assert seed % 5 != 3, f"seed {seed} is one of the bad ones"


def unseeded():
    """Run flake: a source that no seed controls."""
    return 1e3 if _secret().random() < 0.4 else 0.01


def any_order():
    """Run flake of rounding: float32 terms are added in an order of the moment."""
    terms = [np.float32(t) for t in np.random.randn(2000)]
    exact = float(np.sum(np.float64(terms)))
    _secret().shuffle(terms)
    total = np.float32(0)
    for term in terms:
        total += term
    np.testing.assert_allclose(total, exact, rtol=0, atol=1e-5)


def hashes():
    """Fails for some orders of a set of strings."""
    first = next(iter({"alpha", "beta", "gamma"}))
    np.testing.assert_allclose(len(first), 5, rtol=0, atol=0.5)


def remembers():
    """Order flake on itself: the 12th run in a process fails."""
    _seen.append(1)
    assert len(_seen) < 12, "too many runs before"


def second_time():
    """Order flake on itself: only the first run of a process passes."""
    again = "ran" in _flags
    _flags.add("ran")
    assert not again


def chunks():
    """Environment: float32 sums are split by the number of threads, the tolerance knows one split only."""
    parts = int(os.environ.get("OMP_NUM_THREADS", "1"))
    x = np.sin(np.arange(4001)).astype(np.float32)
    split = sum((np.sum(part) for part in np.array_split(x, parts)), np.float32(0))
    np.testing.assert_allclose(split, np.sum(x), rtol=1e-9)


def kink():
    """The derivative of linear interpolation at random points: two formulas of the position, a fixed tolerance.

    One point in 1000 is drawn within a rounding of a pixel, where the formulas find different cells: of 60 points a
    run some lie there in 6 % of the runs.
    """
    side, n = 64, 60
    image = np.random.randn(side + 2)
    pixel = np.random.randint(2, side - 2, n) + np.random.uniform(0.01, 0.99, n)
    near = np.random.rand(n) < 1e-3
    p = np.where(near, np.nextafter(np.float32((np.round(pixel) + 0.5) / side), np.float32(0)), (pixel + 0.5) / side)
    p = p.astype(np.float32)
    direct = p * np.float32(side) - np.float32(0.5)
    exact = np.floor(direct + near * 1e-3)  # the other formula rounds up onto the pixel
    got, want = (image[c.astype(int) + 1] - image[c.astype(int)] for c in (np.floor(direct), exact))
    np.testing.assert_allclose(got * (1 + 1e-7), want, rtol=1e-3, atol=1e-4)


def tight():
    """A tolerance below half a unit in the last place of float32: only results that round luckily pass."""
    x = np.random.rand(3).astype(np.float32)
    third = np.random.rand() < 0.5
    got = x / np.float32(3) * np.float32(3) if third else x
    np.testing.assert_allclose(got, x, rtol=1e-9)


def as_wide_as_the_error():
    """A tolerance as large as the error of an ordinary run: exponential margins, 5 % above 1."""
    x = np.full(1, 2.0)
    error = np.random.exponential(1 / np.log(20))
    np.testing.assert_allclose(x + error, x, rtol=0, atol=1.0)


def always_wrong():
    """No flake: wrong at every run."""
    assert 1 + 1 == 3


def dies():
    """Ends its process."""
    os.abort()


def leaves():
    """Ends its process with success."""
    os._exit(0)


def hangs():
    """Never ends, after printing megabytes."""
    print("x" * 3_000_000)
    while True:
        pass


def prints():
    """Healthy, and prints megabytes."""
    print("y" * 3_000_000)


def dies_sometimes(seed):
    """Ends its process at every third seed."""
    if seed % 3 == 2:
        os.abort()


def leaves_things_behind():
    """Healthy, but a child process keeps the output open for a while."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()


def asserts_a_difference():
    """Healthy: a comparison that must not hold, beside one that must."""
    x = np.random.rand(50) + 1
    assert not np.allclose(x, x + 1e-2)
    np.testing.assert_allclose(x * (1 + 1e-8 * np.random.rand(50)), x, rtol=1e-6)


def two_threads_race():
    """Run flake that needs two threads."""
    np.testing.assert_allclose(
        1e3 if os.environ["OMP_NUM_THREADS"] == "2" and _secret().random() < 0.6 else 1, 1, rtol=0.1
    )


def warms_up():
    """Healthy, though the first run in a process differs from the later ones in its last bits."""
    first = "warm" not in _flags
    _flags.add("warm")
    x = np.random.rand(50) + 1
    np.testing.assert_allclose(x * (1 + 1e-8 * np.random.rand(50)) + 1e-12 * first, x, rtol=1e-6)


def spaces():
    """Environment: fails for one value of a variable."""
    assert os.environ["FLAGS"] != "-a -b"
