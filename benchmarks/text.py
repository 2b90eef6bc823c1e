"""Texts of Text spaces and of infos: what a batch costs, beside Gymnasium's vector envs.

    python benchmarks/text.py                                     # all, at most 15 minutes
    python benchmarks/text.py --what infos --length 64000 --systems ShmVectorEnv SyncVectorEnv

The envs are as those of language models: both spaces are Text(65536), each step makes a new text of
so many characters, as the observation or in the info, or takes one as its action; where it is not
the text's turn, observation and action are of two characters. ASCII has a byte a character,
Japanese has two (in UTF-8: three). In each cell the contenders take turns in one run. The caller
keeps what a batch step returns until the next one, as a training loop does.

The limit are free-running loops, one a core, that make the same steps: a text is made and passed
on as a reference. SyncVectorEnv does no more than that, in one process; so it is the faster one
where envs do nothing but that, and not where they think as long as they take turns.
AsyncVectorEnv is measured with ``shared_memory=False``: in shared memory it writes and reads a text
character by character, as many as the space's max_length (`--shared`; a batch takes seconds).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

import shmvec
from shmvec._commands.measuring import LIMIT, Stepper, cells, described, line, machine, race

LONGEST = 65_536
WORDS = {
    "ASCII": "You are in a room. There is a door to the north. ",
    "Japanese": "あなたは部屋にいる。北に扉がある。",
}
PLACES = ["observations", "actions", "infos"]
ASYNC, SYNC, OURS = "AsyncVectorEnv", "SyncVectorEnv", "ShmVectorEnv"


class Texts(gym.Space[str]):
    """A source of actions in place of a Text space's, which takes long to sample."""

    def __init__(self, length: int, words: str) -> None:
        """Makes texts of so many characters."""
        super().__init__((), str)
        self._text = text(length, words)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """The same text each time."""
        return self._text

    def contains(self, x: Any) -> bool:
        """Whether it is a text."""
        return isinstance(x, str)


def text(length: int, words: str) -> str:
    """A text of these words, cut at so many characters."""
    return (words * (length // len(words) + 1))[:length]


class Tells(gym.Env[Any, Any]):
    """Tells a text in each step, or is told one."""

    def __init__(self, what: str, length: int, words: str) -> None:
        """Takes where the texts are: one of PLACES."""
        charset = "".join(sorted(set("0123456789" + "".join(WORDS.values()))))
        self.observation_space = self.action_space = gym.spaces.Text(LONGEST, charset=charset)
        self._what, self._rest, self._count = what, text(length - 8, words), 0

    def _text(self, where: str) -> str:
        """A text that no one has seen before, where they belong."""
        return f"{self._count:08}{self._rest}" if where == self._what else "ok"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the first observation."""
        return self._text("observations"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the next one."""
        self._count += 1
        info = {"text": self._text("infos")} if self._what == "infos" else {}
        return self._text("observations"), float(len(action)), False, False, info


class Free(gym.Wrapper[Any, Any, Any, Any]):
    """An env of the limit: its actions are made by what samples them quickly."""

    def __init__(self, env: Tells, length: int, words: str) -> None:
        """Replaces the action space."""
        super().__init__(env)
        self.action_space = Texts(length, words)


def contender(make: Callable[[], VectorEnv[Any, Any, Any]], actions: tuple[str, ...]) -> Stepper:
    """Makes and resets a vector env that is stepped with these actions."""
    envs = make()
    kept: list[Any] = [envs.reset(seed=0)]

    def step(_: Any) -> None:
        kept[0] = envs.step(actions)

    return Stepper(step, lambda: None, envs.num_envs, close=envs.close)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--length", nargs="+", type=int, default=[20, 1000, 16_000, 64_000])
    parser.add_argument("--words", nargs="+", choices=WORDS, default=list(WORDS))
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contender")
    parser.add_argument("--systems", nargs="+", default=[OURS, ASYNC, SYNC])
    parser.add_argument("--shared", action="store_true", help="AsyncVectorEnv's shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    n = options.num_envs
    print(described(machine()))
    print(f"\n{n} envs, {options.num_workers} workers\n")
    print("| texts in | characters | system | batch step, µs | spread | steps/s | of the limit |")
    print("|---|--:|---" + "|--:" * 4 + "|")
    rows: list[dict[str, Any]] = []
    for what, words, length in product(options.what, options.words, options.length):
        make = partial(Tells, what, length, WORDS[words])
        given = length if what == "actions" else 2
        actions = (text(given, WORDS[words]),) * n
        systems: dict[str, Callable[[], VectorEnv[Any, Any, Any]]] = {
            OURS: partial(shmvec.ShmVectorEnv, [make] * n, num_workers=options.num_workers),
            ASYNC: partial(AsyncVectorEnv, [make] * n, shared_memory=options.shared),
            SYNC: partial(SyncVectorEnv, [make] * n),
        }
        results = race(
            {name: partial(contender, systems[name], actions) for name in options.systems},
            options.seconds,
            limit=[lambda make=make, given=given, w=WORDS[words]: Free(make(), given, w)],
        )
        for system, result in results.items():
            row = {
                "what": what,
                "words": words,
                "length": length,
                "system": system,
                **result.figures(results[LIMIT]),
            }
            rows.append(row)
            print(line(what, f"{length:,} {words}", system, *cells(row)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
