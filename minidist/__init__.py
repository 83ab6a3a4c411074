"""minidist: distributed training, learned by running it. `import minidist` costs nothing; the parts import what they need."""

__version__ = "0.1.0"
