"""The health check: a good node passes, a planted fault is named, a node that hangs or dies in it has failed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from ranks.processes import ROOT

from minidist.core import device as devices
from minidist.core import probe
from minidist.faults import health
from minidist.faults.health import GONE, Health, Needs, examine, sort_out


def test_this_machine_is_good_and_its_folder_is_left_clean(tmp_path):
    found = examine(tmp_path / "runs")
    assert found.good and found.faults == () and str(found).endswith(": good")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (Needs(gpus=64), f"{devices.gpu_count()} of 64 GPUs are visible"),
        (Needs(disk_bytes=1 << 60), "MB of disk are free for"),
        (Needs(memory_bytes=1 << 60), "MB of host memory are free"),
    ],
)
def test_what_is_missing_is_named(needs, says, tmp_path):
    (fault,) = examine(tmp_path, needs, torch.device("cpu")).faults
    assert says in fault


def test_a_device_that_multiplies_wrongly_is_named(tmp_path, monkeypatch):
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(a, b) + (a.dtype == torch.float32) * torch.eye(256))
    assert probe.arithmetic(torch.device("cpu")) == (
        "cpu multiplies matrices wrongly: 256 of 65536 elements differ from the exact product"
    )


def test_a_device_without_memory_is_named():
    assert probe.memory(torch.device("cpu"), 1 << 50).startswith(f"cpu has no {1 << 50} bytes of memory to give")


def test_a_disk_that_forgets_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(health.os, "fsync", lambda fd: os.pwrite(fd, b"?", 7))
    (fault,) = examine(tmp_path).faults
    assert fault == f"{tmp_path} does not keep what is written to it"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    (fault,) = examine(tmp_path / "runs").faults
    assert "FileExistsError" in fault


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert "an all-reduce over loopback failed" in probe.loopback() and "nosuch0" in probe.loopback()


def run(tmp_path, *words):
    line = [sys.executable, "-m", "minidist.faults.health", "--folder", str(tmp_path), *words]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return done.returncode, json.loads(done.stdout)


def test_a_launcher_reads_one_line_a_node(tmp_path):
    code, found = run(tmp_path, "--gpus", "64")
    assert code == GONE and len(found["faults"]) == 1
    good, left_out = sort_out(['{"node": "a", "faults": []}', "", json.dumps({**found, "node": "b"})], ["a", "b", "c"])
    assert good == ["a"] and left_out == {"b": f"{devices.gpu_count()} of 64 GPUs are visible", "c": "gave no answer"}
    assert str(Health("b", ("x", "y"))) == "b: x; y"
