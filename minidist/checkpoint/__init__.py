"""Checkpoints: safetensors files and a JSON manifest that a person can read. Nothing in them can run code."""

from minidist.checkpoint.choose import latest, prune, resolve
from minidist.checkpoint.manifest import Manifest, read_manifest
from minidist.checkpoint.read import Reader, fill, load, match
from minidist.checkpoint.saver import Saver, save

__all__ = ["Manifest", "Reader", "Saver", "fill", "latest", "load", "match", "prune", "read_manifest", "resolve", "save"]
