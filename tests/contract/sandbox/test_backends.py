"""The conformance suite on every backend that this host can run, one test per case.

``bwrap`` uses cgroups where this host lets us write them; ``bwrap-rlimits`` never does, and promises the same.
``gvisor`` is tested where runsc is installed, but for the cases that it cannot hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lehr.core.errors import MissingDependency
from lehr.sandbox.base import Backend
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.conformance import CASES
from lehr.sandbox.gvisor import INAPPLICABLE, runsc
from lehr.sandbox.gvisor.backend import GvisorBackend
from lehr.sandbox.places import find_places
from lehr.sandbox.pool import Pool

ELSEWHERE = "other host: "
"""Marks a skip that CI accepts too: the promise is one of other kernels."""

BACKENDS: dict[str, Callable[[], Backend]] = {
    "bwrap": BwrapBackend,
    "bwrap-rlimits": lambda: BwrapBackend(limited=False),
    "gvisor": GvisorBackend,
}
if not find_places().usable:
    del BACKENDS["bwrap-rlimits"]  # the same as the first


def require_runsc() -> None:
    try:
        runsc.find()
    except MissingDependency as error:
        pytest.skip(str(error))


def test_inapplicable_cases_exist() -> None:
    assert set(INAPPLICABLE) <= set(CASES)
    assert all(INAPPLICABLE.values())


@pytest.fixture(params=BACKENDS)
def hold(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that runs one case on a pool of the backend."""
    if request.param == "gvisor":
        require_runsc()

    async def run(case: str) -> None:
        if request.param == "gvisor" and case in INAPPLICABLE:
            pytest.skip(f"{ELSEWHERE}gVisor: {INAPPLICABLE[case]}")
        pool = Pool(BACKENDS[request.param](), warm=0)
        try:
            await CASES[case](pool)
        finally:
            await pool.close()

    return lambda case: asyncio.run(run(case))


def test_s1_fork_bomb(hold: Callable[[str], None]) -> None:
    hold("S1")


def test_s2_daemon(hold: Callable[[str], None]) -> None:
    hold("S2")


def test_s3_held_stdout(hold: Callable[[str], None]) -> None:
    hold("S3")


def test_s4_memory_bomb(hold: Callable[[str], None]) -> None:
    hold("S4")


def test_s5_memory_file_systems(hold: Callable[[str], None]) -> None:
    hold("S5")


def test_s6_disk(hold: Callable[[str], None]) -> None:
    hold("S6")


def test_s6_inodes(hold: Callable[[str], None]) -> None:
    hold("S6-inodes")


def test_s7_sparse_result(hold: Callable[[str], None]) -> None:
    hold("S7")


def test_s8_endless_output(hold: Callable[[str], None]) -> None:
    hold("S8")


def test_s9_flooded_stderr(hold: Callable[[str], None]) -> None:
    hold("S9")


def test_s10_endless_time(hold: Callable[[str], None]) -> None:
    hold("S10")


def test_s11_short_children(hold: Callable[[str], None]) -> None:
    hold("S11")


def test_s12_broken_box(hold: Callable[[str], None]) -> None:
    hold("S12")


def test_s13_host_secrets(hold: Callable[[str], None]) -> None:
    hold("S13")


def test_s14_descriptors(hold: Callable[[str], None]) -> None:
    hold("S14")


def test_s17_calls(hold: Callable[[str], None]) -> None:
    hold("S17")


def test_s17_convention(hold: Callable[[str], None]) -> None:
    hold("S17-convention")


def test_s23_network(hold: Callable[[str], None]) -> None:
    hold("S23")


def test_s25_symlinks(hold: Callable[[str], None]) -> None:
    hold("S25")


def test_s26_hard_links(hold: Callable[[str], None]) -> None:
    hold("S26")


def test_s27_special_files(hold: Callable[[str], None]) -> None:
    hold("S27")


def test_s28_swapped(hold: Callable[[str], None]) -> None:
    hold("S28")


def test_s31_forged_status(hold: Callable[[str], None]) -> None:
    hold("S31")


def test_s32_input_and_children(hold: Callable[[str], None]) -> None:
    hold("S32")


def test_s33_partial_output(hold: Callable[[str], None]) -> None:
    hold("S33")


def test_s15_terminal_input(hold: Callable[[str], None]) -> None:
    hold("S15")


def test_s16_devices(hold: Callable[[str], None]) -> None:
    hold("S16")


def test_s18_kernel_interfaces(hold: Callable[[str], None]) -> None:
    hold("S18")


def test_s19_tracing(hold: Callable[[str], None]) -> None:
    hold("S19")


def test_s20_control_groups(hold: Callable[[str], None]) -> None:
    hold("S20")


def test_s21_neighbours(hold: Callable[[str], None]) -> None:
    hold("S21")


def test_s22_unix_sockets(hold: Callable[[str], None]) -> None:
    hold("S22")


def test_s24_priorities_and_dumps(hold: Callable[[str], None]) -> None:
    hold("S24")


def test_s29_hostile_archives(hold: Callable[[str], None]) -> None:
    hold("S29")


def test_s30_stubborn_trees(hold: Callable[[str], None]) -> None:
    hold("S30")


@pytest.mark.timeout(300)
def test_s36_zombies(hold: Callable[[str], None]) -> None:
    hold("S36")


def test_s37_more_leases_than_boxes(hold: Callable[[str], None]) -> None:
    hold("S37")


def test_s39_release_in_time(hold: Callable[[str], None]) -> None:
    hold("S39")


def test_s41_memory_of_the_box(hold: Callable[[str], None]) -> None:
    hold("S41")
