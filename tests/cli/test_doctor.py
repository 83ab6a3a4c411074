"""The doctor: a good machine is good, and each planted fault is seen with its fix."""

import json

import pytest

from minidist import doctor, ranks


def test_a_real_run_gives_one_verdict_a_line_and_as_json(minidist):
    said = minidist("doctor", "--json")
    report = json.loads(said.out)
    assert report["ok"] is (said.code == 0)
    checks = {finding["check"]: finding for finding in report["findings"]}
    wanted = (
        "python",
        "torch",
        "gloo",
        "network",
        "host name",
        "start",
        "cores",
        "memory",
        "disk",
        "/dev/shm",
        "gpus",
        "jupyter",
    )
    assert set(wanted) <= set(checks)
    assert checks["gloo"]["state"] == "good" and "summed 1 + 2 to 3" in checks["gloo"]["found"]
    assert all(finding["fix"] for finding in report["findings"] if finding["state"] != "good")


def test_gloo_that_fails_is_bad_with_the_reason(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("ranks could not join each other:\nConnection refused\n")

    monkeypatch.setattr(ranks, "run", broken)
    (finding,) = doctor.gloo()
    assert finding.state == "bad" and "Connection refused" in finding.found and finding.fix
    monkeypatch.setattr(ranks, "run", lambda *args, **kwargs: [3.0, 4.0])
    (finding,) = doctor.gloo()
    assert finding.state == "bad"


NETWORK = {  # C49: environment, interfaces -> state, words
    "nothing set": ({}, ["lo", "eth0"], "good", "lo, eth0"),
    "right names": ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^docker0"}, ["lo", "eth0"], "good", "eth0"),
    "NCCL's pattern given to gloo": ({"GLOO_SOCKET_IFNAME": "^docker0"}, ["lo", "eth0"], "bad", "NCCL's patterns"),
    "an interface that is not there": ({"GLOO_SOCKET_IFNAME": "eth1"}, ["lo", "eth0"], "bad", "no interface 'eth1'"),
    "one of two": ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, ["lo", "eth0"], "bad", "no interface 'eth1'"),
    "NCCL left with nothing": ({"NCCL_SOCKET_IFNAME": "=eth"}, ["lo", "eth0"], "bad", "leaves none"),
    "NCCL excludes all": ({"NCCL_SOCKET_IFNAME": "^lo,eth"}, ["lo", "eth0"], "bad", "leaves none"),
    "NCCL by prefix": ({"NCCL_SOCKET_IFNAME": "eth"}, ["lo", "eth0"], "good", "eth0"),
    "a VPN": ({}, ["lo", "eth0", "tun0"], "warn", "tun0"),
    "a VPN, but chosen": ({"GLOO_SOCKET_IFNAME": "eth0"}, ["lo", "eth0", "tun0"], "good", "tun0"),
}


@pytest.mark.parametrize("case", NETWORK)
def test_network_traps(case):
    env, names, state, words = NETWORK[case]
    (finding,) = doctor.interfaces(env, names)
    assert finding.state == state and words in finding.found
    if state != "good":
        assert "eth0" in finding.fix


def test_other_faults_are_seen_with_their_fix(monkeypatch, tmp_path):
    (finding,) = doctor.host_name("no-such-host.invalid")
    assert finding.state == "warn" and "/etc/hosts" in finding.fix
    (finding,) = doctor.python((3, 9, 1))
    assert finding.state == "bad" and "3.11" in finding.fix
    (finding,) = doctor.cores({"OMP_NUM_THREADS": "16"}, 2)  # C51
    assert finding.state == "warn" and "64 threads" in finding.found and "unset OMP_NUM_THREADS" in finding.fix
    (finding,) = doctor.cores({"OMP_NUM_THREADS": "two"}, 2)
    assert finding.state == "bad"
    (finding,) = doctor.cores({}, 16)
    assert finding.state == "good" and "4 threads each" in finding.found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else 1)
    (finding,) = doctor.jupyter()
    assert finding.state == "bad" and "pip install ipywidgets" in finding.fix
    monkeypatch.setattr(doctor.os, "access", lambda *args: False)
    assert {finding.state for finding in doctor.disk()} == {"bad"}
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.14.1+cu130")
    (finding,) = doctor.torch_version()
    assert finding.state == "warn" and "torch>=2.9,<2.14" in finding.fix


def test_one_bad_line_makes_exit_code_1_and_a_check_that_breaks_is_a_line_too(monkeypatch, capsys):
    def breaks():
        raise RuntimeError("odd machine")
        yield

    good, warn = doctor.Finding("a", "good", "fine"), doctor.Finding("b", "warn", "hm", "mind it")
    monkeypatch.setattr(doctor, "examine", lambda: iter([good, warn]))
    assert doctor.report(as_json=False) == 0
    assert capsys.readouterr().out.startswith(
        "good  a             fine\nwarn  b             hm\n" + " " * 20 + "fix: mind it\n"
    )
    (finding,) = doctor._guarded(breaks)
    assert finding.state == "bad" and "odd machine" in finding.found
    monkeypatch.setattr(doctor, "examine", lambda: iter([good, finding]))
    assert doctor.report(as_json=False) == 1 and "1 to fix" in capsys.readouterr().out
