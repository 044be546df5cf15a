"""Made-up text in four domains, endless and deterministic: what `tiny` is trained and tested on.

Row i of (domain, seed) depends on nothing else, so that a longer list starts with the shorter one. Roles that
must not share rows take different seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

DOMAINS = ("arithmetic", "records", "stories", "dialogue")

NAMES = ["Anna", "Ben", "Emma", "John", "Liam", "Lucy", "Maria", "Noah", "Omar", "Priya", "Sofia", "Tom"]
THINGS = ["apples", "balloons", "books", "cards", "coins", "cookies", "marbles", "pencils", "stickers"]
PLACES = ["castle", "forest", "garden", "harbor", "market", "mountain", "river", "village"]
ANIMALS = ["bear", "bird", "cat", "dog", "dragon", "fox", "horse", "mouse"]
MOODS = ["brave", "clever", "grumpy", "kind", "lonely", "quiet", "small", "wise"]


class QuestionRow(NamedTuple):
    """A request: the response is what the text goes on with after the prompt."""

    prompt: str
    response: str


class ChoiceRow(NamedTuple):
    """A multiple-choice question about the domain; `answer` is the index of the right one of four choices."""

    question: str
    choices: list[str]
    answer: int


def documents(domain: str, count: int, seed: int) -> list[str]:
    """`count` texts of a domain, 20 to 250 words each: the question rows of the same seed, joined."""
    return [row.prompt + row.response for row in question_rows(domain, count, seed)]


def question_rows(domain: str, count: int, seed: int) -> list[QuestionRow]:
    """`count` prompts with responses; a prompt shows one to five pieces before the one it asks for."""
    make = _piece(domain)
    rows: list[QuestionRow] = []
    for index in range(count):
        random = Random(f"{domain}/{seed}/{index}")
        shown = ["".join(make(random)) for _ in range(random.randint(1, 5))]
        start, rest = make(random)
        rows.append(QuestionRow("".join(shown) + start, rest))
    return rows


def choice_rows(domain: str, count: int, seed: int) -> list[ChoiceRow]:
    """`count` questions whose right choice continues one piece of the domain and whose wrong ones do not."""
    make = _piece(domain)
    rows: list[ChoiceRow] = []
    for index in range(count):
        random = Random(f"choice/{domain}/{seed}/{index}")
        start, rest = make(random)
        choices = [rest.strip()]
        named = [name for name in NAMES if name in start]
        while len(choices) < 4:
            other = make(random)[1].strip()
            if other not in choices and not any(name in other for name in named):
                choices.append(other)
        order = random.sample(range(4), 4)
        rows.append(ChoiceRow(start, [choices[item] for item in order], order.index(0)))
    return rows


def _piece(domain: str) -> Callable[[Random], tuple[str, str]]:
    """The function that makes one piece of text of the domain, cut in two."""
    makers = {"arithmetic": _sum, "records": _order, "stories": _story, "dialogue": _talk}
    if domain not in makers:
        raise ValueError(f"domain is '{domain}', expected one of {DOMAINS}")
    return makers[domain]


def _sum(random: Random) -> tuple[str, str]:
    first, second = random.sample(NAMES, 2)
    thing = random.choice(THINGS)
    x, y, z = random.randint(12, 60), random.randint(2, 9), random.randint(2, 11)
    kind = random.randrange(3)
    if kind == 0:
        asked = f"{first} has {x} {thing}, gets {z} more from {second} and gives away {y}. How many are left?"
        solved = f"{x} + {z} = {x + z}. {x + z} - {y} = {x + z - y}. The answer is {x + z - y}."
    elif kind == 1:
        asked = (
            f"{first} buys {y} boxes with {z} {thing} each for {x} dollars a box. How many {thing} is that?"
        )
        solved = f"{y} * {z} = {y * z}. The answer is {y * z} {thing}."
    else:
        asked = f"A train goes {x} miles an hour for {y} hours. How far does it go?"
        solved = f"{x} * {y} = {x * y}. The answer is {x * y} miles."
    return f"Question: {asked}\nAnswer:", f" {solved}\n"


def _order(random: Random) -> tuple[str, str]:
    buyer = random.choice(NAMES)
    rows = [
        {
            "id": random.randint(100, 999),
            "buyer": buyer,
            "item": random.choice(THINGS),
            "count": random.randint(1, 20),
            "paid": random.random() < 0.5,
        }
        for _ in range(random.randint(1, 2))
    ]
    text = json.dumps({"order": random.randint(1000, 9999), "buyer": buyer, "rows": rows})
    cut = text.index("[") + 1
    return text[:cut], text[cut:] + "\n"


def _story(random: Random) -> tuple[str, str]:
    hero, other = random.sample(ANIMALS, 2)
    home, far = random.sample(PLACES, 2)
    mood, name = random.choice(MOODS), random.choice(NAMES)
    opening = (
        f"Once upon a time there was a {mood} {hero} named {name} who lived near the {home}. "
        + random.choice(
            [
                f"One morning {name} walked to the {far} and met a {random.choice(MOODS)} {other}.",
                f"Every day {name} dreamed of seeing the {far} and its {other}.",
            ]
        )
    )
    said = random.choice(
        [
            f'"Why are you so {random.choice(MOODS)}?" asked the {other}.',
            f'"I have lost my way," said the {other}, "please help me."',
        ]
    )
    ending = random.choice(
        [
            f"Together they crossed the {random.choice(PLACES)}, and from that day on they were friends.",
            f"{name} was afraid, but the {other} smiled and showed the way to the {far}.",
            f"In the end {name} came home to the {home} and was never {mood} again.",
        ]
    )
    return opening, f" {said} {ending}\n"


def _talk(random: Random) -> tuple[str, str]:
    first, second = random.sample(NAMES, 2)
    thing, place = random.choice(THINGS), random.choice(PLACES)
    question = f"{first}: Hi {second}, have you been to the {place} today?\n{second}:"
    answer = random.choice(
        [f"Yes, I went there to buy {thing}.", f"No, I stayed at home and counted my {thing}."]
    )
    reply = random.choice(["That sounds nice.", "How many did you get?", "I wish I could come with you."])
    last = random.choice(
        [
            f"I got {random.randint(2, 40)} {thing}.",
            f"You should come to the {place} next time.",
            "Maybe tomorrow we can go together.",
        ]
    )
    return question, f" {answer}\n{first}: {reply}\n{second}: {last}\n"
