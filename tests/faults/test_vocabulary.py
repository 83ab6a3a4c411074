"""Faults as text: what is read, and what is refused in one line with the nearest right word."""

import pytest

from minidist.faults.vocabulary import KINDS, Fault, help_text, read, read_all


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=1,step=7", Fault("kill", 1, 7)),
        ("stop:rank=2,step=3,seconds=5", Fault("stop", 2, 3, amounts={"seconds": 5.0})),
        ("slow-link:rank=0,latency=1e-3,bandwidth=1e6", Fault("slow-link", 0, 0, amounts={"latency": 1e-3, "bandwidth": 1e6})),
        ("slow-disk:rank=1,bytes_per_s=1e6", Fault("slow-disk", 1, 0, amounts={"bytes_per_s": 1e6})),
        ("full-disk:rank=1,step=4,bytes=100000,attempt=2", Fault("full-disk", 1, 4, 2, {"bytes": 1e5})),
        ("nan:rank=2,step=5", Fault("nan", 2, 5)),
        ("nan:rank=2,step=5,value=-inf", Fault("nan", 2, 5, amounts={"value": float("-inf")})),
        ("flip:rank=0,step=10", Fault("flip", 0, 10)),
    ],
)
def test_what_a_text_means(text, fault):
    assert read(text) == fault
    assert read(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1,step=7", "there is no kind 'kil', did you mean kill?"),
        ("explode", "there is no kind 'explode', use one of kill, stop"),
        ("kill:rnak=1,step=7", "kill takes no 'rnak', did you mean rank?"),
        ("kill:rank=1,seconds=2,step=1", "kill takes no 'seconds', use one of rank, step, attempt"),
        ("kill:rank=1", "state step too, as in kill:rank=1,step=7"),
        ("slow-disk:rank=1", "state bytes_per_s too, as in slow-disk:rank=1,bytes_per_s=1e6"),
        ("slow-link:rank=1", "state latency in seconds, bandwidth in bytes a second, or both"),
        ("kill:rank=1,step=1.5", "step=1.5 is not a whole number"),
        ("kill:rank=1,step", "write step=NUMBER, once"),
        ("kill:rank=1,step=2,rank=3", "write rank=NUMBER, once"),
        ("kill:rank=-1,step=2", "rank=-1 cannot be, give 0 or more"),
        ("slow-disk:rank=1,bytes_per_s=0", "bytes_per_s=0 cannot be, give more than 0"),
        ("slow-disk:rank=1,bytes_per_s=nan", "bytes_per_s=nan cannot be"),
        ("stop:rank=1,step=2,seconds=soon", "seconds=soon is not a number such as 0.5 or 1e6"),
        ("nan:rank=1,step=2,value=3", "value=3 is finite, give nan, inf or -inf"),
    ],
)
def test_refusals(text, says):
    with pytest.raises(ValueError) as caught:
        read(text)
    assert says in str(caught.value) and repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_faults_that_cannot_strike_this_run():
    assert read_all(["kill:rank=3,step=9"], ranks=4, steps=9) == [Fault("kill", 3, 9)]
    with pytest.raises(ValueError, match="there is no rank 4, give 0 to 3"):
        read_all(["kill:rank=4,step=9"], ranks=4, steps=9)
    with pytest.raises(ValueError, match="step 10 is beyond the last one, 9"):
        read_all(["kill:rank=3,step=10"], ranks=4, steps=9)


def test_help_names_every_kind_and_word():
    lines = help_text().splitlines()
    assert [line.split(":")[0] for line in lines] == list(KINDS)
    for kind, line in zip(KINDS.values(), lines, strict=True):
        assert all(f"{word}=X" in line for word in (*kind.needs, *kind.takes))
