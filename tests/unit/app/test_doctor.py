from __future__ import annotations

import json

import pytest

from lehr.app import doctor
from lehr.app.cli import run
from lehr.sandbox.host import HostReport, Lack


def _report(*lacks: Lack, **changes) -> HostReport:
    facts = dict(
        kernel="6.1",
        machine="x86_64",
        user="somebody",
        bwrap="/usr/bin/bwrap",
        bwrap_version="0.8.0",
        libseccomp="2.5.4",
        seccomp=True,
        python="/usr/bin/python3",
        user_namespaces=True,
        apparmor_restricts=None,
        cgroups="v2",
        controllers={"memory": "/sys/fs/cgroup/a", "pids": "/sys/fs/cgroup/a"},
        landlock_abi=4,
    )
    return HostReport(**{**facts, **changes}, lacks=lacks)


def test_a_needed_lack_fails_the_check_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lack = Lack("bubblewrap", "bwrap is not installed", "apt-get install bubblewrap")
    monkeypatch.setattr("lehr.sandbox.host.probe", lambda: _report(lack, bwrap=None))
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "bwrap is not installed" in out and "apt-get install bubblewrap" in out and "cannot run" in out


def test_a_weakness_warns_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lack = Lack("cgroups", "memory: not delegated", "systemd-run --user --scope lehr", needed=False)
    monkeypatch.setattr("lehr.sandbox.host.probe", lambda: _report(lack, controllers={}))
    monkeypatch.setattr("lehr.app.preflight.box_problem", lambda backend="bwrap": None)
    status = run(["doctor", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cgroups"]["state"] == "warn" and rows["cgroups"]["mend"]
    assert rows["box"]["state"] == "ok"
    assert status == (1 if any(row["state"] == "missing" for row in rows.values()) else 0)


def test_apparmor_restrictions_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lehr.sandbox.host.probe", lambda: _report(apparmor_restricts=True))
    monkeypatch.setattr("lehr.app.preflight.box_problem", lambda backend="bwrap": None)
    checks = {check.name: check for check in doctor.sandbox_checks()}
    assert "restricted" in checks["user namespaces"].detail


def test_an_ordinary_user_is_told_to_use_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert doctor.as_typed("apt-get install bubblewrap") == "sudo apt-get install bubblewrap"
    assert doctor.as_typed("apt-get install a && pip install b") == "sudo apt-get install a && pip install b"
    assert doctor.as_typed("systemd-run --user x") == "systemd-run --user x"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert doctor.as_typed("apt-get install bubblewrap") == "apt-get install bubblewrap"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_required", lambda: ["numpy", "no-such-package"])
    (check,) = doctor.package_checks()
    assert check.state == "missing" and "no-such-package" in check.detail and "numpy" not in check.detail
    assert check.mend


def test_too_little_memory_or_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "NEEDED_DISK", 1 << 60)
    states = {check.name: check.state for check in doctor.machine_checks()}
    assert states["memory"] == states["disk"] == "missing"
