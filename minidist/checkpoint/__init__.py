"""Checkpoints: safetensors files and a JSON manifest that a person can read. Nothing in them can run code."""

from minidist.checkpoint.manifest import Manifest, latest, read_manifest, resolve
from minidist.checkpoint.read import Reader, fill, load, match
from minidist.checkpoint.write import save

__all__ = ["Manifest", "Reader", "fill", "latest", "load", "match", "read_manifest", "resolve", "save"]
