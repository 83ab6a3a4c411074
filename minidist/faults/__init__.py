"""What goes wrong on a cluster, noticed, named, survived, and done on purpose: hangs, deaths, preemption, full disks, NaNs."""
