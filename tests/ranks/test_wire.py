"""Values cross as they are: tensors as their own bytes, functions with their lines, modules by their latest code."""

import linecache
import traceback
import types

import pytest
import torch

from minidist.ranks import wire
from minidist.ranks.cell import compile_cell, describe, run_cell
from minidist.ranks.output import Printer
from minidist.ranks.streams import RankStream


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.randn(3, 4).t(),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.arange(6).reshape(2, 3),
        torch.randn(2, requires_grad=True),
    ],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}",
)
def test_tensors_arrive_as_they_left(x):
    y = wire.loads(wire.dumps(x))
    assert (y.dtype, y.shape, y.requires_grad) == (x.dtype, x.shape, x.requires_grad) and torch.equal(x, y)
    with torch.no_grad():
        assert y.copy_(y.clone()) is y  # memory of its own, which may be written


def test_a_view_does_not_drag_its_buffer_along():
    buffer = torch.zeros(100_000)
    p = torch.nn.Parameter(buffer[5:8])
    p.slice = "rows 5 to 8"
    data = wire.dumps({"a": p, "tied": p})
    q = wire.loads(data)
    assert len(data) < 1000 and type(q["a"]) is torch.nn.Parameter and q["a"].slice == p.slice and q["a"] is q["tied"]


def test_functions_keep_the_name_of_their_file():
    f = wire.loads(wire.dumps_by_value(test_functions_keep_the_name_of_their_file))
    assert f.__code__.co_filename == __file__


def test_a_module_made_by_hand_travels_by_value():
    import sys

    module = types.ModuleType("made_by_hand")
    exec("def g():\n    return 1\ndef f():\n    return g() + 1", module.__dict__)
    sys.modules["made_by_hand"] = module
    try:
        data = wire.dumps_by_value(module.f)
    finally:
        del sys.modules["made_by_hand"]
    assert wire.loads(data)() == 2


def test_a_cell_shows_its_last_value_unless_a_semicolon_ends_it():
    def shown(source):
        return run_cell(compile_cell(source, "<cell t>"), namespace)

    namespace = {}
    assert shown("x = 2\nx + 1") == "3" and namespace["_"] == 3
    assert shown("x;") is None and shown("x = 5") is None and shown("") is None and shown("None") is None
    assert shown("{'b': [1, 2], 'a': 0}") == "{'b': [1, 2], 'a': 0}"
    assert linecache.getline("<cell t>", 1) == "{'b': [1, 2], 'a': 0}"


def test_an_exception_is_described_even_if_it_cannot_speak():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    try:
        raise Mute
    except Mute as error:
        told = describe(error)
    assert told["message"] == "(its __str__ raised ValueError)" and "raise Mute" in told["traceback"]


def test_a_chain_of_exceptions_is_told_whole():
    try:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("bad") from error
    except ValueError as error:
        told = describe(error)["traceback"]
        assert told == "".join(traceback.format_exception(error)).rstrip()


def test_a_stream_hands_on_whole_lines_and_the_last_state_of_a_progress_bar():
    said = []
    stream = RankStream("stdout", 1, lambda name, text: said.append(text))
    print("a", "b", end="", file=stream)
    assert said == []
    print("c\nd", file=stream)
    assert said == ["a bc\n", "d\n"]
    for percent in range(101):
        stream.write(f"\r{percent} %")
    stream.rest()
    stream.rest()
    assert said[2:] == ["100 %\n"]
    with pytest.raises(TypeError, match="must be str, not bytes"):
        stream.write(b"x")


def test_the_printer_waits_for_the_ranks_before(capsys):
    printer = Printer(3)
    printer.say(2, "stdout", "two\n")
    printer.say(1, "stdout", "one\nmore\n")
    assert capsys.readouterr().out == ""
    printer.say(0, "stdout", "zero\n")
    assert capsys.readouterr().out == "[0] zero\n"
    printer.done(0)
    assert capsys.readouterr().out == "[1] one\n[1] more\n"
    printer.say(1, "stderr", "live\n")
    assert capsys.readouterr().err == "[1] live\n"
    printer.finish()
    assert capsys.readouterr().out == "[2] two\n"
