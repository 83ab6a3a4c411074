"""The policy on non-finite numbers, as tables of steps and verdicts."""

from minidist.faults.policy import Policy


def verdicts(policy, *steps):
    """What follows from each step: s(kip), b(ack), e(nd) or . for nothing. A step is a number, negative where it was bad."""
    letters = []
    for step in steps:
        found = policy.step(abs(step), bad=step < 0)
        assert bool(found.line) == (step < 0) and not (found.stop and found.roll_back)
        letters.append("e" if found.stop else "b" if found.roll_back else "s" if found.line else ".")
    return "".join(letters)


def test_by_default_bad_steps_are_skipped_and_never_minded():
    assert verdicts(Policy(0), *(-n for n in range(1, 50))) == "s" * 49


def test_so_many_in_a_row_end_the_run():
    assert verdicts(Policy(3), 1, -2, -3, 4, -5, -6, -7) == ".ss.sse"
    assert verdicts(Policy(1), 1, -2) == ".e"


def test_it_goes_back_instead_and_stops_when_that_is_in_vain():
    assert verdicts(Policy(2, 2), 1, 2, 3, -4, -5, 3, -4, -5, 3, -4, -5) == "...sb.sb.se"


def test_going_further_than_the_bad_steps_counts_as_recovered():
    assert verdicts(Policy(2, 1), 3, -4, -5, 3, 4, 5, 6, -7, -8, 6, -7, -8) == ".sb....sb.se"
    assert verdicts(Policy(2, 1), 3, -4, -5, 3, 4, 5, -6, -7) == ".sb...se"  # 5 is where it gave up: no further


def test_weights_are_not_saved_as_good_ones_while_steps_are_bad():
    policy = Policy(3)
    assert policy.healthy
    policy.step(1, bad=True)
    assert not policy.healthy
    policy.step(2, bad=False)
    assert policy.healthy


def test_what_is_said():
    policy = Policy(2, 1)
    assert policy.step(4, bad=True).line == "step 4: a gradient was not finite on some rank; every rank skipped the update"
    assert (
        policy.step(5, bad=True).line
        == "step 5: 2 steps in a row were not finite: back to the last checkpoint, past the data since"
    )
    policy.step(4, bad=True)
    assert "2 steps in a row were not finite, 1 times in vain went back: the run stops" in policy.step(5, bad=True).line
