"""The small word problems: two steps, numbers 2 to 9, four templates. Pure.

A problem is a tuple (template, x, y, z) dressed with names and an object. Which split it belongs to hangs on the
tuple alone (its md5), so that no split ever sees another's arithmetic: of every 16 tuples about 13 train, 1
validates, 2 test. Settings are chosen on validation; nobody tunes on test.

Each problem has two correct answers: worked (`9+5=14`, `14+3=17`, `#### 17` on lines) and direct (`#### 17`).
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

import msgspec

PRONOUNS = {"Tom": "He", "Sam": "He", "Leo": "He", "Ann": "She", "Eva": "She", "Kim": "She"}
OBJECTS = ("pens", "eggs", "cups", "figs", "nuts", "hats")
SPLITS = ("train", "validation", "test")
_NUMBERS = range(2, 10)


class Tuple(msgspec.Struct, frozen=True, order=True):
    """The arithmetic of a problem. Templates: 0 is x+y-z, 1 is x-y+z, 2 is x*y+z, 3 is x+z+y."""

    template: int
    x: int
    y: int
    z: int

    @property
    def split(self) -> str:
        digest = hashlib.md5(f"{self.template},{self.x},{self.y},{self.z}".encode(), usedforsecurity=False).digest()
        place = digest[0] % 16
        return "train" if place < 13 else "validation" if place < 14 else "test"

    @property
    def allowed(self) -> bool:
        """No intermediate value is negative, and products stay small."""
        x, y, z = self.x, self.y, self.z
        return (x + y >= z, x >= y, x <= 4 and y <= 4, x >= y)[self.template]

    @property
    def steps(self) -> tuple[tuple[int, str, int, int], tuple[int, str, int, int]]:
        """Two steps (left, operator, right, result); the first result is the second's left."""
        x, y, z = self.x, self.y, self.z
        first, second = ((("+", y), ("-", z)), (("-", y), ("+", z)), (("*", y), ("+", z)), (("+", z), ("+", y)))[
            self.template
        ]
        middle = _apply(x, *first)
        return (x, *first, middle), (middle, *second, _apply(middle, *second))


class Problem(msgspec.Struct, frozen=True):
    """A tuple and its words. The prompt that a model sees is the question and a newline (the chat template adds it)."""

    arithmetic: Tuple
    question: str

    @property
    def answer(self) -> str:
        return str(self.arithmetic.steps[1][3])

    @property
    def direct(self) -> str:
        return f"#### {self.answer}"

    @property
    def worked(self) -> str:
        lines = [f"{left}{operator}{right}={result}" for left, operator, right, result in self.arithmetic.steps]
        return "\n".join([*lines, self.direct])


def tuples_of(split: str) -> tuple[Tuple, ...]:
    """All tuples of a split, in order. The three splits are disjoint and together have 1,125."""
    every = itertools.starmap(Tuple, itertools.product(range(4), _NUMBERS, _NUMBERS, _NUMBERS))
    return tuple(item for item in every if item.allowed and item.split == split)


def problems(split: str, seed: int) -> Iterator[Problem]:
    """An endless stream of problems of a split: template, then tuple, then words, each drawn evenly."""
    by_template = [[item for item in tuples_of(split) if item.template == template] for template in range(4)]
    rng = random.Random(f"{split}/{seed}")
    while True:
        yield _dress(rng.choice(rng.choice(by_template)), rng)


def _dress(arithmetic: Tuple, rng: random.Random) -> Problem:
    first, second, third = rng.sample(sorted(PRONOUNS), 3)
    thing = rng.choice(OBJECTS)
    x, y, z = arithmetic.x, arithmetic.y, arithmetic.z
    question = (
        f"{first} has {x} {thing}. {PRONOUNS[first]} buys {y} and loses {z}. How many {thing}?",
        f"{first} had {x} {thing}, gave {y} away and got {z}. How many {thing}?",
        f"{first} has {y} bags of {x} {thing} and {z} more. How many {thing}?",
        f"{first} has {x} {thing}, {second} {z} and {third} {y}. How many in all?",
    )[arithmetic.template]
    return Problem(arithmetic, question)


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]
