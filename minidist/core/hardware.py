"""What devices can do at best: peak arithmetic by dtype, memory and bandwidth, from their makers' data sheets.

Dense tensor-core peaks (no sparsity), in FLOP/s; memory in bytes; bandwidth in bytes/s. An unknown device is unknown: nothing
is guessed from a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def _peaks(half: float, single: float, double: float) -> dict[str, float]:
    """TFLOP/s to FLOP/s by dtype. float32 is true float32, without TF32; float64 uses tensor cores."""
    return {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12, "float64": double * 1e12}


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, 2023 (half of the figures printed with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, 2024 (half of the figures printed with sparsity)"

DEVICES = (
    Device("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", _peaks(312, 19.5, 19.5), 80e9, 2039e9, _A100),
    Device("A100 SXM 40GB", "NVIDIA A100-SXM4-40GB", _peaks(312, 19.5, 19.5), 40e9, 1555e9, _A100),
    Device("A100 PCIe 80GB", "NVIDIA A100 80GB PCIe", _peaks(312, 19.5, 19.5), 80e9, 1935e9, _A100),
    Device("H100 SXM 80GB", "NVIDIA H100 80GB HBM3", _peaks(989.5, 67, 67), 80e9, 3.35e12, _H100),
    Device("H100 PCIe 80GB", "NVIDIA H100 PCIe", _peaks(756.5, 51, 51), 80e9, 2.0e12, _H100),
    Device("H200 SXM", "NVIDIA H200", _peaks(989.5, 67, 67), 141e9, 4.8e12, _H200),
)


def find(name: str) -> Device | None:
    """The data sheet of the device that a driver calls `name` ("NVIDIA H100 80GB HBM3"), or None if it is not in the table."""
    return next((device for device in DEVICES if device.reported == name), None)


def peak_flops(name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for matrix products in `dtype` ("bfloat16"), or None: an unknown peak is not guessed."""
    device = find(name)
    return device.peak.get(dtype) if device else None
