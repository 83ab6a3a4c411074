"""One process's run per configuration, made once a session: what every layout is held against; and the matrix's table."""

import os
from pathlib import Path

import pytest
import torch
from parity.harness import one_process, token_file
from parity.layouts import table


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    return made_once(token_file(tmp_path_factory.mktemp("tokens")))


def made_once(tokens):
    """A function of a configuration: (tokens, what one process makes of them), computed at the first call."""
    made = {}

    def run(cfg):
        key = (cfg.model, cfg.optim, cfg.train.global_batch, cfg.train.seq_len)
        if key not in made:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # several wait for each other longer than they work on matrices this small
            made[key] = one_process(cfg, tokens)
            torch.set_num_threads(threads)
        return tokens, made[key]

    return run


def pytest_terminal_summary(terminalreporter):
    """The table of worst errors, if the matrix ran; also into the file that $MATRIX_TABLE names."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    found = [dict(report.user_properties) for report in reports if report.when == "call"]
    rows = [(properties["axes"], properties["error"]) for properties in found if "axes" in properties]
    if rows:
        terminalreporter.section(f"worst errors, {len(rows)} layouts")
        terminalreporter.write_line(table(rows))
        if path := os.environ.get("MATRIX_TABLE"):
            Path(path).write_text(table(rows) + "\n", encoding="utf-8")
