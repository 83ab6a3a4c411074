"""One process's run per configuration, made once a session: what every layout is held against."""

import pytest
from parity.harness import one_process, token_file


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    tokens, made = token_file(tmp_path_factory.mktemp("tokens")), {}

    def run(cfg):
        key = (cfg.model, cfg.train.global_batch)
        if key not in made:
            made[key] = one_process(cfg, tokens)
        return tokens, made[key]

    return run
