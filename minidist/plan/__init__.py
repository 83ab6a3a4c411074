"""plan: how long, how much memory, which layout, before anything runs. Open first `roofline.py`, then `time.py`."""
