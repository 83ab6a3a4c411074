"""`minidist doctor`: is this machine fit for the course? One line a check: good, or what to do about it.

Every check is a small function that returns findings and never raises; what it looks at (environment, interfaces) is an
argument where a test wants to plant a fault.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GB = 1e9
VPN = ("tun", "tap", "wg", "utun", "ppp", "tailscale", "zt", "nordlynx", "proton")  # names that VPNs give interfaces


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: str
    """good; warn: works, but mind it; bad: something will not work"""
    found: str
    """what was seen"""
    fix: str = ""
    """what to do, where the state is not good"""

    def __str__(self):
        line = f"{self.state:<4}  {self.check:<12}  {self.found}"
        return f"{line}\n{'':20}fix: {self.fix}" if self.fix else line


def examine() -> Iterator[Finding]:
    """Run all checks, one after another, giving each finding as soon as it is there."""
    for check in (python, torch_version, gloo, interfaces, host_name, start_method, cores, memory, disk, shared_memory):
        yield from _guarded(check)
    for check in (open_files, gpus, jupyter):
        yield from _guarded(check)


def python(version: tuple[int, ...] = tuple(sys.version_info)) -> Iterator[Finding]:
    """3.11 or later."""
    found = f"{'.'.join(map(str, version[:3]))} at {sys.executable}"
    if version >= (3, 11):
        yield Finding("python", "good", found)
    else:
        yield Finding("python", "bad", found, "install Python 3.11 or later and make the virtual environment with it")


def torch_version() -> Iterator[Finding]:
    """There, and in the range that the package was tested with."""
    fix = "pip install 'torch>=2.9,<2.14'"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "bad", "not installed for this Python", fix)
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if (2, 9) <= numbers < (2, 14):
        yield Finding("torch", "good", version)
    else:
        yield Finding("torch", "warn", f"{version} is outside >=2.9,<2.14, which the package is tested with", fix)


def gloo() -> Iterator[Finding]:
    """Two real ranks on this host, an all-reduce between them."""
    from minidist import ranks

    begin = time.perf_counter()
    try:
        sums = ranks.run(_all_reduce, 2, timeout_s=60, fresh=True)
    except Exception as error:
        first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        fix = "see the network lines below; a firewall that filters loopback, or a sandbox without sockets, also does this"
        yield Finding("gloo", "bad", f"an all-reduce between two ranks on this host failed: {first.strip()}", fix)
        return
    seconds = time.perf_counter() - begin
    state, fix = ("good", "") if sums == [3.0, 3.0] else ("bad", "reinstall torch: its gloo returns wrong sums")
    yield Finding(
        "gloo", state, f"two ranks on this host summed 1 + 2 to {sums[0]:g} (started and done in {seconds:.1f} s)", fix
    )


def _all_reduce(mesh) -> float:
    import torch

    from minidist.core import comm

    return float(comm.all_reduce(torch.tensor([mesh.rank + 1.0]), mesh.world))


def interfaces(env: Mapping[str, str] = os.environ, names: Sequence[str] | None = None) -> Iterator[Finding]:
    """The variables that choose an interface, and VPNs that a run over several hosts may choose by itself (C49)."""
    names = [name for _, name in socket.if_nameindex()] if names is None else list(names)
    real = ", ".join(names)
    faults = False
    for word in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if word in names:
            continue
        faults = True
        what = f"GLOO_SOCKET_IFNAME={env['GLOO_SOCKET_IFNAME']}: "
        if word[0] in "^=":
            what += "^ and = are NCCL's patterns, gloo takes plain interface names"
        else:
            what += f"this host has no interface {word!r}"
        yield Finding("network", "bad", what, f"unset it, or name one of {real}")
    pattern = env.get("NCCL_SOCKET_IFNAME", "")
    if pattern and not _nccl_choice(pattern, names):
        faults = True
        what = f"NCCL_SOCKET_IFNAME={pattern} leaves none of this host's interfaces"
        yield Finding("network", "bad", what, f"unset it, or name one of {real} (^name leaves one out, =name is exact)")
    vpns = [name for name in names if name.startswith(VPN)]
    if vpns and not env.get("GLOO_SOCKET_IFNAME"):
        faults = True
        what = f"a VPN is up ({', '.join(vpns)}): no matter on this host, but runs over several hosts may choose it"
        others = [name for name in names if name not in vpns and not name.startswith("lo")] or ["eth0"]
        yield Finding(
            "network", "warn", what, f"for those, export GLOO_SOCKET_IFNAME={others[0]} NCCL_SOCKET_IFNAME={others[0]}"
        )
    if not faults:
        yield Finding("network", "good", f"interfaces {real}; nothing chooses a wrong one")


def _nccl_choice(pattern: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL's pattern leaves: a list of prefixes; "=" makes them exact, a leading "^" leaves them out."""
    without = pattern.startswith("^")
    words = pattern.removeprefix("^")
    exact = words.startswith("=")
    words = tuple(filter(None, words.removeprefix("=").split(",")))
    hits = [name for name in names if (name in words if exact else name.startswith(words))]
    return [name for name in names if name not in hits] if without else hits


