"""The public seam: what it refuses."""

from contextlib import closing

import numpy as np
import pytest
from envs import Counter

from shmvec.exchange import Exchange


@pytest.mark.parametrize("env", [-1, 3, 10**9])
def test_envs_that_there_are_not(env):
    with closing(Exchange([Counter] * 3, num_workers=0)) as exchange:
        exchange.ask_reset()
        for ask in (
            lambda: exchange.take([env]),
            lambda: exchange.take(np.array([env], np.intp)),
            lambda: exchange.is_out(env),
            lambda: exchange.is_over(env),
        ):
            with pytest.raises(ValueError, match=f"there is no env {env}: there are 3"):
                ask()
        assert len(exchange.take().envs) == 3
