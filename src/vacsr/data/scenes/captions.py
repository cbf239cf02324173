"""Captions: a claim that is true of a scene is drawn from it, split into facts, and worded in one of many ways.

The facts of a claim decide how partly true scenes are graded:

- the background is one fact;
- the shape of a thing is one fact, each property one more ("a star", "a red star", "a large star"), and of several
  properties, that one thing has them all. So a blue star earns something where a red one was asked for, and a large
  blue star beside a small red one earns all but the last;
- "two stars" adds to "a star" that there are at least two, and that there are no more;
- a relation is one fact between the shapes, and one more between the things as described.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vacsr.data.scenes.facts import SIDES, WAYS, AtLeast, Exactly, Fact, IsBackground, Kind, Related, SceneTable
from vacsr.data.scenes.objects import Scene, Thing, draw_weighted
from vacsr.data.synthetic import enumerate_words

_PLANS = {"place": 2, "number": 2, "one": 37, "two": 24, "three": 9, "relation": 26}
"""What a caption is about, and how often: the background, a number, one to three things, two in relation."""
_BACKGROUND = {"number": 0.6, "one": 0.6, "two": 0.4, "three": 0.25, "relation": 0.35}
"""How often such a caption says the background too."""
_THINGS = {"one": 1, "two": 2, "three": 3}
_SAYS_COLOUR = 0.9  # how often a caption of a subject does
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
NOUNS: Mapping[str, tuple[str, ...]] = {
    "ball": ("ball", "ball", "beach ball"),
    "gift": ("gift", "present"),
    "star": ("star",),
    "heart": ("heart",),
    "moon": ("moon", "moon", "crescent moon"),
    "house": ("house", "house", "cottage"),
    "tree": ("tree", "tree", "fir tree"),
    "fish": ("fish",),
    "boat": ("boat", "boat", "sailing boat"),
    "mushroom": ("mushroom", "mushroom", "toadstool"),
    "": ("thing", "object"),
}
"""The first is the usual word; "" stands for a thing of any shape."""
ADJECTIVES: Mapping[str, tuple[str, ...]] = {
    "small": ("small", "little"),
    "large": ("large", "big"),
    "purple": ("purple", "purple", "violet"),
}
"""Other properties are said by their own name."""
WHERE: Mapping[str, tuple[str, ...]] = {
    "meadow": ("in a meadow", "on a green meadow", "among green hills", "in a green field"),
    "beach": ("on a beach", "at the beach", "by the sea", "on a sandy beach"),
    "snow": ("in the snow", "in a snowy landscape", "on a snowy day"),
    "night": ("at night", "under a night sky", "in the dark of night"),
    "city": ("in the city", "in a city at dusk", "in front of a skyline"),
    "desert": ("in the desert", "in a desert", "among sand dunes"),
    "underwater": ("under water", "in the deep sea", "under the sea"),
}
SIGHT: Mapping[str, tuple[str, ...]] = {
    "meadow": ("a meadow", "a green meadow", "a green field"),
    "beach": ("a beach", "a sandy beach", "the seaside"),
    "snow": ("a snowy landscape", "snow-covered hills", "a snowy day"),
    "night": ("a night sky", "a clear night", "a dark night"),
    "city": ("a city at dusk", "a city skyline", "a skyline at dusk"),
    "desert": ("a desert", "sand dunes", "a sandy desert"),
    "underwater": ("the deep sea", "a view under water", "an underwater scene"),
}
SIDE_WORDS: Mapping[str, tuple[str, ...]] = {
    "left": ("on the left", "on the left side"),
    "right": ("on the right", "on the right side"),
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
}
_FORWARD: Mapping[str, tuple[str, ...]] = {"left of": ("left of", "to the left of"), "above": ("above", "over")}
_BACKWARD: Mapping[str, tuple[str, ...]] = {"left of": ("right of", "to the right of"), "above": ("below", "under")}
_WITH: Mapping[str, tuple[str, str]] = {"left of": ("to its left", "to its right"), "above": ("above it", "below it")}
_OPENINGS = ("a picture of", "a scene with", "a drawing of")


@dataclass(frozen=True)
class Mention:
    """Things, as a caption speaks of them."""

    kind: Kind
    number: int | None = None  # None is "a star": one or more
    exact: bool = True  # "two stars", not "at least two stars"


@dataclass(frozen=True)
class Claim:
    """All that a caption says."""

    mentions: tuple[Mention, ...] = ()
    way: str | None = None  # how the first of two mentions stands to the second, one of WAYS
    background: str | None = None


def facts_of(claim: Claim) -> tuple[Fact, ...]:
    """The facts that a claim states.

    >>> star = Mention(Kind("star", colour="red"), number=2)
    >>> [type(fact).__name__ for fact in facts_of(Claim((star,), background="beach"))]
    ['AtLeast', 'AtLeast', 'AtLeast', 'Exactly', 'IsBackground']
    """
    facts: list[Fact] = [fact for mention in claim.mentions for fact in _mention_facts(mention)]
    if claim.way is not None:
        first, second = (mention.kind for mention in claim.mentions)
        facts += [Related(Kind(first.shape), claim.way, Kind(second.shape)), Related(first, claim.way, second)]
    if claim.background is not None:
        facts.append(IsBackground(claim.background))
    return tuple(dict.fromkeys(facts))


def _mention_facts(mention: Mention) -> Iterator[Fact]:
    kind, noun = mention.kind, Kind(mention.kind.shape)
    if noun != Kind():
        yield AtLeast(noun, 1)
    for name in ("colour", "size", "side"):
        if getattr(kind, name) is not None:
            yield AtLeast(replace(noun, **{name: getattr(kind, name)}), 1)
    if kind != Kind():
        yield AtLeast(kind, 1)
    if mention.number is not None:
        yield AtLeast(kind, mention.number)
        if mention.exact:
            yield Exactly(kind, mention.number)


def draw_claim(scene: Scene, table: SceneTable, rng: random.Random) -> Claim:
    """Something true of the scene, short or long; ``table`` holds that scene alone."""
    plan = draw_weighted(_PLANS, rng)
    related = _related(scene, table) if plan == "relation" else []
    if plan == "relation" and not related:
        plan = "one"
    if plan == "place":
        return Claim(background=scene.background)
    background = scene.background if rng.random() < _BACKGROUND[plan] else None
    if plan == "relation":
        one, way, other = rng.choice(related)
        first, second = _draw_kinds((one, other), rng)
        return Claim((Mention(first), Mention(second)), way, background)
    if plan == "number":  # of things in all, or of one colour
        kind = Kind(colour=rng.choice(scene.things).colour if rng.random() < 0.5 else None)
        return Claim((Mention(kind, int(table.count(kind)[0])),), background=background)
    kinds = _draw_kinds(_draw_things(scene, _THINGS[plan], rng), rng)
    if len(kinds) == 1:
        kinds = [_maybe_placed(kinds[0], table, rng)]
    return Claim(tuple(_counted(kind, table, rng) for kind in kinds), background=background)


def draw_subject_claim(scene: Scene, _table: SceneTable, rng: random.Random) -> Claim:
    """Something true of the subject: what it is, and mostly its colour. Never the background: towers learn it first."""
    subject = max(scene.things, key=lambda thing: thing.radius)
    colour = subject.colour if rng.random() < _SAYS_COLOUR else None
    return Claim((Mention(Kind(subject.shape, colour)),))


def _related(scene: Scene, table: SceneTable) -> list[tuple[Thing, str, Thing]]:
    """Who is left of or above whom, among things that words can tell apart."""
    pairs = product(enumerate(scene.things), enumerate(scene.things), WAYS)
    return [
        (one, way, other)
        for (row, one), (column, other), way in pairs
        if table.related[way][0, row, column] and (one.shape, one.colour) != (other.shape, other.colour)
    ]


def _draw_things(scene: Scene, wanted: int, rng: random.Random) -> list[Thing]:
    """Up to ``wanted`` things, no two of one shape and colour: each can be told from the others in words."""
    chosen: dict[tuple[str, str], Thing] = {}
    for thing in rng.sample(scene.things, len(scene.things)):
        chosen.setdefault((thing.shape, thing.colour), thing)
    return list(chosen.values())[:wanted]


def _draw_kinds(things: Sequence[Thing], rng: random.Random) -> list[Kind]:
    """Each by its shape and some properties; a single thing more fully, things of one shape by colour."""
    shapes = [thing.shape for thing in things]
    colour_often, size_often = (0.85, 0.4) if len(things) == 1 else (0.45, 0.2)
    kinds = []
    for thing in things:
        colour = thing.colour if shapes.count(thing.shape) > 1 or rng.random() < colour_often else None
        size = thing.size if thing.size != "medium" and rng.random() < size_often else None
        kinds.append(Kind(thing.shape, colour, size))
    return kinds


def _maybe_placed(kind: Kind, table: SceneTable, rng: random.Random) -> Kind:
    """Sometimes add a side, and sometimes leave out the shape."""
    if kind.colour is not None and rng.random() < 0.05:
        return Kind(colour=kind.colour)
    sides = [side for side in SIDES if table.count(replace(kind, side=side))[0]]
    return replace(kind, side=rng.choice(sides)) if sides and rng.random() < 0.25 else kind


def _counted(kind: Kind, table: SceneTable, rng: random.Random) -> Mention:
    """Say how many there are: mostly where there are several."""
    number, luck = int(table.count(kind)[0]), rng.random()
    if number == 1:
        return Mention(kind, 1) if luck < 0.06 else Mention(kind)
    if luck < 0.65:
        return Mention(kind, number)
    return Mention(kind, rng.randint(2, number), exact=False) if luck < 0.8 else Mention(kind)


def say(claim: Claim, rng: random.Random) -> str:
    """One wording.

    >>> fish, house = Mention(Kind("fish", "yellow", "small")), Mention(Kind("house", "red"))
    >>> say(Claim((fish, house), "left of", "snow"), random.Random(0))
    'a red house to the right of a small yellow fish in a snowy landscape'
    """
    if not claim.mentions:
        sight = rng.choice(SIGHT[claim.background or ""])
        return rng.choice((sight, sight, f"a picture of {sight}"))
    shapes = [mention.kind.shape or "" for mention in claim.mentions]
    nouns = {shape: rng.choice(NOUNS[shape]) for shape in shapes}  # one word a shape: no "house and cottage"
    phrases = [mention_words(mention, nouns, rng=rng) for mention in claim.mentions]
    body = enumerate_words(phrases) if claim.way is None else _relation_words(phrases, claim.way, rng)
    return _framed(body, claim=claim, rng=rng)


def _framed(body: str, *, claim: Claim, rng: random.Random) -> str:
    """Add the background and an opening. The background comes first if the body ends in a side."""
    placed = any(mention.kind.side for mention in claim.mentions)
    verb = "there are" if (claim.mentions[0].number or 1) > 1 else "there is"
    openings = [opening for opening in (*_OPENINGS, verb) if not (opening.endswith("with") and " with " in body)]
    opening = rng.choice(openings) if rng.random() < 0.3 else ""
    if claim.background is None:
        return f"{opening} {body}".strip()
    where = rng.choice(WHERE[claim.background])
    if placed or rng.random() < 0.15:
        return f"{where}, {body}" if rng.random() < 0.6 else f"{where} {verb} {body}"
    return f"{opening} {body} {where}".strip()


def _relation_words(phrases: Sequence[str], way: str, rng: random.Random) -> str:
    """The relation of A to B, from either end."""
    first, second = phrases
    luck = rng.random()
    if luck < 0.4:
        return f"{first} {rng.choice(_FORWARD[way])} {second}"
    if luck < 0.7:
        return f"{second} {rng.choice(_BACKWARD[way])} {first}"
    ahead, behind = _WITH[way]
    return f"{second} with {first} {ahead}" if luck < 0.85 else f"{first} with {second} {behind}"


def mention_words(mention: Mention, nouns: Mapping[str, str], *, rng: random.Random) -> str:
    """A noun phrase; ``nouns`` has the word for each shape."""
    kind = mention.kind
    adjectives = [rng.choice(ADJECTIVES.get(word, (word,))) for word in (kind.size, kind.colour) if word]
    if kind.shape is None and mention.number is None and rng.random() < 0.5:
        words = f"something {' and '.join(adjectives)}"
    else:
        words = _quantified(mention, " ".join([*adjectives, nouns[kind.shape or ""]]), rng)
    return f"{words} {rng.choice(SIDE_WORDS[kind.side])}" if kind.side else words


def _quantified(mention: Mention, noun: str, rng: random.Random) -> str:
    """Put "a", a number or a bound before the noun."""
    number = mention.number
    if number is None:
        return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"  # no silent h and no long u among the words
    several = noun if noun.endswith("fish") else f"{noun}s"
    if not mention.exact:
        bound = rng.choice((f"at least {NUMBERS[number]}", f"{NUMBERS[number]} or more"))
        return f"{bound} {several}"
    if number == 1:
        return f"{rng.choice(('just one', 'only one', 'a single'))} {noun}"
    return f"{NUMBERS[number]} {several}"
