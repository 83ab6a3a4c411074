"""What devices can do at best: peak arithmetic by dtype, memory, bandwidth and links, from their makers' data sheets.

Dense tensor-core peaks (no sparsity), in FLOP/s; memory in bytes; bandwidth in bytes/s, of links in one direction. An unknown
device is unknown, an unknown field None: nothing is guessed from a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SM:
    """What one multiprocessor holds at a time; the limits of occupancy."""

    warps: int
    blocks: int
    registers: int
    """of 4 bytes"""
    shared: int
    """bytes of shared memory for all resident blocks"""
    reserved: int = 1024
    """bytes of it that the system takes for each block"""


@dataclass(frozen=True)
class Device:
    """One accelerator's data sheet."""

    name: str
    reported: str
    """what the driver calls it; matched exactly, since a neighbour's name (H100 NVL) can have other peaks"""
    peak: dict[str, float]
    """FLOP/s by dtype name"""
    memory: float
    """bytes"""
    bandwidth: float
    """bytes/s of its memory"""
    source: str
    sms: int | None = None
    """multiprocessors that work side by side"""
    sm: SM | None = None
    l2: float | None = None
    """bytes of the cache that all multiprocessors share"""
    link: float | None = None
    """bytes/s to a neighbour in the server (NVLink, PCIe)"""
    network: float | None = None
    """bytes/s of the server's network cards for each of its accelerators, in the maker's own server"""
    measured: float | None = None
    """FLOP/s of the best bfloat16 matmul that somebody measured, by `LINKS_SOURCE`"""


def _peaks(half: float, single: float, double: float) -> dict[str, float]:
    """TFLOP/s to FLOP/s by dtype. float32 is true float32, without TF32; float64 uses tensor cores."""
    return {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12, "float64": double * 1e12}


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, 2023 (half of the figures printed with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, 2024 (half of the figures printed with sparsity)"
LINKS_SOURCE = "stas00/ml-engineering, compute/accelerator and network, 2026: links, network cards and measured matmuls"
_SM80 = SM(warps=64, blocks=32, registers=65536, shared=164 * 1024)  # NVIDIA Ampere and Hopper tuning guides
_SM90 = SM(warps=64, blocks=32, registers=65536, shared=228 * 1024)
_A = {"sms": 108, "sm": _SM80, "l2": 40e6}  # NVIDIA A100 and H100 architecture white papers, 2020 and 2022
_H = {"sms": 132, "sm": _SM90, "l2": 50e6}
_HP = {"sms": 114, "sm": _SM90, "l2": 50e6}
_NV3 = {"link": 300e9, "network": 25e9}  # NVLink 3; a DGX A100 has 8 cards of 200 Gb/s for 8 GPUs
_NV4 = {"link": 450e9, "network": 50e9}  # NVLink 4; a DGX H100 has 8 of 400 Gb/s

DEVICES = (
    Device(
        "A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", _peaks(312, 19.5, 19.5), 80e9, 2039e9, _A100, **_A, **_NV3, measured=271.2e12
    ),
    Device("A100 SXM 40GB", "NVIDIA A100-SXM4-40GB", _peaks(312, 19.5, 19.5), 40e9, 1555e9, _A100, **_A, **_NV3),
    Device(
        "A100 PCIe 80GB",
        "NVIDIA A100 80GB PCIe",
        _peaks(312, 19.5, 19.5),
        80e9,
        1935e9,
        _A100,
        **_A,
        link=31e9,
        measured=252.9e12,
    ),
    Device(
        "H100 SXM 80GB", "NVIDIA H100 80GB HBM3", _peaks(989.5, 67, 67), 80e9, 3.35e12, _H100, **_H, **_NV4, measured=794.5e12
    ),
    Device("H100 PCIe 80GB", "NVIDIA H100 PCIe", _peaks(756.5, 51, 51), 80e9, 2.0e12, _H100, **_HP, link=63e9),
    Device("H200 SXM", "NVIDIA H200", _peaks(989.5, 67, 67), 141e9, 4.8e12, _H200, **_H, **_NV4, measured=794.5e12),
)

LAPTOP = Device(
    "laptop GPU (Apple M2, 10 cores)",
    "Apple M2",
    {"float32": 3.578e12},
    24e9,
    100e9,
    "askgeek.io (arithmetic) and MacRumors, 6 June 2022 (memory); no driver name leads here, as the 8-core part shares it",
)
RECORDED_CPU = Device(
    "one CPU core (recorded)",
    "cpu",
    {"float32": 105e9},
    25e9,
    37e9,
    "recorded with plan.roofline.measure, one thread on an AMD EPYC, torch 2.13: matmul of 768, add of three tensors of 67 MB",
)


def find(name: str) -> Device | None:
    """The data sheet of the device that a driver calls `name` ("NVIDIA H100 80GB HBM3"), or None if it is not in the table."""
    return next((device for device in DEVICES if device.reported == name), None)


def peak_flops(name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for matrix products in `dtype` ("bfloat16"), or None: an unknown peak is not guessed."""
    device = find(name)
    return device.peak.get(dtype) if device else None