def host_name(name: str | None = None) -> Iterator[Finding]:
    """The host's own name must resolve: torchrun and gloo ask for its address."""
    name = socket.gethostname() if name is None else name
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        fix = f"add the line '127.0.1.1 {name}' to /etc/hosts; ranks of `minidist` on this host do without"
        yield Finding("host name", "warn", f"{name} does not resolve, so torchrun may hang or fail", fix)
        return
    yield Finding("host name", "good", f"{name} is {address}")


def start_method() -> Iterator[Finding]:
    """How ranks start."""
    if sys.platform.startswith("linux"):
        yield Finding("start", "good", "ranks are forked from a process that has imported torch: milliseconds")
    elif sys.platform == "win32":
        fix = "use WSL 2, and run `minidist doctor` there"
        yield Finding("start", "bad", "Windows has neither fork nor the sockets that ranks use", fix)
    else:
        yield Finding("start", "good", f"ranks are spawned: fork is unsafe on {platform.system()}, a start takes seconds")


def cores(env: Mapping[str, str] = os.environ, count: int | None = None) -> Iterator[Finding]:
    """Cores this process may use, and a thread setting that would make ranks fight over them (C51)."""
    count = usable_cores() if count is None else count
    text = env.get("OMP_NUM_THREADS", "")
    each = max(1, count // 4)
    what = f"{count} usable; 4 ranks take {each} thread{'s' * (each > 1)} each"
    if text and (not text.isdecimal() or int(text) < 1):
        yield Finding("cores", "bad", f"OMP_NUM_THREADS={text} is no number of threads", "unset OMP_NUM_THREADS")
    elif text and int(text) > each:
        what = f"{count} usable, but OMP_NUM_THREADS={text} gives each of 4 ranks that many: {4 * int(text)} threads"
        yield Finding("cores", "warn", what, f"unset OMP_NUM_THREADS (each rank then takes {each})")
    elif count < 2:
        yield Finding("cores", "warn", what, "give the machine or container two cores or more: ranks run, but in turns")
    else:
        yield Finding("cores", "good", what + (f" (OMP_NUM_THREADS={text})" if text else ""))


def usable_cores() -> int:
    """Cores that the scheduler and a container's quota let this process use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def memory() -> Iterator[Finding]:
    """Free memory, within a container's limit: a forked rank takes about 0.2 GB, JupyterLab 0.3 GB."""
    free = None
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free = min(free or int(limit), int(limit) - int(used))
    if free is None:
        yield Finding("memory", "good", "not measured on this system; lessons want 4 GB")
    elif free < 4 * GB:
        fix = "close other programs or raise the container's limit; lessons with 8 ranks want 4 GB"
        yield Finding("memory", "warn" if free > GB else "bad", f"{free / GB:.1f} GB free", fix)
    else:
        yield Finding("memory", "good", f"{free / GB:.1f} GB free")


def disk() -> Iterator[Finding]:
    """Room, and the right to write, where runs, corpora and rendezvous files go."""
    home = os.environ.get("MINIDIST_HOME") or Path.home() / ".cache" / "minidist"
    for what, place in (
        ("runs", os.environ.get("MINIDIST_RUNS") or "runs"),
        ("corpora", home),
        ("temporary", tempfile.gettempdir()),
    ):
        folder = Path(place).absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        where = f"{what} in {place}: {free / GB:.0f} GB free"
        if not os.access(folder, os.W_OK):
            variable = {"runs": "MINIDIST_RUNS", "corpora": "MINIDIST_HOME", "temporary": "TMPDIR"}[what]
            yield Finding("disk", "bad", f"{what}: {folder} cannot be written", f"point {variable} to a folder of yours")
        elif free < GB:
            yield Finding("disk", "warn", where, "free a few GB there")
        else:
            yield Finding("disk", "good", where)


def shared_memory() -> Iterator[Finding]:
    """/dev/shm: small in containers, and NCCL between GPUs of one host lives there."""
    if not os.path.isdir("/dev/shm"):
        yield Finding("/dev/shm", "good", "not a thing on this system")
        return
    total = shutil.disk_usage("/dev/shm").total
    if total < GB:
        fix = "enough for CPU ranks; for several GPUs start the container with --shm-size=8g or --ipc=host"
        yield Finding("/dev/shm", "warn", f"{total / 1e6:.0f} MB", fix)
    else:
        yield Finding("/dev/shm", "good", f"{total / GB:.1f} GB")


def open_files() -> Iterator[Finding]:
    """File descriptors: each pair of gloo ranks holds a connection."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        yield Finding("open files", "warn", f"at most {soft} a process", "ulimit -n 4096")
    else:
        yield Finding("open files", "good", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} a process")


def gpus() -> Iterator[Finding]:
    """GPUs and NCCL, where there are any."""
    from minidist.core import device

    facts = device.gpu_facts()
    if not facts:
        yield Finding("gpus", "good", "none that torch can use: every lesson runs on the CPU over gloo")
        return
    names = ", ".join(f"{gpu['name']} ({gpu['memory'] / GB:.0f} GB, capability {gpu['capability']})" for gpu in facts)
    yield Finding("gpus", "good", names)
    nccl = device.nccl_version()
    if nccl is None:
        yield Finding(
            "nccl", "warn", "this torch has none, so GPUs talk through gloo", "install torch for Linux with its GPU libraries"
        )
    else:
        yield Finding("nccl", "good", nccl)


def jupyter() -> Iterator[Finding]:
    """JupyterLab and widgets, and that the kernel called python3 runs this Python."""
    missing = [name for name in ("jupyterlab", "ipywidgets", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "jupyter", "bad", f"{', '.join(missing)} not installed", f"{sys.executable} -m pip install {' '.join(missing)}"
        )
        return
    from jupyter_client.kernelspec import KernelSpecManager

    program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    version = importlib.metadata.version("jupyterlab")
    if program not in ("python", "python3") and os.path.realpath(program) != os.path.realpath(sys.executable):
        fix = f"{sys.executable} -m ipykernel install --sys-prefix"
        yield Finding("jupyter", "bad", f"the kernel 'python3' runs another Python, {program}", fix)
    else:
        yield Finding("jupyter", "good", f"JupyterLab {version}, kernel python3 runs this Python")


def report(as_json: bool) -> int:
    """Print all findings; 0 when nothing is bad, else 1."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    bad = sum(finding.state == "bad" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(f"\n{bad} to fix" if bad else "\nall good: go on with `minidist lab`")
    return 1 if bad else 0


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check's findings; a check that fails itself is a finding too."""
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return [Finding(name, "bad", f"could not be examined: {type(error).__name__}: {error}", "see the error")]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
